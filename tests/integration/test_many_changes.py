"""After a hundred changes a worker holds no more than after ten: no thread, descriptor or mapping stays behind."""

import time
from pathlib import Path

import pytest

from concertina.backends.local import LocalBackend
from concertina.runner import Run, RunSettings

JOB = Path(__file__).parents[2] / "benchmarks" / "chaos_job.py"
CHANGES, LIMIT_S = 100, 900.0


def holdings(pid: int) -> dict[str, int]:
    process = Path(f"/proc/{pid}")
    maps = (process / "maps").read_text().splitlines()
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "shared memory": sum("memfd:concertina" in line for line in maps),
    }


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_hundred_changes_leave_nothing_behind(tmp_path: Path) -> None:
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    backend = LocalBackend.open(tmp_path / "logs", 1)
    settings = RunSettings(
        script=JOB, args=[str(tmp_path / "digest")], virtual=4, workers=2, steps=100_000, run_dir=tmp_path / "run"
    )
    seen: dict[int, dict[str, int]] = {}
    try:
        with Run(settings, backend=backend) as job:
            until, asked = time.monotonic() + LIMIT_S, 1
            job.resize(3)
            while len(job.report.generations) <= CHANGES:
                assert not job.turn(), job.close_report().error
                assert time.monotonic() < until, f"{len(job.report.generations)} generations in {LIMIT_S:.0f} s"
                done = len(job.report.generations)
                if done > asked:
                    asked = done
                    job.resize(2 + done % 2)
                    if done in (10, CHANGES):
                        settle(job, 2.0)  # what is over is taken down in the background
                        seen[done] = holdings(job.workers[0])
            assert set(job.workers) >= {0, 1}, "those who stay keep their processes"
            job.interrupt()
            while not job.turn():
                pass
    finally:
        backend.close()
    early, late = seen[10], seen[CHANGES]
    assert all(late[what] <= early[what] + 2 for what in early), (early, late)
    assert {path.name for path in Path("/dev/shm").iterdir()} <= shared


def settle(job: Run, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        job.turn()
