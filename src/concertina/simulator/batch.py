"""Many simulations at once: each in a process of its own, none left behind whatever happens.

Ctrl-C is the parent's to handle: children never see it, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import SpawnProcess

from concertina.core.errors import ConcertinaError, SimulationError
from concertina.policies.base import Policy
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.recorder import Record
from concertina.simulator.run import simulate
from concertina.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One simulation to run."""

    scenario: Scenario
    policy: str | Policy
    overhead: str | float = "instant"
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    gap_s: float = 0.0
    tick_s: float = 0.0
    placement: str = "best-fit"
    record: Record = field(default_factory=Record)


def run_task(task: Task) -> Result:
    """Run it here and now."""
    return simulate(
        task.scenario.jobs,
        cluster=task.scenario.cluster,
        policy=task.policy,
        throughput=task.scenario.throughput,
        overhead=task.overhead,
        noise=task.noise,
        seed=task.seed,
        gap_s=task.gap_s,
        tick_s=task.tick_s,
        placement=task.placement,
        trace=task.scenario.name,
        record=task.record,
    )


def run_all(tasks: Sequence[Task], *, processes: int = 1) -> Iterator[tuple[int, Result]]:
    """(index of the task, its result), in the order in which they finish.

    A process for each task, at most `processes` at a time. A pool would keep its processes, but one that is
    ended while it hands over a long trace waits for ever.
    """
    if processes <= 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            yield index, run_task(task)
        return
    queue = iter(enumerate(tasks))
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        for index, task in islice(queue, processes):
            _start(index, task, running)
        while running:
            for ready in wait_for(list(running)):
                assert isinstance(ready, Connection)
                index, result = _finish(ready, running)
                for following, task in islice(queue, 1):
                    _start(following, task, running)
                yield index, result
    finally:
        for _, process in running.values():
            process.terminate()
        for connection, (_, process) in running.items():
            process.join()
            connection.close()


def _start(index: int, task: Task, running: dict[Connection, tuple[int, SpawnProcess]]) -> None:
    """Start a process for the task; meanwhile Ctrl-C is held back, and the child never sees it."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # it would let Ctrl-C through again, were it started further below
    ours, theirs = context.Pipe(duplex=False)
    with _interrupts_later():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child inherits that
        try:
            process = context.Process(target=_work, args=(theirs, task), daemon=True)
            process.start()
            running[ours] = index, process
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C counts at the end: a child that is told only half of its task would complain.

    The mask of this thread is not enough, since a thread of some library may take the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _finish(ready: Connection, running: dict[Connection, tuple[int, SpawnProcess]]) -> tuple[int, Result]:
    index, process = running[ready]
    try:
        outcome: Result | str = ready.recv()
    except EOFError:
        outcome = "a worker process ended without an answer (killed, or out of memory); try --jobs 1"
    process.join()
    del running[ready]
    ready.close()
    if isinstance(outcome, str):
        raise SimulationError(outcome)
    return index, outcome


def _work(answer: Connection, task: Task) -> None:
    """The child. A failure travels as its sentence: our exceptions take keywords, which pickle loses."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        answer.send(run_task(task))
    except ConcertinaError as error:
        answer.send(str(error))


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)
