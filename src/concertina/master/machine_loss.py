"""Workers that change over, stop, are lost or come to their end, and how the others go on."""

from dataclasses import replace

from concertina.core.messages import EXIT_INTERRUPTED, EXIT_LEFT, EXIT_OK, EXIT_STATE_LOST
from concertina.master.machine_change import abandon, complete, form_first, has_switched, proceed
from concertina.master.machine_end import MOST_LOSSES, fail, restart, settle
from concertina.master.machine_generation import (
    calm,
    count,
    dismiss,
    form_at_once,
    has_moved,
    have_posts,
    how,
    names,
    plus,
    shares_for,
    story_of_generation,
    trainers,
    with_worker,
    without,
)
from concertina.master.machine_types import (
    Abandon,
    Commands,
    Dropped,
    Pending,
    Phase,
    PostOffered,
    Result,
    Stage,
    State,
    Stopped,
    Switched,
    TellLost,
    TellStory,
    Worker,
    WorkerExited,
    WorkerFailed,
)

# -- the change-over -------------------------------------------------------------------------------------------------


def on_switched(state: State, event: Switched) -> Result:
    pending = state.pending
    if pending is None or event.generation != pending.generation:
        return state, ()
    pending = replace(pending, switched=plus(pending.switched, event.worker), step=event.step)
    state = replace(state, pending=pending, step=max(state.step, event.step))
    if state.phase is Phase.REGROUPING:
        return regroup(state)
    return _complete_if_all_have(state, pending)


def _complete_if_all_have(state: State, pending: Pending) -> Result:
    if not has_switched(pending) or not set(pending.switched) >= set(pending.leavers):
        return state, ()
    state, commands = complete(state, pending)
    state, more = proceed(state)
    return state, (*commands, *more)


# -- the end of a worker ---------------------------------------------------------------------------------------------


def on_worker_failed(state: State, event: WorkerFailed) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    state = with_worker(state, event.worker, replace(known, said=event.error))
    if event.worker in trainers(state) and not state.failure:
        state = replace(state, failure=event.error)
    return state, ()


def on_worker_exited(state: State, event: WorkerExited) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    state = without(state, (event.worker,))
    if state.phase is Phase.STOPPING:
        return settle(replace(state, exits={**state.exits, event.worker: event.code}))
    pending = state.pending
    joins = pending is not None and event.worker in pending.joiners
    if joins and event.worker not in trainers(state) and pending is not None and pending.stage is not Stage.ARMED:
        return abandon(state, f"{_how(event, known.said or known.stuck)} before it could join")
    if event.worker in state.members or joins:
        return _member_exited(state, event, known)
    return state, ()  # a newcomer that nobody counts on


def _how(event: WorkerExited, why: str) -> str:
    return f"worker {event.worker} {how(event.code)}" + (f" ({why})" if why else "")


def _member_exited(state: State, event: WorkerExited, known: Worker) -> Result:
    worker, code, pending = event.worker, event.code, state.pending
    if code in (EXIT_OK, EXIT_INTERRUPTED):
        return _come_to_its_end(state, event)
    if code == EXIT_STATE_LOST:
        return restart(state, "what only a lost worker had could not be made again")
    if code == EXIT_LEFT and pending is not None and worker in pending.leavers:
        return on_switched(state, Switched(worker, pending.generation, max(pending.step, state.step)))
    newcomer = pending is not None and worker in pending.joiners and worker not in pending.switched
    if code > 0 and code != EXIT_LEFT and not newcomer:
        return fail(state, code, state.failure or known.said or f"worker {worker} {how(code)}")
    return _lose(state, event, known.stuck)


def _come_to_its_end(state: State, event: WorkerExited) -> Result:
    """Its script is done. Should the others still wait for it, it left early, and they will say so."""
    pending = state.pending
    state = replace(state, exits={**state.exits, event.worker: event.code})
    if pending is not None and event.worker in pending.joiners:  # so it had changed over
        state = replace(state, pending=replace(pending, switched=plus(pending.switched, event.worker)))
    rest = tuple(n for n in trainers(state) if n in state.workers)
    if not rest:
        return settle(state)
    state, more = regroup(state) if state.phase is Phase.REGROUPING else (state, ())
    return state, (TellLost((event.worker,), rest), *more)


def _lose(state: State, event: WorkerExited, stuck: str) -> Result:
    """A member is gone: everybody else stops at the meeting that it will never come to, and says so."""
    why = _how(event, stuck)
    told = TellStory(event="worker_lost", fields={"worker": event.worker, "step": state.step, "reason": why})
    if state.phase is Phase.STARTING:
        before: Commands = () if state.interrupted else (told,)  # whoever stopped the job has lost nothing
        return restart(state, f"{why} before training began", *before)
    if state.phase is Phase.TRAINING:
        if state.losses >= MOST_LOSSES:
            return fail(state, event.code, f"workers keep dying at step {state.step}; {why}")
        state = replace(state, losses=state.losses + 1)
    state = replace(state, lost=plus(state.lost, event.worker), phase=Phase.REGROUPING)
    said: Commands = (told, TellLost(state.lost, tuple(state.workers))) if state.workers else (told,)
    state, more = regroup(state)
    return state, (*said, *more)


# -- going on without the lost ---------------------------------------------------------------------------------------


def on_stopped(state: State, event: Stopped) -> Result:
    """Every survivor says so once for each generation that it leaves; it may notice a loss before we do."""
    if event.worker not in state.workers or state.phase is Phase.STARTING:
        return state, ()  # who starts is told by its end that all start again
    if event.worker not in state.members and (state.pending is None or event.worker not in state.pending.members):
        return dismiss(state, (event.worker,))
    state = replace(state, stopped={**state.stopped, event.worker: event.generation}, step=max(state.step, event.step))
    return _regroup_from(state)


def _regroup_from(state: State) -> Result:
    if state.phase is Phase.TRAINING:
        if state.losses >= MOST_LOSSES:
            return fail(state, 1, f"workers could not go on at step {state.step}, {MOST_LOSSES} times in a row")
        state = replace(state, phase=Phase.REGROUPING, losses=state.losses + 1)
    return regroup(state) if state.phase is Phase.REGROUPING else (state, ())


def on_dropped(state: State, event: Dropped) -> Result:
    pending = state.pending
    if state.phase is not Phase.REGROUPING or pending is None or event.generation != pending.generation:
        return state, ()
    return regroup(replace(state, dropped=plus(state.dropped, event.worker)))


def on_post_offered(state: State, event: PostOffered) -> Result:
    known = state.workers.get(event.worker)
    if known is None:
        return state, ()
    state = with_worker(state, event.worker, replace(known, post=event.post))
    return regroup(state) if state.phase is Phase.REGROUPING else form_first(state)


def regroup(state: State) -> Result:
    """Finds out what the survivors are in, and forms a generation of them when all have stopped.

    A loss may also stop nobody: that of a leaver after the change, or of a newcomer before it.
    """
    pending = state.pending
    if pending is not None and has_switched(pending) and not set(state.lost) & set(pending.members):
        return _complete_without_leavers(state, pending)
    if pending is not None and _is_off(state):
        why = f"worker {names(state.lost)} was lost before it could join"
        return abandon(replace(calm(state), phase=Phase.TRAINING), why)
    group = _survivors(state)
    if not group:
        return settle(state) if state.exits else restart(state, "every worker was lost")
    if not all(n in state.stopped for n in group) or not have_posts(state, group):
        return state, ()
    if not state.lost and state.exits:
        return fail(state, 1, "they wait for it")
    return _form_of_survivors(state, group)


def _complete_without_leavers(state: State, pending: Pending) -> Result:
    state, commands = complete(state, pending)
    if state.stopped:  # something of the lost leaver's was still needed
        state, more = regroup(state)
        return state, (*commands, *more)
    state, more = proceed(replace(calm(state), phase=Phase.TRAINING))
    return state, (*commands, *more)


def _is_off(state: State) -> bool:
    """A newcomer was lost, and no member has changed over or ever will: it takes all, and one will not.

    Others may be unable to say so: they have voted and wait for that one.
    """
    alive = {n for n in state.members if n in state.workers}
    untouched = not set(state.lost) & set(state.members) and not state.stopped and not has_moved(state)
    return untouched and bool(alive & set(state.dropped))


def _survivors(state: State) -> tuple[int, ...]:
    """Who has the state. A newcomer has it from when it has changed over."""
    pending = state.pending
    alive = tuple(n for n in trainers(state) if n in state.workers)
    if pending is None or not has_moved(state):
        return alive
    return tuple(n for n in alive if n not in pending.joiners or n in pending.switched or n in state.stopped)


def _form_of_survivors(state: State, group: tuple[int, ...]) -> Result:
    pending, moved = state.pending, has_moved(state)
    others = tuple(n for n in state.workers if n not in group)
    commands: Commands = ()
    if pending is not None and moved:  # leavers have left; newcomers that were not in yet would have to begin again
        state, commands = dismiss(state, (n for n in others if n in (*pending.leavers, *pending.joiners)))
    elif pending is not None and others:
        commands = (Abandon(pending.generation, others),)
    reason = _reason(state, group)
    state = replace(
        calm(state),
        phase=Phase.TRAINING,
        generation=state.next_generation,
        next_generation=state.next_generation + 1,
        members=group,
        shares=shares_for(state, group),
        pending=None,
        formed=(),
    )
    state, formed = form_at_once(state)
    return state, (*commands, story_of_generation(state, state.step, reason), *formed)


def _reason(state: State, group: tuple[int, ...]) -> str:
    what = f"worker {names(state.lost)} lost" if state.lost else f"worker {names(state.stopped)} could not go on"
    if len(group) < state.minimum:
        return f"{what}: {count(len(group))} left, fewer than the minimum of {state.minimum}; waiting for others"
    return f"{what}: {count(len(group))} go on" if len(group) > 1 else f"{what}: one worker goes on"
