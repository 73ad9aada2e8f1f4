"""References are computed once per number of virtual workers; elastic runs share one nursery."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import run_reference
from jobs import Job
from matrix import JOBS

from concertina.backends.local import LocalBackend


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    nursery = LocalBackend.open(tmp_path_factory.mktemp("nursery"), threads=1)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of DDP's results with P processes, for all jobs that are tried with that P."""
    done: dict[int, Path] = {}

    def get(virtual: int) -> Path:
        if virtual not in done:
            done[virtual] = tmp_path_factory.mktemp(f"ddp-{virtual}")
            jobs: list[Job] = [job for job, counts in JOBS.values() if virtual in counts]
            run_reference(jobs, virtual, done[virtual])
        return done[virtual]

    return get
