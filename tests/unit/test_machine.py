"""The machine that says which generation runs when: events in, commands out."""

from concertina.core.messages import EXIT_HANDED_OVER, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from concertina.master.machine import (
    AskToStop,
    Change,
    InterruptAsked,
    KillWorkers,
    Phase,
    StartGeneration,
    State,
    WorkerExited,
    WorkerFailed,
    handle,
    start,
)


def exit_all(state: State, code: int) -> tuple[State, tuple[object, ...]]:
    commands: tuple[object, ...] = ()
    for worker in sorted(state.running):
        state, commands = handle(state, WorkerExited(worker, state.generation, code))
    return state, commands


def test_a_job_without_changes_is_one_generation() -> None:
    state, commands = start(2, ())
    assert commands == (StartGeneration(generation=0, workers=2, stop_at=0, reason="the job starts with 2 workers"),)
    state, commands = exit_all(state, EXIT_OK)
    assert (state.phase, commands) == (Phase.FINISHED, ())


def test_a_change_starts_the_next_generation_when_all_have_handed_over() -> None:
    state, commands = start(1, (Change(10, 4), Change(20, 2)))
    assert commands[0].stop_at == 10
    state, commands = exit_all(state, EXIT_HANDED_OVER)
    reason = "1 worker -> 4 workers at step 10, as asked by --resize"
    assert commands == (StartGeneration(generation=1, workers=4, stop_at=20, reason=reason),)
    state, commands = handle(state, WorkerExited(0, 1, EXIT_HANDED_OVER))
    assert commands == ()
    state, commands = exit_all(state, EXIT_HANDED_OVER)
    assert commands[0].workers == 2
    assert commands[0].stop_at == 0


def test_a_resumed_job_starts_with_the_workers_its_plan_had_at_that_step() -> None:
    _, commands = start(1, (Change(10, 4), Change(20, 2)), at_step=15)
    assert (commands[0].workers, commands[0].stop_at) == (4, 20)


def test_a_failing_worker_ends_the_others_and_its_own_words_are_the_reason() -> None:
    state, _ = start(3, ())
    state, commands = handle(state, WorkerFailed(1, 0, "the model has no parameters"))
    assert commands == ()
    state, commands = handle(state, WorkerExited(1, 0, EXIT_USAGE))
    assert commands == (KillWorkers("the model has no parameters"),)
    state, _ = handle(state, WorkerExited(0, 0, -9))
    state, _ = handle(state, WorkerExited(2, 0, -9))
    assert (state.phase, state.failure, state.exit_code) == (Phase.FAILED, "the model has no parameters", EXIT_USAGE)


def test_a_killed_worker_is_reported_as_shells_do() -> None:
    state, _ = start(1, ())
    state, _ = handle(state, WorkerExited(0, 0, -9))
    assert (state.phase, state.exit_code, state.failure) == (Phase.FAILED, 137, "worker 0 was killed by signal 9")


def test_an_interrupt_asks_once_and_kills_the_second_time() -> None:
    state, _ = start(2, ())
    state, commands = handle(state, InterruptAsked())
    assert commands == (AskToStop("interrupted"),)
    killed, commands = handle(state, InterruptAsked())
    assert commands == (KillWorkers("interrupted twice"),)
    killed, _ = exit_all(killed, -9)
    assert (killed.phase, killed.failure, killed.exit_code) == (Phase.FAILED, "interrupted", 130)
    state, _ = exit_all(state, EXIT_INTERRUPTED)
    assert state.phase is Phase.INTERRUPTED


def test_workers_that_end_in_different_ways_are_a_failure() -> None:
    state, _ = start(2, (Change(5, 1),))
    state, _ = handle(state, WorkerExited(0, 0, EXIT_OK))
    state, _ = handle(state, WorkerExited(1, 0, EXIT_HANDED_OVER))
    assert state.phase is Phase.FAILED
    assert "different ways" in state.failure


def test_a_worker_that_leaves_early_is_named() -> None:
    state, _ = start(2, ())
    state, _ = handle(state, WorkerExited(1, 0, EXIT_OK))
    state, _ = handle(state, WorkerFailed(0, 0, "the connection broke"))
    state, _ = handle(state, WorkerExited(0, 0, 1))
    assert state.failure.startswith("worker 1 left the training early, with exit code 0")


def test_events_of_earlier_generations_change_nothing() -> None:
    state, _ = start(1, (Change(5, 2),))
    state, _ = handle(state, WorkerExited(0, 0, EXIT_HANDED_OVER))
    assert handle(state, WorkerExited(0, 0, EXIT_OK)) == (state, ())
    assert handle(state, WorkerFailed(0, 0, "late")) == (state, ())
