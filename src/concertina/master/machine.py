"""How a job's workers come, go and are replaced: a pure state machine.

Events come in, commands go out; nothing here knows about processes, sockets or clocks. The state is plain data that a
new master can read and go on with.

A change goes through four stages: newcomers *start*; all who will train together *build* their next generation in the
background while the newcomers catch up; the members are *armed* and agree among themselves on the step after which they
change over; when all have *switched*, the new generation is in force. A loss at any stage leads to *regrouping*: the
survivors say which generation they are in, and go on without the lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from concertina.core.formation import Formation
from concertina.core.messages import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_OK, EXIT_STATE_LOST, EXIT_USAGE
from concertina.core.placement import VirtualPlacement

EXIT_INTERRUPTED_BY_USER = 130  # as shells report Ctrl-C
ATTEMPTS = 3  # to bring in newcomers for one change, and losses at one step before the job is given up
MOST_LOSSES = 12  # without a step in between: then it is the script or the machine, and starting again is no help
LEAD_SECONDS = 15.0  # newcomers for a planned change are started this long before its step


class Phase(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    REGROUPING = "regrouping"  # a member was lost; waiting until every survivor has stopped
    STOPPING = "stopping"  # a worker failed or somebody interrupted; waiting for the rest to end
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


OVER = (Phase.FINISHED, Phase.INTERRUPTED, Phase.FAILED)


class Stage(StrEnum):
    STARTING = "starting"
    BUILDING = "building"
    ARMED = "armed"


@dataclass(frozen=True, slots=True)
class Change:
    """From optimizer step `step` on, train with `workers` workers."""

    step: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What is known of one process."""

    post: str = ""  # where its page for the next generation is; each is good for one
    desk: str = ""
    ready: bool = False  # a newcomer: everything is built, it can catch up
    leaves: bool = False  # it has been told to go
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A change under way."""

    generation: int
    members: tuple[int, ...]
    joiners: tuple[int, ...]
    leavers: tuple[int, ...]
    reason: str
    hold_at: int = 0
    stage: Stage = Stage.STARTING
    built: tuple[int, ...] = ()
    synced: tuple[int, ...] = ()
    switched: tuple[int, ...] = ()
    step: int = -1  # after which the members changed over


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    virtual: int
    target: int  # workers wanted
    minimum: int = 1
    phase: Phase = Phase.STARTING
    generation: int = 0  # in force
    members: tuple[int, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()  # virtual workers by rank
    workers: dict[int, Worker] = field(default_factory=dict)  # alive
    pending: Pending | None = None
    schedule: tuple[Change, ...] = ()  # still to come
    next_worker: int = 0
    next_generation: int = 0
    told: bool = False  # the generation in force has been announced to its members
    formed: tuple[int, ...] = ()  # members of the generation in force that have built it
    stopped: dict[int, int] = field(default_factory=dict)  # survivors that wait -> the generation they are in
    dropped: tuple[int, ...] = ()  # members that did not change over and go on as they were
    lost: tuple[int, ...] = ()  # since the last regrouping
    exits: dict[int, int] = field(default_factory=dict)  # of members, when the job ends
    failure: str = ""
    exit_code: int = 0
    interrupted: bool = False
    step: int = 0
    pace: float = 0.0  # seconds per step, measured
    attempts: int = 0  # of the change under way
    losses: int = 0  # members lost since the last step
    resume: bool = False  # whether the next fresh start goes on from a checkpoint


# -- events, past tense ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerArrived:
    """A worker has reached us; `generation` is the one it trains in, 0 for none yet."""

    worker: int
    post: str
    desk: str


@dataclass(frozen=True, slots=True)
class PostOffered:
    """A page for the generation after the one that was just told of."""

    worker: int
    post: str


@dataclass(frozen=True, slots=True)
class NewcomerReady:
    worker: int


@dataclass(frozen=True, slots=True)
class Built:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Synced:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Switched:
    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A survivor noticed a loss and waits; it has passed the same steps as all others."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member has heard that a newcomer is gone, did not change over, and no longer will."""

    worker: int
    generation: int  # that will never be


@dataclass(frozen=True, slots=True)
class BuildFailed:
    worker: int
    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: int
    code: int
    step: int = -1


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker said why it is about to end."""

    worker: int
    error: str


@dataclass(frozen=True, slots=True)
class Progressed:
    worker: int
    step: int
    pace: float  # seconds per step, 0 if not known


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    request: str
    workers: int


@dataclass(frozen=True, slots=True)
class RemovalAsked:
    """These workers are to go, others come in their place if `replace` is set."""

    request: str
    workers: tuple[int, ...]
    replaced: bool
    reason: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """The user pressed Ctrl-C or the machine wants its slots back."""


Event = (
    WorkerArrived
    | PostOffered
    | NewcomerReady
    | Built
    | Synced
    | Switched
    | Stopped
    | Dropped
    | BuildFailed
    | WorkerExited
    | WorkerFailed
    | Progressed
    | ResizeAsked
    | RemovalAsked
    | InterruptAsked
)


# -- commands, imperative --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    worker: int
    generation: int
    members: tuple[int, ...]  # empty: it joins a job that is training
    shares: tuple[tuple[int, ...], ...]
    resume: bool  # from the newest checkpoint
    hold_at: int = 0  # a change is planned after this step


@dataclass(frozen=True, slots=True)
class Form:
    """Build this generation: in the background and to be voted on, or at once."""

    formation: Formation
    to: tuple[int, ...]
    at_once: bool


@dataclass(frozen=True, slots=True)
class Arm:
    generation: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    generation: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A planned change will not take place: nobody has to wait for it."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellLost:
    """These have ended and will post nothing more."""

    lost: tuple[int, ...]
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Nothing of what you hold is needed any more: end."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Workers are to write a checkpoint at the next step boundary and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellStory:
    """For report, event stream and terminal."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    request: str
    accepted: bool
    reason: str


Command = (
    StartWorker | Form | Arm | Abandon | Release | TellLost | Dismiss | AskToStop | KillWorkers | TellStory | Answer
)
Result = tuple[State, tuple[Command, ...]]


# -- start -----------------------------------------------------------------------------------------------------------


def start(
    virtual: int,
    workers: int,
    schedule: tuple[Change, ...] = (),
    at_step: int = 0,
    minimum: int = 1,
    resume: bool = False,
) -> Result:
    """The first generation; changes that lie before `at_step` (a resumed job) have already happened."""
    for change in schedule:
        if change.step <= at_step:
            workers = change.workers
    ahead = tuple(change for change in schedule if change.step > at_step)
    state = State(
        virtual=virtual, target=workers, minimum=minimum, schedule=ahead, step=at_step, resume=resume or at_step > 0
    )
    return _start_afresh(state, f"the job {'goes on' if at_step else 'starts'} with {_count(workers)}")


def _start_afresh(state: State, reason: str) -> Result:
    """All workers anew, from the newest checkpoint if there is one."""
    numbers = tuple(range(state.next_worker, state.next_worker + state.target))
    shares = VirtualPlacement.blocks(state.virtual, state.target).workers
    generation = state.next_generation
    fresh = replace(
        state,
        phase=Phase.STARTING,
        generation=generation,
        next_generation=generation + 1,
        members=numbers,
        shares=shares,
        workers={n: Worker() for n in numbers},
        next_worker=state.next_worker + state.target,
        pending=None,
        told=False,
        formed=(),
        exits={},
    )
    fresh = _calm(fresh)
    starts = tuple(
        StartWorker(
            worker=n,
            generation=generation,
            members=numbers,
            shares=shares,
            resume=state.resume,
            hold_at=_next_hold(state),
        )
        for n in numbers
    )
    return fresh, (_story_of_generation(fresh, state.step, reason), *starts)


def handle(state: State, event: Event) -> Result:
    """One event. In doubt, an event that fits no more (a late answer, a second report) changes nothing."""
    if state.phase in OVER and not isinstance(event, ResizeAsked | RemovalAsked):
        return state, ()
    result: Result = _HANDLERS[type(event)](state, event)
    return result


# -- workers arrive and build ----------------------------------------------------------------------------------------


def on_worker_arrived(state: State, event: WorkerArrived) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, (Dismiss((event.worker,)),)  # of a time that is over
    return _go_on(_with_worker(state, event.worker, replace(known, post=event.post, desk=event.desk)))


def on_post_offered(state: State, event: PostOffered) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    return _go_on(_with_worker(state, event.worker, replace(known, post=event.post)))


def _go_on(state: State) -> Result:
    """Something that others may have waited for has come."""
    if state.phase is Phase.STARTING and not state.told and _have_posts(state, state.members):
        return _form(state, None, state.members, at_once=True)
    if state.phase is Phase.REGROUPING:
        return _regroup(state)
    return _proceed(state)


def on_newcomer_ready(state: State, event: NewcomerReady) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    return _proceed(_with_worker(state, event.worker, replace(known, ready=True)))


def on_built(state: State, event: Built) -> Result:
    if event.worker not in state.workers:
        return state, ()
    pending = state.pending
    if pending is not None and event.generation == pending.generation:
        return _proceed(replace(state, pending=replace(pending, built=_plus(pending.built, event.worker))))
    if event.generation != state.generation:
        return state, ()
    state = replace(state, formed=_plus(state.formed, event.worker))
    if state.phase is Phase.STARTING and set(state.formed) == set(state.members):
        state = replace(state, phase=Phase.TRAINING)
    return _proceed(state)


def on_synced(state: State, event: Synced) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation or event.worker not in pending.joiners:
        return state, ()
    return _proceed(replace(state, pending=replace(pending, synced=_plus(pending.synced, event.worker))))


def on_build_failed(state: State, event: BuildFailed) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation or pending.stage is Stage.ARMED:
        return state, ()
    return _abandon(state, f"worker {event.worker} could not build the next generation: {event.error}")


def _proceed(state: State) -> Result:
    """Takes the next step of a change, if its conditions are met, or begins one."""
    if state.phase is not Phase.TRAINING:
        return state, ()
    pending = state.pending
    if pending is None:
        return _begin_change(state)
    ready = all(state.workers[n].ready for n in pending.joiners) and _have_posts(state, pending.members)
    if pending.stage is Stage.STARTING and ready:
        pending = replace(pending, stage=Stage.BUILDING)
        return _form(replace(state, pending=pending), pending, _everybody(state, pending), at_once=False)
    done = set(pending.built) >= set(pending.members) and set(pending.synced) >= set(pending.joiners)
    if pending.stage is Stage.BUILDING and done:
        state = replace(state, pending=replace(pending, stage=Stage.ARMED))
        return state, (Arm(pending.generation, state.members),)
    return state, ()


def _begin_change(state: State) -> Result:
    """What was asked for or planned and is not yet so."""
    state = _due(state)
    leaving = tuple(n for n in state.members if state.workers[n].leaves)
    staying = tuple(n for n in state.members if n not in leaving)
    ahead = state.schedule[0] if state.schedule else None
    target, hold_at, why = state.target, 0, ""
    if not leaving and len(staying) == target and ahead is not None and _near(state, ahead):
        target, hold_at, why = ahead.workers, ahead.step, ", as asked by --resize"
        state = replace(state, schedule=state.schedule[1:], target=target)
    if not leaving and len(staying) == target:
        return state, ()
    kept = staying[:target]
    idle = [n for n in state.workers if n not in state.members and not state.workers[n].leaves]
    joiners = tuple(idle[: max(0, target - len(kept))])
    fresh = tuple(range(state.next_worker, state.next_worker + max(0, target - len(kept) - len(joiners))))
    members = kept + joiners + fresh
    pending = Pending(
        generation=state.next_generation,
        members=members,
        joiners=joiners + fresh,
        leavers=tuple(n for n in state.members if n not in kept),
        reason=_reason(state, len(members), leaving) + why,
        hold_at=hold_at,
    )
    state = replace(
        state,
        pending=pending,
        next_generation=state.next_generation + 1,
        next_worker=state.next_worker + len(fresh),
        workers={**state.workers, **{n: Worker() for n in fresh}},
    )
    starts = tuple(
        StartWorker(worker=n, generation=pending.generation, members=(), shares=(), resume=False) for n in fresh
    )
    begun = TellStory(
        event="change_begun",
        fields={
            "generation": pending.generation,
            "joiners": list(pending.joiners),
            "leavers": list(pending.leavers),
            "reason": pending.reason,
        },
    )
    state, more = _proceed(state)
    return state, (begun, *starts, *more)


def _due(state: State) -> State:
    """Planned changes whose step is past count as asked for now; of several, the last."""
    due = [change for change in state.schedule if change.step <= state.step]
    if not due:
        return state
    return replace(state, target=due[-1].workers, schedule=state.schedule[len(due) :])


def _near(state: State, change: Change) -> bool:
    return (change.step - state.step) * state.pace < LEAD_SECONDS


# -- the change-over -------------------------------------------------------------------------------------------------


def on_switched(state: State, event: Switched) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation:
        return state, ()
    pending = replace(pending, switched=_plus(pending.switched, event.worker), step=event.step)
    state = replace(state, pending=pending, step=max(state.step, event.step))
    if state.phase is Phase.REGROUPING:
        return _regroup(state)
    if not set(pending.switched) >= set(pending.members) | set(pending.leavers):
        return state, ()
    return _complete(state, pending)


def _complete(state: State, pending: Pending) -> Result:
    staying = {n: replace(w, ready=False) for n, w in state.workers.items() if n not in pending.leavers}
    state = replace(
        state,
        generation=pending.generation,
        members=pending.members,
        shares=VirtualPlacement.blocks(state.virtual, len(pending.members)).workers,
        formed=pending.members,
        workers=staying,
        pending=None,
        attempts=0,
    )
    dismissed: tuple[Command, ...] = (Dismiss(pending.leavers),) if pending.leavers else ()
    state, more = _proceed(state)
    return state, (_story_of_generation(state, pending.step, pending.reason), *dismissed, *more)


# -- losses ----------------------------------------------------------------------------------------------------------


def on_worker_exited(state: State, event: WorkerExited) -> Result:
    if event.worker not in state.workers:
        return state, ()
    state = replace(state, workers={n: w for n, w in state.workers.items() if n != event.worker})
    if state.phase is Phase.STOPPING:
        return _settle(replace(state, exits={**state.exits, event.worker: event.code}))
    pending = state.pending
    in_force = event.worker in state.members
    if event.code in (EXIT_OK, EXIT_INTERRUPTED) and in_force:
        return _settle(replace(state, exits={**state.exits, event.worker: event.code}))
    if event.code == EXIT_STATE_LOST:
        return _restart(state, "what only a lost worker had could not be made again")
    if event.code > 0 and event.code != EXIT_LEFT:
        return _fail(state, event, state.failure or f"worker {event.worker} ended with exit code {event.code}")
    if state.exits:  # the last step is done everywhere; only what the script does after it was cut off
        return _settle(replace(state, exits={**state.exits, event.worker: event.code}))
    concerned = in_force or (pending is not None and event.worker in pending.members and pending.stage is Stage.ARMED)
    if concerned:
        return _lose(state, event)
    if pending is not None and event.worker in pending.members:
        return _abandon(state, f"worker {event.worker} {_how(event.code)} before it could join")
    return state, ()


def on_worker_failed(state: State, event: WorkerFailed) -> Result:
    if state.failure or event.worker not in state.workers:
        return state, ()
    return replace(state, failure=event.error), ()


def _lose(state: State, event: WorkerExited) -> Result:
    """A member is gone: everybody else stops at the meeting that it will never come to, and says so."""
    lost = _plus(state.lost, event.worker)
    told = TellStory(
        event="worker_lost",
        fields={"worker": event.worker, "step": state.step, "reason": f"worker {event.worker} {_how(event.code)}"},
    )
    if state.phase is Phase.STARTING:
        if state.losses >= MOST_LOSSES:
            return _fail(state, event, f"worker {event.worker} {_how(event.code)}, again, before training began")
        state = replace(state, losses=state.losses + 1)
        return _restart(state, f"worker {event.worker} {_how(event.code)} before training began", told)
    if state.phase is Phase.TRAINING:
        if state.losses >= MOST_LOSSES:
            why = f"workers keep dying at step {state.step}; worker {event.worker} {_how(event.code)}"
            return _fail(state, event, why)
        state = replace(state, losses=state.losses + 1)
    state = replace(state, lost=lost, phase=Phase.REGROUPING)
    to = tuple(state.workers)
    state, more = _regroup(state)
    return state, (told, TellLost(lost, to), *more)


def on_stopped(state: State, event: Stopped) -> Result:
    if event.worker not in state.workers or state.phase is not Phase.REGROUPING:
        return state, ()
    stopped = {**state.stopped, event.worker: event.generation}
    return _regroup(replace(state, stopped=stopped, step=max(state.step, event.step)))


def on_dropped(state: State, event: Dropped) -> Result:
    pending = state.pending
    if state.phase is not Phase.REGROUPING or pending is None or event.generation != pending.generation:
        return state, ()
    return _regroup(replace(state, dropped=_plus(state.dropped, event.worker)))


def _regroup(state: State) -> Result:
    """When every survivor has stopped, form a generation of them.

    If the members had already changed over when the loss came, that is what they say, and the newcomers among them are
    survivors like all others; if not, newcomers go on waiting for a change of their own. A loss may also stop nobody:
    that of a leaver after the change, or of a newcomer before it.
    """
    pending = state.pending
    if (
        pending is not None
        and not set(state.lost) & set(pending.members)
        and set(pending.switched) >= set(pending.members)
    ):
        alive = tuple(n for n in pending.leavers if n in state.workers)
        return _complete(replace(_calm(state), phase=Phase.TRAINING), replace(pending, leavers=alive))
    if pending is not None and not set(state.lost) & set(state.members) and set(state.dropped) >= set(state.members):
        names = ", ".join(map(str, state.lost))
        return _abandon(replace(_calm(state), phase=Phase.TRAINING), f"worker {names} was lost before it could join")
    candidates = [n for n in state.members if n in state.workers]
    if any(generation > state.generation for generation in state.stopped.values()):
        assert pending is not None
        candidates = [n for n in pending.members if n in state.workers]
    if not all(n in state.stopped for n in candidates) or not _have_posts(state, candidates):
        return state, ()
    if not candidates:
        reason = "every worker was lost"
        return _restart(state, reason)
    workers = {n: replace(w, ready=False) for n, w in state.workers.items()}
    gone = [n for n in state.workers if pending is not None and n in pending.leavers and n not in candidates]
    for n in gone:
        del workers[n]
    waiting = [n for n in workers if n not in candidates]  # newcomers that go on waiting
    workers.update({n: replace(workers[n], ready=state.workers[n].ready) for n in waiting})
    lost = state.lost
    size = min(len(candidates), state.virtual)
    reason = (
        f"worker {', '.join(map(str, lost))} lost: {_count(size)} go on"
        if size > 1
        else (f"worker {', '.join(map(str, lost))} lost: one worker goes on")
    )
    state = replace(
        state,
        phase=Phase.TRAINING,
        generation=state.next_generation,
        next_generation=state.next_generation + 1,
        members=tuple(candidates),
        shares=VirtualPlacement.blocks(state.virtual, len(candidates)).workers,
        workers=workers,
        pending=None,
        formed=(),
    )
    state = _calm(state)
    abandoned: tuple[Command, ...] = (Abandon(pending.generation, tuple(waiting)),) if pending and waiting else ()
    dismissed: tuple[Command, ...] = (Dismiss(tuple(gone)),) if gone else ()
    state, formed = _form(state, None, state.members, at_once=True)
    return state, (*abandoned, *dismissed, _story_of_generation(state, state.step, reason), *formed)


def _calm(state: State) -> State:
    return replace(state, stopped={}, dropped=(), lost=())


def _restart(state: State, reason: str, *before: Command) -> Result:
    rest = tuple(state.workers)
    kill: tuple[Command, ...] = (KillWorkers(rest, reason),) if rest else ()
    state = replace(state, resume=True, step=0)  # the workers will say where they go on
    state, commands = _start_afresh(state, f"{reason}: starting again from the newest checkpoint")
    return state, (*before, *kill, *commands)


def _abandon(state: State, why: str) -> Result:
    """A change cannot be made as planned; try again with other newcomers, a few times."""
    pending = state.pending
    assert pending is not None
    told = TellStory(event="change_abandoned", fields={"generation": pending.generation, "reason": why})
    to = tuple(n for n in _everybody(state, pending) if n in state.workers)
    give_up = state.attempts + 1 >= ATTEMPTS
    state = replace(state, pending=None, attempts=0 if give_up else state.attempts + 1)
    if give_up:
        staying = [n for n in state.members if n in state.workers]
        state = replace(state, target=len(staying))
        spare = tuple(n for n in state.workers if n not in state.members)
        workers = {n: replace(w, leaves=False) for n, w in state.workers.items() if n in state.members}
        state = replace(state, workers=workers)
        return state, (
            told,
            Abandon(pending.generation, to),
            Release(tuple(staying)),
            *((Dismiss(spare),) if spare else ()),
        )
    state, more = _proceed(state)
    return state, (told, Abandon(pending.generation, to), *more)


# -- requests --------------------------------------------------------------------------------------------------------


def on_resize_asked(state: State, event: ResizeAsked) -> Result:
    problem = _why_not(state)
    if not problem and event.workers < 1:
        problem = f"a job needs at least 1 worker, not {event.workers}: use cancel to end it"
    if not problem and event.workers < state.minimum:
        problem = f"{_count(event.workers)} are fewer than the job's minimum of {state.minimum}"
    if not problem and event.workers > state.virtual:
        problem = f"{_count(event.workers)} are more than the job's {state.virtual} virtual workers"
    if problem:
        return state, (Answer(event.request, False, problem),)
    if event.workers == state.target and not state.schedule:
        return state, (Answer(event.request, True, f"the job has {_count(event.workers)} already, or soon will"),)
    released: tuple[Command, ...] = (Release(state.members),) if state.schedule else ()
    state = replace(state, target=event.workers, schedule=())
    said = "" if state.pending is None else f", after the change to {_count(len(state.pending.members))} under way"
    state, commands = _proceed(state) if state.pending is None else (state, ())
    return state, (Answer(event.request, True, f"changing to {_count(event.workers)}{said}"), *released, *commands)


def on_removal_asked(state: State, event: RemovalAsked) -> Result:
    problem = _why_not(state)
    unknown = [n for n in event.workers if n not in state.members]
    if not problem and unknown:
        names = ", ".join(map(str, state.members))
        problem = f"worker {', '.join(map(str, unknown))} is not one of this job's ({names})"
    left = len([n for n in state.members if n not in event.workers])
    if not problem and not event.workers:
        problem = "no worker was named"
    if not problem and left == 0 and not event.replaced:
        problem = "that would remove all workers: use cancel to end the job"
    if not problem and left < state.minimum and not event.replaced:
        problem = f"{_count(left)} would be left, fewer than the job's minimum of {state.minimum}"
    if problem:
        return state, (Answer(event.request, False, problem),)
    workers = {n: replace(w, leaves=w.leaves or n in event.workers) for n, w in state.workers.items()}
    target = state.target if event.replaced else max(1, state.target - len(event.workers))
    state = replace(state, workers=workers, target=target)
    state, commands = _proceed(state) if state.pending is None else (state, ())
    return state, (Answer(event.request, True, f"removing worker {', '.join(map(str, event.workers))}"), *commands)


def _why_not(state: State) -> str:
    if state.phase in OVER or state.phase is Phase.STOPPING or state.exits:
        return "the job is ending: nothing can be changed any more"
    return ""


def on_progressed(state: State, event: Progressed) -> Result:
    losses = 0 if event.step > state.step else state.losses
    state = replace(state, step=max(state.step, event.step), pace=event.pace or state.pace, losses=losses)
    if state.pending is None and state.schedule:
        return _proceed(state)
    return state, ()


def on_interrupt_asked(state: State, event: InterruptAsked) -> Result:
    if state.phase is Phase.STOPPING:
        return state, ()
    if state.interrupted:
        rest = tuple(state.workers)
        killed = replace(state, phase=Phase.STOPPING, failure="interrupted", exit_code=EXIT_INTERRUPTED_BY_USER)
        return killed, (KillWorkers(rest, "interrupted twice"),)
    return replace(state, interrupted=True), (AskToStop("interrupted"),)


# -- the end ---------------------------------------------------------------------------------------------------------


def _fail(state: State, event: WorkerExited, why: str) -> Result:
    code = event.code if event.code > 0 else 128 - event.code  # as shells report a signal
    early = [worker for worker, ended in state.exits.items() if ended == EXIT_OK]
    if early and code != EXIT_USAGE:
        why = f"worker {early[0]} left the training early, with exit code 0, and the others could not go on; {why}"
    failed = replace(state, phase=Phase.STOPPING, failure=why, exit_code=code)
    if failed.workers:
        return failed, (KillWorkers(tuple(failed.workers), why),)
    return _settle(failed)


def _settle(state: State) -> Result:
    """The job is over when its members have all ended."""
    if state.phase is Phase.STOPPING:
        return (state, ()) if state.workers else (replace(state, phase=Phase.FAILED), ())
    if any(n in state.workers for n in state.members):
        return state, ()
    spare = tuple(state.workers)
    kill: tuple[Command, ...] = (KillWorkers(spare, "the job is over"),) if spare else ()
    if state.members[0] in state.lost or state.exits.get(state.members[0], EXIT_OK) < 0:
        return _restart(state, "the main worker was lost after the last step")
    codes = {code for n in state.members if (code := state.exits.get(n, EXIT_OK)) >= 0}
    if codes == {EXIT_OK}:
        return replace(state, phase=Phase.FINISHED, workers={}), kill
    if codes == {EXIT_INTERRUPTED}:
        return replace(state, phase=Phase.INTERRUPTED, workers={}), kill
    why = f"workers ended in different ways: {dict(sorted(state.exits.items()))}"
    return replace(state, phase=Phase.FAILED, failure=state.failure or why, exit_code=1, workers={}), kill


# -- small things ----------------------------------------------------------------------------------------------------


def _have_posts(state: State, members: Iterable[int]) -> bool:
    return all(n in state.workers and state.workers[n].post for n in members)


def _form(state: State, pending: Pending | None, to: tuple[int, ...], at_once: bool) -> Result:
    """Tells everybody concerned; the pages that it names are used up."""
    formation = _formation(state, pending)
    workers = {n: replace(w, post="") if n in formation.members else w for n, w in state.workers.items()}
    state = replace(state, workers=workers, told=state.told or pending is None)
    return state, (Form(formation, to, at_once),)


def _formation(state: State, pending: Pending | None = None) -> Formation:
    members = state.members if pending is None else pending.members
    return Formation(
        generation=state.generation if pending is None else pending.generation,
        members=members,
        placement=VirtualPlacement.blocks(state.virtual, len(members)),
        posts=tuple(state.workers[n].post for n in members),
        desks=tuple(state.workers[n].desk for n in members),
        joiners=() if pending is None else pending.joiners,
        leavers=() if pending is None else pending.leavers,
        sources=() if pending is None else tuple((n, state.workers[n].desk) for n in state.members),
        hold_at=0 if pending is None else pending.hold_at,
        next_hold=_next_hold(state),
    )


def _next_hold(state: State) -> int:
    return state.schedule[0].step if state.schedule else 0


def _everybody(state: State, pending: Pending) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*state.members, *pending.members)))


def _with_worker(state: State, number: int, worker: Worker) -> State:
    return replace(state, workers={**state.workers, number: worker})


def _plus(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return numbers if number in numbers else (*numbers, number)


def _story_of_generation(state: State, step: int, reason: str) -> TellStory:
    return TellStory(
        event="generation_started",
        fields={
            "generation": state.generation,
            "workers": len(state.members),
            "members": list(state.members),
            "step": step,
            "reason": reason,
        },
    )


def _reason(state: State, after: int, leaving: tuple[int, ...]) -> str:
    if leaving and after == len(state.members):
        return f"worker {', '.join(map(str, leaving))} moved"
    return f"{_count(len(state.members))} -> {_count(after)}"


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


_HANDLERS: dict[type, Any] = {
    WorkerArrived: on_worker_arrived,
    PostOffered: on_post_offered,
    NewcomerReady: on_newcomer_ready,
    Built: on_built,
    Synced: on_synced,
    Switched: on_switched,
    Stopped: on_stopped,
    Dropped: on_dropped,
    BuildFailed: on_build_failed,
    WorkerExited: on_worker_exited,
    WorkerFailed: on_worker_failed,
    Progressed: on_progressed,
    ResizeAsked: on_resize_asked,
    RemovalAsked: on_removal_asked,
    InterruptAsked: on_interrupt_asked,
}
