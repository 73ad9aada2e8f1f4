"""What a user may have at once. Pure: counts in, a refusal or nothing out."""

from collections.abc import Iterable
from dataclasses import dataclass

from concertina.cluster.mirror import Job
from concertina.cluster.records import JobRequest, Spent, User
from concertina.cluster.slots import counted
from concertina.server.errors import ApiError

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What somebody has now."""

    jobs: int = 0  # that have not ended
    slots: int = 0  # that these could have together
    gpu_hours: float = 0.0  # ever received


def usage_of(user: str, jobs: Iterable[Job], pending: Iterable[JobRequest] = (), spent: Spent | None = None) -> Usage:
    """`pending`: submitted, but not in the mirror yet. `spent`: by jobs that are forgotten."""
    before_s = spent.service_s if spent is not None else 0.0
    mine = [job for job in jobs if job.request.user == user]
    there = {job.id for job in mine}
    live = [job.request for job in mine if not job.state.phase.is_end]
    live += [request for request in pending if request.user == user and request.id not in there]
    return Usage(
        jobs=len(live),
        slots=sum(request.most for request in live),
        gpu_hours=(before_s + sum(job.state.service_s for job in mine)) / HOUR_SECONDS,
    )


def check_quota(user: User, usage: Usage, request: JobRequest) -> None:
    """Raises ApiError: 403 if waiting does not help, 429 if it does."""
    if user.max_gpu_hours and usage.gpu_hours >= user.max_gpu_hours:
        raise _quota(
            403,
            f"user {user.name} has used {usage.gpu_hours:.1f} of {user.max_gpu_hours:g} GPU-hours",
            "ask whoever runs the cluster for more",
        )
    if user.max_slots and request.most > user.max_slots:
        raise _quota(
            403,
            f"this job could grow to {request.most} slots and user {user.name} may have {user.max_slots}",
            f"submit it with max_workers {user.max_slots} or less (--max)",
        )
    if user.max_jobs and usage.jobs >= user.max_jobs:
        raise _quota(
            429,
            f"user {user.name} has {counted(usage.jobs, 'job')} not ended yet and may have {user.max_jobs}",
            "wait until one ends, or cancel one",
        )
    room = max(1, user.max_slots - usage.slots)
    if user.max_slots and usage.slots + request.most > user.max_slots:
        raise _quota(
            429,
            f"the jobs of user {user.name} could have {usage.slots} slots already; with {request.most} more they "
            f"would pass the limit of {user.max_slots}",
            f"wait until one ends, or submit it with max_workers {room} or less (--max)",
        )


def _quota(status: int, message: str, hint: str) -> ApiError:
    return ApiError(status, "quota", message, hint)
