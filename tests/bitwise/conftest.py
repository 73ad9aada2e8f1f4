"""References are computed once, also where several processes share the tests out; elastic runs share one nursery."""

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Reference, run_reference
from jobs import Job
from matrix import together

from concertina.backends.local import LocalBackend


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    nursery = LocalBackend.open(tmp_path_factory.mktemp("nursery"), threads=1)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The folder of DDP's results with P processes: this job's, and those of the jobs that run in the same launch."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ddp"
    root.mkdir(exist_ok=True)

    def get(job: Job, virtual: int) -> Path:
        done = root / f"{virtual}-{job.name}"
        with (root / f"{virtual}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this file is closed, or its process is gone
            if not done.exists():
                jobs = together(job, virtual)
                run_reference(jobs, virtual, root / str(virtual))
                for made in jobs:
                    (root / f"{virtual}-{made.name}").touch()
        return root / str(virtual)

    return get
