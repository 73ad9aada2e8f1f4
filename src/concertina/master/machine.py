"""How a job's workers come, go and are replaced: a pure state machine.

Events come in, commands go out; nothing here knows about processes, sockets or clocks. The state is plain data that a
new master can read and go on with.

A change goes through four stages: newcomers *start*; all who will train together *build* their next generation in the
background while the newcomers catch up; the members are *armed* and agree among themselves on the step after which they
change over; when all have *switched*, the new generation is in force (`machine_change.py`). A loss at any stage leads
to *regrouping*: the survivors say which generation they are in, and go on without the lost (`machine_loss.py`).
"""

from dataclasses import replace
from typing import Any

from concertina.master import machine_change, machine_loss
from concertina.master.machine_change import fresh_attempts, proceed, supersede
from concertina.master.machine_generation import count, names, release, start_afresh, with_worker
from concertina.master.machine_types import (
    EXIT_INTERRUPTED_BY_USER,
    OVER,
    Answer,
    AskToStop,
    BuildFailed,
    Built,
    Change,
    CheckpointAsked,
    Commands,
    Dropped,
    Event,
    InterruptAsked,
    KillWorkers,
    NewcomerReady,
    PauseOver,
    Phase,
    PostOffered,
    Progressed,
    RemovalAsked,
    ResizeAsked,
    Result,
    Save,
    SlowFound,
    State,
    Stopped,
    StuckFound,
    Switched,
    Synced,
    TellStory,
    UnevenFound,
    WorkerArrived,
    WorkerExited,
    WorkerFailed,
)

__all__ = ["EXIT_INTERRUPTED_BY_USER", "OVER", "Change", "Phase", "State", "handle", "start"]


def start(
    virtual: int,
    workers: int,
    schedule: tuple[Change, ...] = (),
    at_step: int = 0,
    minimum: int = 1,
    maximum: int = 0,
    resume: bool = False,
) -> Result:
    """The first generation; changes that lie before `at_step` (a resumed job) have already happened."""
    for change in schedule:
        if change.step <= at_step:
            workers = change.workers
    state = State(
        virtual=virtual,
        target=workers,
        minimum=minimum,
        maximum=maximum,
        schedule=tuple(change for change in schedule if change.step > at_step),
        step=at_step,
        record=at_step,
        resume=resume or at_step > 0,
    )
    return start_afresh(state, f"the job {'goes on' if at_step else 'starts'} with {count(workers)}")


def handle(state: State, event: Event) -> Result:
    """One event. In doubt, an event that fits no more (a late answer, a second report) changes nothing."""
    if state.phase in OVER and not isinstance(event, ResizeAsked | RemovalAsked | CheckpointAsked):
        return state, ()
    result: Result = _HANDLERS[type(event)](state, event)
    return result


# -- requests --------------------------------------------------------------------------------------------------------


def on_resize_asked(state: State, event: ResizeAsked) -> Result:
    problem = _ending(state) or _senseless(state, event.workers)
    if problem:
        return state, (Answer(event.request, False, problem),)
    if event.workers == state.target and not state.schedule:
        return state, (Answer(event.request, True, _already(state)),)
    planned = bool(state.schedule)
    state = supersede(fresh_attempts(replace(state, target=event.workers, schedule=())))
    released: Commands = (release(state),) if planned else ()
    return _accept(state, event.request, f"changing to {count(event.workers)}", released)


def on_removal_asked(state: State, event: RemovalAsked) -> Result:
    problem = _ending(state) or _cannot_remove(state, event)
    if problem:
        return state, (Answer(event.request, False, problem),)
    more = {n for n in event.workers if not state.workers[n].leaves}
    workers = {n: replace(w, leaves=event.reason or "asked for") if n in more else w for n, w in state.workers.items()}
    target = state.target if event.replaced else max(1, state.minimum, state.target - len(more))
    state = supersede(fresh_attempts(replace(state, workers=workers, target=target)))
    return _accept(state, event.request, f"removing worker {names(event.workers)}", ())


def _already(state: State) -> str:
    if state.pause_s:
        return f"{count(state.target)} are wanted already; the next try is within {state.pause_s:g} s"
    return f"the job has {count(state.target)} already, or soon will"


def _accept(state: State, request: str, what: str, released: Commands) -> Result:
    said = "" if state.pending is None else f", after the change to {count(len(state.pending.members))} under way"
    state, commands = proceed(state) if state.pending is None else (state, ())
    return state, (Answer(request, True, what + said), *released, *commands)


def _ending(state: State) -> str:
    if state.phase in OVER or state.phase is Phase.STOPPING or state.exits or state.interrupted:
        return "the job is ending: nothing can be changed any more"
    return ""


def _senseless(state: State, workers: int) -> str:
    if workers < 1:
        return f"a job needs at least 1 worker, not {workers}: use cancel to end it"
    if workers < state.minimum:
        return f"{count(workers)} are fewer than the job's minimum of {state.minimum}"
    if workers > state.virtual:
        return f"{count(workers)} are more than the job's {state.virtual} virtual workers"
    if workers > state.most:
        return f"{count(workers)} are more than the job's maximum of {state.most}"
    return ""


def _cannot_remove(state: State, event: RemovalAsked) -> str:
    unknown = [n for n in dict.fromkeys(event.workers) if n not in state.members or n not in state.workers]
    left = len([n for n in state.members if n not in event.workers and n in state.workers])
    if not event.workers:
        return "no worker was named"
    if unknown:
        return f"worker {names(unknown)} is not one of this job's ({names(state.members)})"
    if event.replaced:
        return ""
    if left == 0:
        return "that would remove all workers: use cancel to end the job"
    if left < state.minimum:
        return f"{count(left)} would be left, fewer than the job's minimum of {state.minimum}"
    return ""


def on_checkpoint_asked(state: State, event: CheckpointAsked) -> Result:
    problem = _ending(state)
    if not problem and state.phase is not Phase.TRAINING:
        problem = f"nobody trains at the moment ({state.phase}): ask again when the job has made a step"
    if problem:
        return state, (Answer(event.request, False, problem),)
    accepted = Answer(event.request, True, "a checkpoint will be written after the next step")
    return state, (accepted, Save(tuple(state.members)))  # to all: one of them may be about to leave


def on_interrupt_asked(state: State, event: InterruptAsked) -> Result:
    if state.phase is Phase.STOPPING:
        return state, ()
    if state.interrupted:
        rest = tuple(state.workers)
        killed = replace(state, phase=Phase.STOPPING, failure="interrupted", exit_code=EXIT_INTERRUPTED_BY_USER)
        return killed, (KillWorkers(rest, "interrupted twice"),)
    return replace(state, interrupted=True), (AskToStop("interrupted"),)


# -- what signs of life say ------------------------------------------------------------------------------------------


def on_progressed(state: State, event: Progressed) -> Result:
    if event.worker not in state.workers:
        return state, ()
    farther = event.step > state.record
    state = replace(
        state,
        step=max(state.step, event.step),
        record=max(state.record, event.step),
        pace=event.pace or state.pace,
        losses=0 if farther else state.losses,
    )
    return proceed(state) if state.pending is None and state.schedule else (state, ())


def on_uneven_found(state: State, event: UnevenFound) -> Result:
    if event.generation != state.generation or state.pending is not None or state.phase is not Phase.TRAINING:
        return state, ()
    return proceed(replace(state, speeds=dict(event.speeds), uneven=event.reason))


def on_slow_found(state: State, event: SlowFound) -> Result:
    known = state.workers.get(event.worker)
    left = len(state.members) - 1
    removable = known is not None and event.worker in state.members and not known.leaves and left >= state.minimum
    if not removable or left < 1 or state.pending is not None or state.phase is not Phase.TRAINING:
        return state, ()
    workers = {n: replace(w, leaves=event.reason) if n == event.worker else w for n, w in state.workers.items()}
    told = TellStory(event="worker_slow", fields={"worker": event.worker, "step": state.step, "reason": event.reason})
    state, commands = proceed(fresh_attempts(replace(state, workers=workers, target=left)))
    return state, (told, *commands)


def on_stuck_found(state: State, event: StuckFound) -> Result:
    """Only when it has been ended is it surely gone, and the others may go on."""
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    state = with_worker(state, event.worker, replace(known, stuck=event.reason))
    told = TellStory(event="worker_stuck", fields={"worker": event.worker, "step": state.step, "reason": event.reason})
    return state, (told, KillWorkers((event.worker,), event.reason))


_HANDLERS: dict[type, Any] = {
    WorkerArrived: machine_change.on_worker_arrived,
    PauseOver: machine_change.on_pause_over,
    PostOffered: machine_loss.on_post_offered,
    NewcomerReady: machine_change.on_newcomer_ready,
    Built: machine_change.on_built,
    BuildFailed: machine_change.on_build_failed,
    Synced: machine_change.on_synced,
    Switched: machine_loss.on_switched,
    Stopped: machine_loss.on_stopped,
    Dropped: machine_loss.on_dropped,
    WorkerExited: machine_loss.on_worker_exited,
    WorkerFailed: machine_loss.on_worker_failed,
    Progressed: on_progressed,
    UnevenFound: on_uneven_found,
    SlowFound: on_slow_found,
    StuckFound: on_stuck_found,
    ResizeAsked: on_resize_asked,
    RemovalAsked: on_removal_asked,
    CheckpointAsked: on_checkpoint_asked,
    InterruptAsked: on_interrupt_asked,
}
"""The table of what is done with each event; `handle` is the only way in."""
