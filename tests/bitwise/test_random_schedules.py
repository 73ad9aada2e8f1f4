"""Random jobs, random worker counts, random moments of change, moves and kills: always the bits of DDP."""

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Reference, differences, elastic_settings, run_elastic
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from matrix import JOBS

from concertina.backends.local import LocalBackend
from concertina.runner import Run

LIMIT_SECONDS = 240.0  # for one job, on a busy machine
PAUSE = 0.12  # seconds per turn: a newcomer needs some steps to come in


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, str]:
    name = draw(st.sampled_from(sorted(JOBS)))
    job, counts = JOBS[name]
    virtual = draw(st.sampled_from(counts))
    workers = draw(st.integers(1, min(4, virtual)))
    moments = sorted(draw(st.sets(st.integers(1, job.steps - 1), min_size=1, max_size=5)))
    sizes = [draw(st.integers(1, min(4, virtual))) for _ in moments]
    return name, virtual, workers, ",".join(f"{m}={n}" for m, n in zip(moments, sizes, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_schedule_has_the_bits_of_ddp(reference: Reference, backend: LocalBackend) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(case=schedules())
    def check(case: tuple[str, int, int, str]) -> None:
        name, virtual, workers, changes = case
        job = JOBS[name][0]
        with tempfile.TemporaryDirectory() as folder:
            run_elastic(job, virtual, workers, changes, Path(folder) / "out", backend)
            assert differences(reference(job, virtual), job, virtual, Path(folder) / "out") == []

    check()


# -- moves and kills: they come when they come, so what they do is not the same in every run; the bits are -----------


@dataclass(frozen=True)
class Blow:
    """What is done to a job when a step is over."""

    step: int
    kind: str  # "resize", "move" or "kill"
    which: int  # the new size, or whom it hits, counted round


@dataclass(frozen=True)
class Ordeal:
    name: str
    virtual: int
    workers: int
    blows: tuple[Blow, ...]


@st.composite
def ordeals(draw: st.DrawFn) -> Ordeal:
    name = draw(st.sampled_from(sorted(JOBS)))
    job, counts = JOBS[name]
    virtual = draw(st.sampled_from(counts))
    kinds = st.sampled_from(("resize", "move", "move", "kill", "kill"))
    moments = sorted(draw(st.sets(st.integers(0, job.steps - 2), min_size=2, max_size=4)))
    blows = tuple(Blow(m, draw(kinds), draw(st.integers(1, min(4, virtual)))) for m in moments)
    return Ordeal(name, virtual, draw(st.integers(1, min(4, virtual))), blows)


class Striker:
    """A run's listener; deals the blows of an ordeal."""

    def __init__(self, ordeal: Ordeal, backend: LocalBackend) -> None:
        self._left = list(ordeal.blows)
        self._backend = backend
        self.job: Run | None = None
        self.seen: Counter[str] = Counter()  # events of the job
        self.killed = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.seen[event["event"]] += 1
        if self.job is None or event["event"] != "step":
            return
        while self._left and event["step"] >= self._left[0].step:
            self._strike(self.job, self._left.pop(0))

    def _strike(self, job: Run, blow: Blow) -> None:
        workers = sorted(job.workers)
        if blow.kind == "resize":
            job.resize(blow.which)
        elif workers:
            worker = workers[blow.which % len(workers)]
            if blow.kind == "move":
                job.remove([worker], replaced=True)
            else:
                self._kill(worker)

    def _kill(self, worker: int) -> None:
        pid = self._backend.pid_of(worker)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self.killed += 1


def go_through(ordeal: Ordeal, out: Path, backend: LocalBackend, reference: Reference) -> Striker:
    """Runs the job and compares it; what happened to it."""
    job = JOBS[ordeal.name][0]
    striker = Striker(ordeal, backend)
    chosen = elastic_settings(job, ordeal.virtual, ordeal.workers, "", out, pause=PAUSE)
    until = time.monotonic() + LIMIT_SECONDS
    with Run(chosen, striker, backend) as run:
        striker.job = run
        while not run.turn():
            assert time.monotonic() < until, f"{ordeal} is not over: {striker.seen}"
        report = run.close_report()
    assert report.exit == 0, report.error
    assert differences(reference(job, ordeal.virtual), job, ordeal.virtual, out, striker.killed) == [], ordeal
    return striker


@pytest.mark.timeout(500)
def test_a_move_and_a_kill_leave_the_bits_of_ddp(tmp_path: Path, reference: Reference, backend: LocalBackend) -> None:
    ordeal = Ordeal("cnn-adamw", 4, 2, (Blow(0, "move", 0), Blow(7, "kill", 1)))
    seen = go_through(ordeal, tmp_path / "out", backend, reference)
    assert seen.killed == 1
    assert seen.seen["recovered"] > 0
    assert seen.seen["changed_over"] > 0


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_any_moves_and_kills_leave_the_bits_of_ddp(reference: Reference, backend: LocalBackend) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=40,
        phases=[Phase.generate],  # a failure may not come again, so there is no use in looking for a smaller one
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(ordeal=ordeals())
    def check(ordeal: Ordeal) -> None:
        with tempfile.TemporaryDirectory() as folder:
            striker = go_through(ordeal, Path(folder) / "out", backend, reference)
        seen.update(striker.seen)
        seen["killed"] += striker.killed

    check()
    assert min(seen["killed"], seen["recovered"], seen["changed_over"]) > 5, seen
