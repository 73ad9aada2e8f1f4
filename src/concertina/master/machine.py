"""Which generation of workers runs when: a pure state machine.

Events come in, commands go out; nothing here knows about processes, sockets or clocks. A generation ends by handing its
state over, the next one starts from there; when all workers of the last one have ended well, the job is finished.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from concertina.core.messages import EXIT_HANDED_OVER, EXIT_INTERRUPTED, EXIT_OK

EXIT_INTERRUPTED_BY_USER = 130  # as shells report Ctrl-C


class Phase(Enum):
    TRAINING = "training"
    STOPPING = "stopping"  # a worker failed or somebody interrupted; waiting for the rest to end
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Change:
    """From optimizer step `step` on, train with `workers` workers."""

    step: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    phase: Phase
    workers: int
    changes: tuple[Change, ...] = ()  # still to come
    generation: int = 0
    running: frozenset[int] = frozenset()
    exits: dict[int, int] = field(default_factory=dict)  # worker -> exit code, this generation
    failure: str = ""
    exit_code: int = 0
    interrupted: bool = False


# Events, past tense.
@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: int
    generation: int
    code: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker said why it is about to end."""

    worker: int
    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """The user pressed Ctrl-C or the machine wants its slots back."""


Event = WorkerExited | WorkerFailed | InterruptAsked


# Commands, imperative.
@dataclass(frozen=True, slots=True, kw_only=True)
class StartGeneration:
    generation: int
    workers: int
    stop_at: int  # step after which it hands over; 0: none
    reason: str


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Workers are to write a checkpoint at the next step boundary and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    reason: str


Command = StartGeneration | AskToStop | KillWorkers


def start(workers: int, changes: tuple[Change, ...], at_step: int = 0) -> tuple[State, tuple[Command, ...]]:
    """The first generation; changes that lie before `at_step` (a resumed job) have already happened."""
    for change in changes:
        if change.step <= at_step:
            workers = change.workers
    ahead = tuple(change for change in changes if change.step > at_step)
    reason = f"the job {'goes on' if at_step else 'starts'} with {_count(workers)}"
    return _generation(State(phase=Phase.TRAINING, workers=workers, changes=ahead, generation=-1), reason)


def handle(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    if isinstance(event, WorkerExited):
        return on_worker_exited(state, event)
    if isinstance(event, WorkerFailed):
        return on_worker_failed(state, event)
    return on_interrupt_asked(state)


def on_worker_exited(state: State, event: WorkerExited) -> tuple[State, tuple[Command, ...]]:
    if event.generation != state.generation or event.worker not in state.running:
        return state, ()
    state = replace(state, running=state.running - {event.worker}, exits={**state.exits, event.worker: event.code})
    expected = (EXIT_OK, EXIT_HANDED_OVER, EXIT_INTERRUPTED)
    if state.phase is Phase.TRAINING and event.code not in expected:
        return _fail(state, event, state.failure or f"worker {event.worker} {_how(event.code)}")
    return _settle(state) if not state.running else (state, ())


def on_worker_failed(state: State, event: WorkerFailed) -> tuple[State, tuple[Command, ...]]:
    if event.generation != state.generation or state.failure:
        return state, ()
    return replace(state, failure=event.error), ()


def on_interrupt_asked(state: State) -> tuple[State, tuple[Command, ...]]:
    if state.phase is not Phase.TRAINING:
        return state, ()
    if state.interrupted:
        killed = replace(state, phase=Phase.STOPPING, failure="interrupted", exit_code=EXIT_INTERRUPTED_BY_USER)
        return killed, (KillWorkers("interrupted twice"),)
    return replace(state, interrupted=True), (AskToStop("interrupted"),)


def _fail(state: State, event: WorkerExited, why: str) -> tuple[State, tuple[Command, ...]]:
    code = event.code if event.code > 0 else 128 - event.code  # as shells report a signal
    early = [worker for worker, ended in state.exits.items() if ended == EXIT_OK]
    if early:
        why = f"worker {early[0]} left the training early, with exit code 0, and the others could not go on; {why}"
    failed = replace(state, phase=Phase.STOPPING, failure=why, exit_code=code)
    if failed.running:
        return failed, (KillWorkers(why),)
    return _settle(failed)


def _settle(state: State) -> tuple[State, tuple[Command, ...]]:
    """All workers of the generation have ended."""
    if state.phase is Phase.STOPPING:
        return replace(state, phase=Phase.FAILED), ()
    codes = set(state.exits.values())
    if codes == {EXIT_OK}:
        return replace(state, phase=Phase.FINISHED), ()
    if codes == {EXIT_INTERRUPTED}:
        return replace(state, phase=Phase.INTERRUPTED), ()
    if codes == {EXIT_HANDED_OVER} and state.changes:
        change, *later = state.changes
        reason = f"{_count(state.workers)} -> {_count(change.workers)} at step {change.step}, as asked by --resize"
        return _generation(replace(state, workers=change.workers, changes=tuple(later)), reason)
    why = f"workers ended in different ways: {dict(sorted(state.exits.items()))}"
    return replace(state, phase=Phase.FAILED, failure=state.failure or why, exit_code=1), ()


def _generation(state: State, reason: str) -> tuple[State, tuple[Command, ...]]:
    number = state.generation + 1
    started = replace(state, generation=number, running=frozenset(range(state.workers)), exits={})
    stop_at = state.changes[0].step if state.changes else 0
    command = StartGeneration(generation=number, workers=state.workers, stop_at=stop_at, reason=reason)
    return started, (command,)


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
