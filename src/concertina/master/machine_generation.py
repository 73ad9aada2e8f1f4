"""Forming generations: who is in one, which virtual workers each has, and what its members are told."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement
from concertina.core.virtual_plan import deal
from concertina.master.machine_types import (
    Commands,
    Dismiss,
    Form,
    Pending,
    Phase,
    Release,
    Result,
    Shares,
    Stage,
    StartWorker,
    State,
    TellStory,
    Worker,
)

PARKED_AT = 1  # parked members hold before any further step counts


def start_afresh(state: State, reason: str) -> Result:
    """All workers anew, from the newest checkpoint if there is one."""
    numbers = tuple(range(state.next_worker, state.next_worker + state.target))
    shares = VirtualPlacement.blocks(state.virtual, state.target).workers
    generation = state.next_generation
    fresh = replace(
        calm(state),
        phase=Phase.STARTING,
        generation=generation,
        next_generation=generation + 1,
        members=numbers,
        shares=shares,
        workers={n: Worker() for n in numbers},
        next_worker=state.next_worker + state.target,
        pending=None,
        attempts=0,
        pause_s=0.0,
        speeds={},
        told=False,
        formed=(),
        exits={},
        failure="",
    )
    starts = tuple(
        StartWorker(
            worker=n,
            generation=generation,
            members=numbers,
            resume=state.resume,
            hold_at=next_hold(state),
        )
        for n in numbers
    )
    return fresh, (story_of_generation(fresh, state.step, reason), *starts)


def calm(state: State) -> State:
    """Nobody is missed and nobody waits."""
    return replace(state, stopped={}, dropped=(), lost=())


def shares_for(state: State, members: tuple[int, ...]) -> Shares:
    """Contiguous blocks, by speed where workers were found uneven; whoever is not known is as fast as most."""
    known = [state.speeds[n] for n in members if n in state.speeds]
    if not known:
        return VirtualPlacement.blocks(state.virtual, len(members)).workers
    sizes = deal(state.virtual, [state.speeds.get(n, median(known)) for n in members])
    return tuple(tuple(range(lo, hi)) for lo, hi in pairwise(accumulate(sizes, initial=0)))


def have_posts(state: State, members: Iterable[int]) -> bool:
    return all(n in state.workers and state.workers[n].post for n in members)


def form_at_once(state: State) -> Result:
    """Tells the members of the generation in force to build it; the pages that this names are used up."""
    formation = Formation(
        generation=state.generation,
        members=state.members,
        placement=VirtualPlacement(state.shares),
        posts=tuple(state.workers[n].post for n in state.members),
        desks=tuple(state.workers[n].desk for n in state.members),
        next_hold=next_hold(state),
        parked=is_parked(state),
    )
    return replace(_posts_used(state, state.members), told=True), (Form(formation, state.members, True),)


def form_pending(state: State, pending: Pending) -> Result:
    """Tells everybody concerned to build what is to come, beside training."""
    formation = Formation(
        generation=pending.generation,
        members=pending.members,
        placement=VirtualPlacement(pending.shares),
        posts=tuple(state.workers[n].post for n in pending.members),
        desks=tuple(state.workers[n].desk for n in pending.members),
        joiners=pending.joiners,
        leavers=pending.leavers,
        sources=tuple((n, state.workers[n].desk) for n in state.members),
        hold_at=pending.hold_at,
        next_hold=next((change.step for change in state.schedule if change.step > pending.hold_at), 0),
    )
    return _posts_used(state, pending.members), (Form(formation, everybody(state, pending), False),)


def _posts_used(state: State, members: tuple[int, ...]) -> State:
    workers = {n: replace(w, post="") if n in members else w for n, w in state.workers.items()}
    return replace(state, workers=workers)


def next_hold(state: State) -> int:
    return state.schedule[0].step if state.schedule else 0


def release(state: State) -> Release:
    """The plan has changed; what was said of it with earlier generations no longer holds."""
    pending = state.pending
    told = pending is not None and pending.stage is not Stage.STARTING
    to = everybody(state, pending) if pending is not None and told else state.members
    generation = pending.generation if pending is not None and told else state.generation
    return Release(tuple(n for n in to if n in state.workers), generation, next_hold(state))


def is_parked(state: State) -> bool:
    """Too few are left: they keep the state and wait for others."""
    return len(state.members) < state.minimum


def everybody(state: State, pending: Pending) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*state.members, *pending.members)))


def has_moved(state: State) -> bool:
    """Whether members have changed over to the generation that is pending: then all who were needed for it have."""
    pending = state.pending
    return pending is not None and (bool(pending.switched) or pending.generation in state.stopped.values())


def trainers(state: State) -> tuple[int, ...]:
    """Who trains together at the moment, dead or alive."""
    return state.pending.members if state.pending is not None and has_moved(state) else state.members


def with_worker(state: State, number: int, worker: Worker) -> State:
    return replace(state, workers={**state.workers, number: worker})


def without(state: State, numbers: Iterable[int]) -> State:
    gone = set(numbers)
    return replace(state, workers={n: w for n, w in state.workers.items() if n not in gone})


def dismiss(state: State, numbers: Iterable[int]) -> Result:
    """They are nothing to us from here on; when they end is their own affair."""
    gone = tuple(n for n in numbers if n in state.workers)
    commands: Commands = (Dismiss(gone),) if gone else ()
    return without(state, gone), commands


def plus(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return numbers if number in numbers else (*numbers, number)


def story_of_generation(state: State, step: int, reason: str) -> TellStory:
    fields = {
        "generation": state.generation,
        "workers": len(state.members),
        "members": list(state.members),
        "shares": [len(block) for block in state.shares],
        "step": step,
        "reason": reason,
    }
    return TellStory(event="generation_started", fields=fields)


def count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def names(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers))


def how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
