"""What a user may have at once, and what is on its way counts."""

import pytest

from concertina.cluster.mirror import Job
from concertina.cluster.records import JobRequest, JobState, Spent, User
from concertina.core.job import JobPhase
from concertina.server.errors import ApiError
from concertina.server.limits import Usage, check_quota, usage_of


def request(name: str, user: str = "a", most: int = 4) -> JobRequest:
    return JobRequest(id=name, name=name, user=user, script="/s", virtual=most)


def job(name: str, phase: JobPhase, user: str = "a", service_s: float = 0.0) -> Job:
    return Job(request=request(name, user), state=JobState(id=name, phase=phase, service_s=service_s))


def test_usage_counts_live_jobs_of_the_user_and_those_on_their_way_once() -> None:
    jobs = [
        job("1", JobPhase.RUNNING, service_s=3600.0),
        job("2", JobPhase.FINISHED, service_s=1800.0),
        job("3", JobPhase.WAITING, user="b"),
    ]
    pending = [request("1"), request("4", most=2), request("5", user="b")]
    assert usage_of("a", jobs, pending) == Usage(jobs=2, slots=6, gpu_hours=1.5)
    forgotten = Spent(user="a", service_s=7200.0)
    assert usage_of("a", jobs, pending, forgotten) == Usage(jobs=2, slots=6, gpu_hours=3.5)


@pytest.mark.parametrize(
    ("limits", "usage", "status"),
    [
        ({}, Usage(jobs=10_000, slots=10_000, gpu_hours=1e9), None),
        ({"max_jobs": 2}, Usage(jobs=1), None),
        ({"max_jobs": 2}, Usage(jobs=2), 429),
        ({"max_slots": 8}, Usage(slots=4), None),
        ({"max_slots": 8}, Usage(slots=5), 429),
        ({"max_slots": 3}, Usage(), 403),
        ({"max_gpu_hours": 2.0}, Usage(gpu_hours=1.9), None),
        ({"max_gpu_hours": 2.0}, Usage(gpu_hours=2.0), 403),
    ],
)
def test_a_limit_holds_from_the_first_job_beyond_it(limits: dict[str, float], usage: Usage, status: int | None) -> None:
    user = User(name="a", token="", **limits)  # type: ignore[arg-type]
    if status is None:
        check_quota(user, usage, request("new"))
        return
    with pytest.raises(ApiError) as refused:
        check_quota(user, usage, request("new"))
    assert refused.value.status == status
    assert refused.value.message
    assert refused.value.hint
