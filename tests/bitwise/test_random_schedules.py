"""Random jobs, random worker counts, random moments of change: always the bits of DDP."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import differences, run_elastic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import JOBS

from concertina.backends.local import LocalBackend


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
def test_any_schedule_has_the_bits_of_ddp(reference: Callable[[int], Path], backend: LocalBackend) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(case=schedules())
    def check(case: tuple[str, int, int, str]) -> None:
        name, virtual, workers, changes = case
        job = JOBS[name][0]
        with tempfile.TemporaryDirectory() as folder:
            run_elastic(job, virtual, workers, changes, Path(folder) / "out", backend)
            assert differences(reference(virtual), job, virtual, Path(folder) / "out") == []

    check()
