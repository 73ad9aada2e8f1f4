"""What the keepers' words mean for a job: progress, service, its end, and whether a keeper has to be started. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

from concertina.cluster.records import Activity, Change, JobSeen, JobState
from concertina.cluster.slots import in_order, keeper_is_over, occupied
from concertina.cluster.views import Live
from concertina.core.job import JobPhase

PATIENT_SECONDS = 5.0  # for a keeper to leave a slot that somebody of this cluster waits for
HURRIED_SECONDS = 2.0  # and one that was reclaimed: by force if need be
HISTORY = 100  # lines kept of a job's story
MOST_UNHEARD = 20  # the same, of those that never said a word: a controller may have died before it started one
MOST_PAUSE_SECONDS = 30.0
MOST_FAILURES = 3  # keepers that may vanish in a row without any progress between them
MISSING_SECONDS = 20.0  # a keeper that is there but does not renew its lease stands still
STUBBORN_SECONDS = 60.0  # a keeper that was told to end has so long
PAUSE_SECONDS = 1.0  # between two attempts at least, doubled with each failure
SLOWEST = 5  # failures, with which the pause is the longest


def change(
    state: JobState,
    now: float,
    reason: str,
    *,
    slots: Iterable[str] | None = None,
    phase: JobPhase | None = None,
    vacate_s: float = PATIENT_SECONDS,
) -> JobState:
    """The job after a decision: the only place where slots and phase change. A new order if either does."""
    after = state.slots if slots is None else in_order(slots)
    phase = phase or state.phase
    if phase.is_end:
        after = ()
    if after == state.slots and phase is state.phase:
        return state if reason == state.reason else replace(state, reason=reason)
    line = Change(at_s=now, workers=len(after), reason=reason, step=int(state.done))
    return replace(
        state,
        phase=phase,
        slots=after,
        reason=reason,
        order=state.order + 1,
        vacate_s=vacate_s,
        releasing=in_order({*state.releasing, *state.slots} - {*after}),
        waiting_since_s=None if after else (now if state.slots else state.waiting_since_s),
        first_start_s=now if after and state.first_start_s is None else state.first_start_s,
        begun_s=now if after and not state.slots else state.begun_s,
        trains_s=state.trains_s if after and state.slots else 0.0,
        ended_s=now if phase.is_end else None,
        profiling=state.profiling and not phase.is_end,
        reserved=() if phase.is_end else state.reserved,
        history=(*state.history, line)[-HISTORY:],
    )


def settled(job: Live, now: float, *, gone: bool) -> JobState:
    """The job with its progress and service until now, slots that are free again, and its end if it has come."""
    state, seen = _accounted(job.state, now), job.seen
    if state.releasing:
        used = occupied(state, seen, gone=gone)
        state = replace(state, releasing=tuple(slot for slot in state.releasing if slot in used))
    if seen is None or seen.attempt != state.attempt:
        return state
    state = _progressed(state, seen, job)
    return state if state.phase.is_end else _ended(state, seen, now)


def _accounted(state: JobState, now: float) -> JobState:
    passed = max(now - state.settled_s, 0.0) if state.settled_s else 0.0
    if not state.slots:
        return replace(state, settled_s=now) if state.settled_s and state.attempt else state
    return replace(
        state,
        settled_s=now,
        service_s=state.service_s + len(state.slots) * passed,
        executed_s=state.executed_s + passed,
    )


def _progressed(state: JobState, seen: JobSeen, job: Live) -> JobState:
    work = known_work(job.request.steps, seen.total_steps) or state.work
    trains_s = seen.trains_s if state.slots and seen.trains_s >= state.started_s else 0.0
    if (float(seen.step), work, trains_s) == (state.done, state.work, state.trains_s):
        return state
    return replace(state, done=float(seen.step), work=work, trains_s=trains_s)


def known_work(steps: int, total_steps: int) -> float | None:
    """Steps in all: what was asked for is an upper bound to what the script makes by itself. None: not known."""
    known = [count for count in (steps, total_steps) if count > 0]
    return float(min(known)) if known else None


def _ended(state: JobState, seen: JobSeen, now: float) -> JobState:
    if seen.activity is Activity.FINISHED:
        state = change(state, now, "all its work is done", phase=JobPhase.FINISHED)
        return replace(state, exit=seen.exit if seen.exit is not None else 0)
    if seen.activity is Activity.FAILED:
        error = seen.error or "it ended with an error that nobody told"
        state = change(state, now, f"it failed: {error}", phase=JobPhase.FAILED)
        return replace(state, exit=seen.exit, error=error)
    if seen.activity is Activity.CANCELLED and state.slots:
        why = "its keeper was told to stop by somebody else than the controller"
        return change(state, now, why, phase=JobPhase.CANCELLED)
    return state


class Need(Enum):
    """What has to be done about a job's keeper."""

    NOTHING = "nothing"
    START = "start"
    RESTART = "restart"  # it vanished
    FAIL = "fail"  # too often
    END = "end"  # it does not end by itself


def need(job: Live, now: float, *, gone: bool, registered: bool, missing_s: float = 0.0) -> Need:
    """`registered`: a keeper holds the job's lease. `gone`: nothing is left of the last one. `missing_s`: for so long
    something of it was there without a lease."""
    state = job.state
    wanted = bool(state.slots) and not state.phase.is_end
    if keeper_is_over(state, job.seen, gone=gone):
        if not wanted:
            return Need.NOTHING
        vanished = gone and state.attempt > 0 and not keeper_is_over(state, job.seen, gone=False)
        if not vanished:
            return Need.START
        failures = state.unheard if unheard(job) else _failures(state)
        # Not below 0: the clock was set back, and nobody would wait until it has come there again.
        if 0 <= now - state.attempt_s < min(PAUSE_SECONDS * 2**failures, MOST_PAUSE_SECONDS):
            return Need.NOTHING
        return Need.FAIL if failures >= (MOST_UNHEARD if unheard(job) else MOST_FAILURES) else Need.RESTART
    told = now - (state.history[-1].at_s if state.history else now)
    stubborn = not wanted and registered and told > STUBBORN_SECONDS
    frozen = not registered and missing_s > MISSING_SECONDS
    stuck = job.seen is not None and job.seen.activity is Activity.SUSPENDING and told > STUBBORN_SECONDS
    return Need.END if stubborn or frozen or stuck else Need.NOTHING


def _failures(state: JobState) -> int:
    """Keepers that vanished without progress before this one did."""
    return 0 if state.done > state.failed_at else state.failures


def restarted(state: JobState, now: float) -> JobState:
    """The job with a new attempt, after its keeper vanished or because it has slots again."""
    return replace(state, attempt=state.attempt + 1, attempt_s=now, trains_s=0.0, settled_s=state.settled_s or now)


def unheard(job: Live) -> bool:
    """Whether its last keeper never said a word."""
    return job.seen is None or job.seen.attempt < job.state.attempt


def not_started(state: JobState, now: float, why: str) -> JobState:
    """The same, after there was no keeper at all: no fault of the job, however often it happens."""
    reason = f"its keeper could not be started ({why}): it is tried again"
    return replace(restarted(state, now), unheard=min(state.unheard + 1, SLOWEST), reason=reason)


def vanished(job: Live, now: float) -> JobState:
    """The same, with the failure noted."""
    state = job.state
    if unheard(job):
        return replace(restarted(state, now), unheard=state.unheard + 1)
    failures = _failures(state) + 1
    line = Change(
        at_s=now,
        workers=len(state.slots),
        reason=f"its keeper vanished at step {state.done:.0f}; it is started again (failure {failures})",
        step=int(state.done),
    )
    state = replace(state, failures=failures, failed_at=max(state.done, state.failed_at), unheard=0)
    return replace(restarted(state, now), reason=line.reason, history=(*state.history, line)[-HISTORY:])


def given_up(job: Live, now: float) -> JobState:
    state = job.state
    error = f"its keeper vanished {_failures(state) + 1} times without progress beyond step {state.failed_at:.0f}"
    if unheard(job):
        error = f"its keeper was started {state.unheard + 1} times and never said a word; see its logs/keeper.log"
    return replace(change(state, now, f"it failed: {error}", phase=JobPhase.FAILED), error=error)
