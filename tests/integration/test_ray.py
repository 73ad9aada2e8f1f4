"""A job on a Ray cluster of three hosts, one of which is cut off and comes back: the bits of one machine."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_hosts import RayHosts, ray_hosts
from several_hosts import SCRIPT, differences

from concertina.backends.local import LocalBackend
from concertina.runner import RunSettings, run

STEPS = 60
PATIENCE = 180.0
COMMAND = [sys.executable, "-c", "from concertina.cli import main; main()"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayHosts]:
    with ray_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def wanted(tmp_path: Path, backend: LocalBackend) -> Path:
    """The last checkpoint of the job on one machine."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "go").touch()
    settings = RunSettings(
        script=folder / "train.py",
        args=[str(folder / "go")],
        virtual=4,
        workers=2,
        steps=STEPS,
        checkpoint_dir=folder / "checkpoints",
        run_dir=folder / "run",
    )
    run(settings, backend=backend)
    return folder / "checkpoints" / f"step-{STEPS:08}"


class Command:
    """`concertina run --backend ray`, started on the head."""

    def __init__(self, cluster: RayHosts, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.go = folder, folder / "go"
        (folder / "train.py").write_text(SCRIPT)
        options = {
            "--backend": "ray", "--virtual": "4", "--workers": "3", "--steps": str(STEPS), "--run-dir": "run",
            "--checkpoint": "checkpoints", "--events": "events", "--report": "report.json",
        }  # fmt: skip
        args = [part for pair in options.items() for part in pair]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*cluster.head.prefix, *COMMAND, "run", *args, "train.py", str(self.go)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**cluster.env, "RAY_ADDRESS": cluster.address},
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def workers(self) -> list[int]:
        """Of the generation in force."""
        started = self.events("generation_started")
        return started[-1]["members"] if started else []

    def step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=0)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        patience = time.monotonic() + PATIENCE
        while not until():
            output = (self.folder / "output").read_text()[-3000:]
            assert self.process.poll() is None, f"ended before {what}:\n{output}"
            assert time.monotonic() < patience, f"no end of waiting: {what}\n{output}"
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_on_three_hosts_does_without_one_that_is_cut_off_and_uses_it_again(
    tmp_path: Path, cluster: RayHosts, wanted: Path
) -> None:
    job = Command(cluster, tmp_path / "job")
    try:
        job.wait(lambda: job.step() >= 5, "steps of three workers")
        assert len(job.workers()) == 3
        victim = cluster.net.hosts[1]
        victim.cut()
        job.wait(lambda: len(job.workers()) == 2, "the job going on without the host that was cut off")
        at = job.step()
        job.wait(lambda: job.step() > at, "steps of two workers")
        victim.mend()
        job.wait(lambda: cluster.has_ended(victim), "Ray ending the node that it has given up on")
        cluster.start(victim)  # as whoever looks after that host would
        job.wait(lambda: len(job.workers()) == 3, "a worker on the host that is back")
        job.go.touch()
        assert job.process.wait(PATIENCE) == 0, (job.folder / "output").read_text()[-3000:]
    finally:
        job.process.kill()
        job.process.wait()
    report = json.loads((job.folder / "report.json").read_text())
    assert [g["workers"] for g in report["generations"]] == [3, 2, 3]
    assert all(row["missed"] == row["duplicated"] == 0 for row in report["samples"][:-1])
    assert differences(wanted, job.folder / "checkpoints" / f"step-{STEPS:08}") == []
