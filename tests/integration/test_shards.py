"""Every record of a sharded stream is part of exactly one step that counts, whoever comes, leaves or is killed.

The job's own parameters say so: each counts how often its record was trained on. Others depend on the order of all
batches, so that equal bits mean equal order.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from concertina.backends.local import LocalBackend
from concertina.core.checkpoints import newest_whole
from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.core.messages import MASTER
from concertina.runner import Report, Run, RunSettings, parse_changes
from concertina.runtime import Session

JOB = Path(__file__).with_name("shard_job.py")
CHOICE = random.Random(4)
LENGTHS = [CHOICE.choice([0, 1, 2, 7, 30, 45, 60]) for _ in range(24)]
EPOCHS = 2
ARGS = ["--lengths", ",".join(map(str, LENGTHS)), "--epochs", str(EPOCHS)]


@dataclass(frozen=True)
class Trained:
    report: Report
    count: torch.Tensor
    mix: torch.Tensor
    step: int
    epochs: list[dict[str, Any]]  # what was said about the stream at the end of each

    @property
    def once_per_epoch(self) -> bool:
        return bool((self.count == EPOCHS).all()) and len(self.count) == sum(LENGTHS)

    def same_as(self, other: "Trained") -> bool:
        return self.step == other.step and torch.equal(self.mix, other.mix)


def train(
    backend: LocalBackend,
    folder: Path,
    workers: int,
    changes: str = "",
    kills: Sequence[tuple[int, str]] = (),
    **more: Any,
) -> Trained:
    """`kills`: from which step on somebody is killed: the newest worker, the main one or the master."""
    out = folder / "out.pt"
    settings = RunSettings(
        script=JOB,
        args=[str(out), *ARGS, "--pause", "0.02" if kills else "0"],
        virtual=4,
        workers=workers,
        changes=parse_changes(changes),
        run_dir=folder / "run",
        **more,
    )
    events: list[dict[str, Any]] = []
    waiting = list(kills)
    with Run(settings, lambda event: events.append(dict(event)), backend) as job:
        while not job.turn():
            step = max((e["step"] for e in events if e["event"] == "step"), default=0)
            if waiting and step >= waiting[0][0] and len(job.workers) > 1:
                kill(waiting.pop(0)[1], job, backend)
        report = job.close_report()
    assert report.exit == 0, report.error
    assert not waiting
    return Trained(report, **torch.load(out), epochs=[e for e in events if e["event"] == "shards"])


def kill(whom: str, job: Run, backend: LocalBackend) -> None:
    pids = {"newest": job.workers.get(max(job.workers)), "main": job.workers.get(job.main_worker)}
    pid = pids[whom] if whom != "master" else backend._pids.get(MASTER)
    if pid:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(backend: LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One worker for all virtual workers."""
    return train(backend, tmp_path_factory.mktemp("alone"), 1)


def test_every_record_is_trained_once_per_epoch(alone: Trained) -> None:
    assert alone.once_per_epoch
    rounds = -(-sum(LENGTHS) // (4 * 3))
    assert [(e["pieces"], e["records"], e["rounds"]) for e in alone.epochs] == [(24, sum(LENGTHS), rounds)] * EPOCHS
    assert alone.step == EPOCHS * rounds


def test_growing_and_shrinking_change_nothing(alone: Trained, backend: LocalBackend, tmp_path: Path) -> None:
    changed = train(backend, tmp_path, 2, "9=4,30=1,44=3,60=2")
    assert [g.workers for g in changed.report.generations] == [2, 4, 1, 3, 2]
    assert changed.once_per_epoch
    assert changed.same_as(alone)


def test_kills_of_workers_and_master_change_nothing(alone: Trained, backend: LocalBackend, tmp_path: Path) -> None:
    killed = train(backend, tmp_path, 4, kills=[(5, "newest"), (20, "main"), (28, "master"), (36, "newest")])
    assert len(killed.report.generations) > 3
    assert killed.once_per_epoch
    assert killed.same_as(alone)


def test_a_stream_is_gone_on_with_from_a_checkpoint(alone: Trained, backend: LocalBackend, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    train(backend, tmp_path, 2, steps=21, checkpoint_dir=kept)
    done = train(backend, tmp_path, 3, resume=newest_whole(kept)[0])
    assert done.once_per_epoch
    assert done.same_as(alone)


def test_it_works_in_a_plain_process_without_a_master(tmp_path: Path) -> None:
    command = [sys.executable, JOB, tmp_path / "out.pt", "--lengths", "5,0,9,40", "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "out.pt")
    assert (state["count"] == 2).all()
    assert state["step"] == 2 * 18  # 54 records in batches of 3


LOOP = "session.prepare(nn.Linear(1, 1))\nfor _ in session.epochs(1):\n    for x in session.shards([[], []]): pass"
MISUSES = {
    "got a generator, needed a list of items": "session.shards(x for x in [1])",
    "got a str, needed a list of items": "session.shards('data/*.bin')",
    "got no items": "session.shards([])",
    "names like 'a.bin' but no way to read them": "session.shards(['a.bin', 'b.bin'])",
    "batch_size=0: needs a whole number of records": "session.shards([[1]], batch_size=0)",
    "the shards hold 0 records, one step needs 1": LOOP,
}


@pytest.mark.parametrize("sentence", MISUSES)
def test_misuse_gets_one_clear_sentence(sentence: str) -> None:
    session = Session(WorkerEnv())
    try:
        with pytest.raises(UsageError, match=sentence):
            exec(MISUSES[sentence], {"nn": torch.nn, "session": session})
    finally:
        session.close()


def test_a_stream_has_no_length() -> None:
    session = Session(WorkerEnv())
    with pytest.raises(TypeError, match="has no length before it was read"):
        len(session.shards([[1, 2]]))
