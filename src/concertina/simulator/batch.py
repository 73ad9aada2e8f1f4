"""Many simulations at once: each in a process of its own, none left behind whatever happens.

Workers ignore Ctrl-C, which is the parent's to handle, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for

from concertina.core.errors import ConcertinaError, SimulationError
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.recorder import Record
from concertina.simulator.run import simulate
from concertina.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One simulation to run."""

    scenario: Scenario
    policy: str
    overhead: str | float = "instant"
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    gap_s: float = 0.0
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
        placement=task.placement,
        trace=task.scenario.name,
        record=task.record,
    )


def run_all(tasks: Sequence[Task], *, processes: int = 1) -> Iterator[tuple[int, Result]]:
    """(index of the task, its result), in the order in which they finish."""
    if processes <= 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            yield index, run_task(task)
        return
    with ProcessPoolExecutor(
        max_workers=min(processes, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        waiting: dict[Future[Result | str], int] = {
            pool.submit(_run, task): i for i, task in enumerate(tasks)
        }
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), _result(future)
        except BaseException:
            for future in waiting:
                future.cancel()
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _result(future: Future[Result | str]) -> Result:
    try:
        outcome = future.result()
    except BrokenProcessPool:
        raise SimulationError(
            "a worker process ended without an answer (killed, or out of memory); try --jobs 1"
        ) from None
    if isinstance(outcome, str):
        raise SimulationError(outcome)
    return outcome


def _run(task: Task) -> Result | str:
    """A failure travels as its sentence: our exceptions take keywords, which pickle does not restore."""
    try:
        return run_task(task)
    except ConcertinaError as error:
        return str(error)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)
