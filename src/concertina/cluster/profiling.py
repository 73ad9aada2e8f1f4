"""Jobs of a kind that nobody has seen yet are measured before admission: how, and when it is enough. Pure.

Such a job trains for real, on its fewest workers, which the policy finds for it, and on others as long as nobody wants
them. A job with a strict deadline is measured at 1, 2, 4 ... workers, as far as slots are idle; the others need no
answer to hold on to, and one figure is enough. What was not measured follows the law of diminishing returns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from concertina.cluster.records import Curve
from concertina.cluster.settle import known_work
from concertina.cluster.views import Live
from concertina.core.job import JobPhase

MOST_SECONDS = 45.0  # after the first figure
COUNT_SECONDS = 20.0  # for one count, after the change to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How measuring a job goes on."""

    workers: int  # that it should have now
    over: bool = False
    reason: str = ""


def measurers(jobs: Iterable[Live], stored: Mapping[str, Curve]) -> dict[str, str]:
    """Kind -> the job that is (to be) measured for it: the first of each kind without a curve."""
    found: dict[str, str] = {}
    for job in jobs:
        if job.state.phase is JobPhase.SUBMITTED and job.state.curve not in stored:
            found.setdefault(job.state.curve, job.id)
    return found


def walk(job: Live, idle: int, now: float) -> Walk:
    """What comes next for a job that is being measured; `idle` slots are wanted by nobody else."""
    seen, state = job.seen, job.state
    speeds = {}
    if seen is not None and seen.attempt == state.attempt:
        speeds = {count: speed for count, speed in seen.speeds.items() if speed > 0}
    if not speeds:
        return Walk(workers=job.fewest, reason="it is measured first: nobody knows yet how fast it is")
    if not job.strict:
        return Walk(workers=job.fewest, over=True)
    since = now - (state.profiled_s if state.profiled_s is not None else now)
    changed = now - (state.history[-1].at_s if state.history else now)
    here = len(state.slots)
    if since > MOST_SECONDS:
        return Walk(workers=here, over=True)
    if here not in speeds and changed < COUNT_SECONDS and here:
        return Walk(workers=here, reason=state.reason)
    after = next((count for count in _counts(job) if count > max(here, *speeds)), None)
    if after is None or after - job.fewest > idle:
        return Walk(workers=here, over=True)
    return Walk(workers=after, reason=f"it is measured on {after} workers while these slots are idle")


def _counts(job: Live) -> list[int]:
    """1, 2, 4 ... as far as it may grow."""
    found, count = [], job.fewest
    while count <= job.most:
        found.append(count)
        count *= 2
    return found


def refusal(job: Live) -> str:
    """Why a measured job can not be promised anything at all; empty if that is no reason."""
    seen = job.seen
    total = seen.total_steps if seen is not None else 0
    if job.strict and (job.state.work or known_work(job.request.steps, total)) is None:
        return (
            "a deadline needs to know how much there is to do: this script does not say how many steps it makes; "
            "submit it with --steps, or with a soft deadline"
        )
    return ""


def begun(job: Live, now: float) -> Live:
    """Notes when the first figure came."""
    seen, state = job.seen, job.state
    if state.profiled_s is None and seen is not None and seen.attempt == state.attempt and seen.speeds:
        return replace(job, state=replace(state, profiled_s=now))
    return job
