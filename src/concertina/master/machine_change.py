"""A change of members or of their shares, from its beginning to the generation that it leads to."""

from dataclasses import replace

from concertina.master.machine_generation import (
    PARKED_AT,
    count,
    dismiss,
    everybody,
    form_at_once,
    form_pending,
    have_posts,
    is_parked,
    names,
    plus,
    release,
    shares_for,
    story_of_generation,
    with_worker,
)
from concertina.master.machine_types import (
    Abandon,
    Arm,
    BuildFailed,
    Built,
    Change,
    Commands,
    NewcomerReady,
    PauseOver,
    Pending,
    Phase,
    Result,
    Stage,
    StartWorker,
    State,
    Synced,
    TellStory,
    Worker,
    WorkerArrived,
)

ATTEMPTS = 3  # at one change, one right after the other
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0  # before the next ones; each pause is twice as long as the one before
LEAD_SECONDS = 15.0  # newcomers for a planned change are started this long before its step
GUESSED_PACE = 0.1  # seconds per step, until it has been measured


# -- what others may have waited for ---------------------------------------------------------------------------------


def on_worker_arrived(state: State, event: WorkerArrived) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()  # it was dismissed before it arrived, and will hear so
    state = with_worker(state, event.worker, replace(known, post=event.post, desk=event.desk))
    return form_first(state)


def form_first(state: State) -> Result:
    """The generation that a job starts with is formed when all its members are there."""
    if state.phase is Phase.STARTING and not state.told and have_posts(state, state.members):
        return form_at_once(state)
    return proceed(state)


def on_newcomer_ready(state: State, event: NewcomerReady) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    return proceed(with_worker(state, event.worker, replace(known, ready=True)))


def on_built(state: State, event: Built) -> Result:
    pending = state.pending
    if event.worker not in state.workers:
        return state, ()
    if pending is not None and event.generation == pending.generation:
        return proceed(replace(state, pending=replace(pending, built=plus(pending.built, event.worker))))
    if event.generation != state.generation or event.worker not in state.members:
        return state, ()
    state = replace(state, formed=plus(state.formed, event.worker))
    if state.phase is Phase.STARTING and is_formed(state):
        state = replace(state, phase=Phase.TRAINING)
    return proceed(state)


def on_synced(state: State, event: Synced) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation or event.worker not in pending.joiners:
        return state, ()
    return proceed(replace(state, pending=replace(pending, synced=plus(pending.synced, event.worker))))


def on_build_failed(state: State, event: BuildFailed) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation or pending.stage is not Stage.BUILDING:
        return state, ()
    return abandon(state, f"worker {event.worker} could not build the next generation: {event.error}")


def is_formed(state: State) -> bool:
    return set(state.formed) >= set(state.members)


# -- from stage to stage ---------------------------------------------------------------------------------------------


def proceed(state: State) -> Result:
    """Takes the next step of a change, if its conditions are met, or begins one."""
    if state.phase is not Phase.TRAINING or state.exits or state.interrupted:
        return state, ()
    pending = state.pending
    if pending is None:
        return _begin_change(state) if is_formed(state) and not _pauses(state) else (state, ())
    ready = all(state.workers[n].ready for n in pending.joiners) and have_posts(state, pending.members)
    if pending.stage is Stage.STARTING and ready:
        pending = replace(pending, stage=Stage.BUILDING)
        return form_pending(replace(state, pending=pending), pending)
    done = set(pending.built) >= set(pending.members) and set(pending.synced) >= set(pending.joiners)
    if pending.stage is Stage.BUILDING and done:
        state = replace(state, pending=replace(pending, stage=Stage.ARMED))
        return state, (Arm(pending.generation, state.members),)
    return state, ()


def _pauses(state: State) -> bool:
    """A planned change that comes up takes the place of the one that is waiting to be tried again."""
    planned = bool(state.schedule) and _near(state, state.schedule[0]) and not is_parked(state)
    return bool(state.pause_s) and not planned


def _begin_change(state: State) -> Result:
    """What was asked for, planned or measured and is not yet so."""
    if state.pause_s:
        state = fresh_attempts(replace(state, target=len(state.members)))
    state, released = _drop_due(state)
    goal, hold_at, why = state.target, PARKED_AT if is_parked(state) else 0, ""
    if _settled(state, goal) and state.schedule and _near(state, state.schedule[0]):
        planned = state.schedule[0]
        if _settled(state, planned.workers):
            return _skip_planned(state)
        goal, hold_at, why = planned.workers, planned.step, ", as asked by --resize"
    if _settled(state, goal):
        state, spared = dismiss(state, _idle(state))
        return state, (*released, *spared)
    state, commands = _begin(state, goal, hold_at, why)
    return state, (*released, *commands)


def _settled(state: State, goal: int) -> bool:
    wanted = not any(state.workers[n].leaves for n in state.members) and len(state.members) == goal
    return wanted and state.shares == shares_for(state, state.members)


def _drop_due(state: State) -> Result:
    """Planned changes whose step is past count as asked for now; of several, the last."""
    due = [change for change in state.schedule if change.step <= state.step]
    if not due:
        return state, ()
    state = replace(state, target=due[-1].workers, schedule=state.schedule[len(due) :])
    return state, (release(state),)


def _skip_planned(state: State) -> Result:
    """It asks for what is so."""
    state = replace(state, target=state.schedule[0].workers, schedule=state.schedule[1:])
    return state, (release(state),)


def _near(state: State, change: Change) -> bool:
    """Members wait for a planned change after they have trained its step, so the step before it is the latest."""
    ahead = change.step - state.step
    return ahead <= 1 or ahead * (state.pace or GUESSED_PACE) < LEAD_SECONDS


def _idle(state: State) -> list[int]:
    """Newcomers that are in nobody's plans."""
    return [n for n in state.workers if n not in state.members]


def _begin(state: State, goal: int, hold_at: int, why: str) -> Result:
    leaving = tuple(n for n in state.members if state.workers[n].leaves)
    kept = tuple(n for n in state.members if n not in leaving)[:goal]
    idle = _idle(state)
    missing = goal - len(kept)
    joiners, spare = tuple(idle[:missing]), idle[missing:]
    fresh = tuple(range(state.next_worker, state.next_worker + missing - len(joiners)))
    members = _seated(state.members, kept, joiners + fresh)
    pending = Pending(
        generation=state.next_generation,
        members=members,
        shares=shares_for(state, members),
        joiners=joiners + fresh,
        leavers=tuple(n for n in state.members if n not in kept),
        reason=_reason(state, members, leaving) + why,
        hold_at=hold_at,
    )
    state, spared = dismiss(state, spare)
    state = replace(
        state,
        pending=pending,
        next_generation=state.next_generation + 1,
        next_worker=state.next_worker + len(fresh),
        workers={**state.workers, **{n: Worker() for n in fresh}},
    )
    starts = tuple(StartWorker(worker=n, generation=pending.generation, members=(), resume=False) for n in fresh)
    state, more = proceed(state)
    return state, (_story_of_change(pending), *starts, *spared, *more)


def _seated(before: tuple[int, ...], kept: tuple[int, ...], newcomers: tuple[int, ...]) -> tuple[int, ...]:
    """By rank. Where as many come as go, whoever stays keeps its place, and with it its virtual workers.

    But the first place, where scripts print and save, is for somebody who has been there from earlier on.
    """
    if len(kept) + len(newcomers) != len(before):
        return kept + newcomers
    coming = iter(newcomers)
    places = [n if n in kept else next(coming) for n in before]
    if kept and places[0] not in kept:
        other = places.index(kept[-1])
        places[0], places[other] = places[other], places[0]
    return tuple(places)


def _story_of_change(pending: Pending) -> TellStory:
    fields = {
        "generation": pending.generation,
        "joiners": list(pending.joiners),
        "leavers": list(pending.leavers),
        "reason": pending.reason,
    }
    return TellStory(event="change_begun", fields=fields)


def _reason(state: State, members: tuple[int, ...], leaving: tuple[int, ...]) -> str:
    if members == state.members:
        before, after = ([len(b) for b in shares] for shares in (state.shares, shares_for(state, members)))
        return f"virtual workers dealt anew, {_plain(before)} -> {_plain(after)}: {state.uneven}"
    if leaving and len(members) == len(state.members):
        return f"worker {names(leaving)} moved"
    why = "; ".join(dict.fromkeys(state.workers[n].leaves for n in leaving))
    return f"{count(len(state.members))} -> {count(len(members))}" + (f": {why}" if why else "")


def _plain(sizes: list[int]) -> str:
    return "+".join(map(str, sizes))


# -- the end of a change ---------------------------------------------------------------------------------------------


def has_switched(pending: Pending) -> bool:
    return set(pending.switched) >= set(pending.members)


def complete(state: State, pending: Pending) -> Result:
    """All members have changed over: the new generation is in force, and nobody needs the leavers any more."""
    planned = state.schedule[0] if state.schedule and state.schedule[0].step == pending.hold_at else None
    state, dismissed = dismiss(state, pending.leavers)
    state = replace(
        state,
        generation=pending.generation,
        members=pending.members,
        shares=pending.shares,
        formed=pending.members,
        pending=None,
        attempts=0,
        target=planned.workers if planned else state.target,
        schedule=state.schedule[1:] if planned else state.schedule,
    )
    return state, (story_of_generation(state, pending.step, pending.reason), *dismissed)


def abandon(state: State, why: str) -> Result:
    """A change cannot be made as planned; try again, with other newcomers if need be, and after a while with pauses."""
    pending = state.pending
    assert pending is not None
    to = tuple(n for n in everybody(state, pending) if n in state.workers)
    said: Commands = (
        TellStory(event="change_abandoned", fields={"generation": pending.generation, "reason": why}),
        *((Abandon(pending.generation, to),) if pending.stage is not Stage.STARTING else ()),
    )
    state = replace(state, pending=None, attempts=state.attempts + 1)
    if state.attempts >= ATTEMPTS:
        state, more = _pause(state, pending, why)
    else:
        state, more = proceed(state)
    return state, (*said, *more)


def _pause(state: State, pending: Pending, why: str) -> Result:
    """The members go on as they are, unless they are too few, and nobody waits at a planned step any longer."""
    planned = state.schedule[0] if state.schedule and state.schedule[0].step == pending.hold_at else None
    state = replace(
        state,
        pause_s=pause_after(state.attempts),
        target=planned.workers if planned else state.target,
        speeds={n: s for n, s in state.speeds.items() if state.shares == shares_for(state, state.members)},
        schedule=state.schedule[1:] if planned else state.schedule,
    )
    if _settled(state, state.target):  # it was to deal virtual workers anew: that will be measured again
        return proceed(fresh_attempts(state))
    state, spared = dismiss(state, _idle(state))
    return state, (_story_of_pause(state, pending, why), release(state), *spared)


def pause_after(attempts: int) -> float:
    """Seconds, after so many attempts in vain."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(10, attempts - ATTEMPTS)))


def _story_of_pause(state: State, pending: Pending, why: str) -> TellStory:
    left = f"{count(len(state.members))} left, fewer than the minimum of {state.minimum}: waiting for others; "
    again = f"tried {state.attempts} times, again in {state.pause_s:g} s: {why}"
    reason = (left if is_parked(state) else f"{pending.reason}: ") + again
    fields = {"step": state.step, "attempts": state.attempts, "seconds": state.pause_s, "reason": reason}
    return TellStory(event="change_paused", fields=fields)


def on_pause_over(state: State, event: PauseOver) -> Result:
    return proceed(replace(state, pause_s=0.0))


def fresh_attempts(state: State) -> State:
    """Something else is wanted than what has failed."""
    return replace(state, attempts=0, pause_s=0.0)


def supersede(state: State) -> State:
    """Something else was asked for while nobody but newcomers knows of the change that has begun."""
    pending = state.pending
    if pending is None or pending.stage is not Stage.STARTING or state.phase is not Phase.TRAINING:
        return state
    return replace(state, pending=None)
