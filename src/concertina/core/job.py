"""What a job is: its specification, the phases of its life and how the scheduler sees it.

This module knows nothing about policies, devices in particular, or where a job's numbers come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from concertina.core.errors import IllegalMoveError, InvalidJobError

Reserved: TypeAlias = tuple[tuple[float, int, int], ...]
"""(from when, index of the device type in `Cluster.types`, devices) that a policy has planned for a job."""


class JobPhase(Enum):
    """Where a job is in its life. `MOVES` lists what may follow what."""

    SUBMITTED = "submitted"  # known, not yet looked at by admission
    REJECTED = "rejected"  # refused by admission: an end, with a reason
    WAITING = "waiting"  # admitted, holds no devices (also after a preemption)
    RUNNING = "running"  # holds devices
    FINISHED = "finished"  # all its work is done
    CANCELLED = "cancelled"  # taken back by its user
    FAILED = "failed"  # ended by itself before its work was done

    @property
    def is_end(self) -> bool:
        """Whether nothing follows this phase."""
        return not MOVES[self]


MOVES: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.SUBMITTED: frozenset(  # it is measured before it is admitted: on devices that it may keep, or to its end
        {
            JobPhase.REJECTED,
            JobPhase.WAITING,
            JobPhase.RUNNING,
            JobPhase.CANCELLED,
            JobPhase.FINISHED,
            JobPhase.FAILED,
        },
    ),
    JobPhase.WAITING: frozenset(  # it may come to its end before it hears that its devices are gone
        {JobPhase.RUNNING, JobPhase.CANCELLED, JobPhase.FINISHED, JobPhase.FAILED},
    ),
    JobPhase.RUNNING: frozenset(
        {JobPhase.WAITING, JobPhase.FINISHED, JobPhase.CANCELLED, JobPhase.FAILED},
    ),
    JobPhase.REJECTED: frozenset(),
    JobPhase.FINISHED: frozenset(),
    JobPhase.CANCELLED: frozenset(),
    JobPhase.FAILED: frozenset(),
}


def check_move(job_id: str, history: tuple[JobPhase, ...], after: JobPhase) -> None:
    """Raise `IllegalMoveError` unless `after` may follow the last phase of `history`."""
    if after not in MOVES[history[-1]]:
        raise IllegalMoveError(job_id=job_id, history=tuple(p.value for p in history), wanted=after.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the user asked for. Times are seconds on the trace's (or the cluster's) clock."""

    id: str
    submit_s: float
    gpus: int
    """Devices asked for; what a static policy gives."""
    name: str = ""
    user: str = ""
    """User, team or virtual cluster: what quotas and fairness count by."""
    model: str | None = None
    batch_size: int | None = None
    """Global batch size (over all workers). With `model` it selects a scaling curve."""
    work: float | None = None
    """Iterations of `batch_size` samples until the job is done."""
    duration_s: float | None = None
    """How long it runs on `gpus` devices. At least one of `work` and `duration_s` is given."""
    deadline_s: float | None = None
    """Absolute. None: best effort."""
    soft: bool = False
    """A soft deadline is wanted, not promised: the job is never refused for it."""
    min_workers: int | None = None
    """Fewest workers the job can run on. None: 1 for a policy that resizes jobs."""
    max_workers: int | None = None
    """Most workers it can use. None: as many as its curve knows."""
    device_types: tuple[str, ...] = ()
    """The types it may run on. Empty: any."""
    mixed: bool = False
    """Whether one allocation may span several device types."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_range(self)


def _check_numbers(job: JobSpec) -> None:
    if not job.id:
        raise InvalidJobError(job_id=job.id, field="id", seen=job.id, needed="a name that is not empty")
    for field in ("submit_s", "work", "duration_s", "deadline_s"):
        value = getattr(job, field)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidJobError(job_id=job.id, field=field, seen=value, needed="a finite number, 0 or more")
    for field in ("gpus", "batch_size", "min_workers", "max_workers"):
        value = getattr(job, field)
        if value is not None and value < 1:
            raise InvalidJobError(job_id=job.id, field=field, seen=value, needed="1 or more")
    if job.work is None and job.duration_s is None:
        raise InvalidJobError(job_id=job.id, field="work", seen=None, needed="iterations or a duration")


def _check_range(job: JobSpec) -> None:
    low, high = job.min_workers, job.max_workers
    if low is not None and high is not None and low > high:
        raise InvalidJobError(job_id=job.id, field="min_workers", seen=low, needed=f"at most max_workers ({high})")
    if job.soft and job.deadline_s is None:
        raise InvalidJobError(job_id=job.id, field="soft", seen=True, needed="a deadline_s to be soft about")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as one round sees it: what was asked, and what was observed until now."""

    spec: JobSpec
    phase: JobPhase
    workers: tuple[tuple[str, int], ...] = ()
    """Devices held, by type: (("A100", 8),). Empty while it holds none."""
    placement: tuple[tuple[str, int], ...] = ()
    """Devices held, by node."""
    work_done: float = 0.0
    """Iterations behind it (seconds at `gpus` for a job without iterations)."""
    service_s: float = 0.0
    """Device-seconds received: what least-attained-service policies sort by."""
    executed_s: float = 0.0
    """Seconds it held any device."""
    waiting_since_s: float | None = None
    """When it last lost its devices (or was submitted). None while it holds some."""
    first_start_s: float | None = None
    resumes_s: float | None = None
    """When it is expected to make its first step on what it holds. None, or in the past: it trains."""
    promised_s: float | None = None
    """The deadline that admission promised."""
    level: int = 0
    stamp: float = 0.0
    """What the policy noted about the job in an earlier round (a queue level, a time)."""
    reserved: Reserved = ()
    """What the policy has planned for it until its end. Empty: nothing, or not known any more."""

    @property
    def worker_count(self) -> int:
        """Devices held, over all types."""
        return sum(count for _, count in self.workers)
