"""A controller as a process of its own, with real keepers and real training: killed, restarted, and nobody notices."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from concertina.cluster import keys
from concertina.cluster.backend import LocalCluster
from concertina.cluster.codec import dump
from concertina.cluster.mirror import Job, Mirror
from concertina.cluster.records import Activity, Ask, JobRequest, Op
from concertina.core.job import JobPhase
from concertina.store import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 120.0


class Cluster:
    """A store, controllers and a way to wait for things."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self.address = f"sqlite:{folder / 'cluster.db'}"
        self.store = open_store(self.address)
        self.mirror = Mirror(self.store)
        self.mirror.start()
        self.controllers: list[subprocess.Popen[bytes]] = []
        self.asked = 0

    def start(self) -> None:
        words = [sys.executable, "-m", "concertina.cluster.controller", self.address, str(self.folder), str(self.slots)]
        self.controllers.append(subprocess.Popen(words, start_new_session=True))

    def kill(self) -> None:
        """The one that was started last, without a chance to say goodbye."""
        process = self.controllers.pop()
        process.send_signal(signal.SIGKILL)
        process.wait()

    def submit(self, name: str, epochs: int, **fields: object) -> None:
        cwd = self.folder / f"cwd-{name}"
        cwd.mkdir()
        args = ("0.06", str(EXAMPLES / "digits.py"), "--epochs", str(epochs), "--out", "model.pt")
        given = {"id": name, "name": name, "user": "u", "script": str(EXAMPLES / "live_paced.py"), "args": args}
        given |= {"cwd": str(cwd), "virtual": 4, "submitted_s": time.time()}
        self.store.put(keys.REQUESTS + name, dump(JobRequest(**{**given, **fields})))  # type: ignore[arg-type]

    def ask(self, op: Op, target: str = "", number: int = 0) -> str:
        self.asked += 1
        ask = Ask(id=f"ask-{self.asked}", op=op, user="u", target=target, number=number, at_s=time.time())
        self.store.put(keys.ASKS + ask.id, dump(ask))
        self.until(lambda: self.mirror.reply(ask.id) is not None)
        reply = self.mirror.reply(ask.id)
        assert reply is not None
        assert reply.accepted, reply.reason
        return reply.reason

    def job(self, name: str) -> Job:
        found = self.mirror.job(name)
        assert found is not None
        return found

    def until(self, there: Callable[[], bool], limit_s: float = LIMIT) -> None:
        assert self.mirror.wait_until(there, limit_s), self.story()

    def until_job(self, name: str, fits: Callable[[Job], bool]) -> Job:
        self.until(lambda: (job := self.mirror.job(name)) is not None and fits(job))
        return self.job(name)

    def story(self) -> str:
        jobs = [
            f"{j.id}: {j.state.phase.value} on {j.state.slots} ({j.state.reason}); {j.seen}" for j in self.mirror.jobs()
        ]
        return "\n".join([*jobs, (self.folder / "controller.log").read_text()[-3000:]])

    def close(self) -> None:
        for process in self.controllers:
            process.terminate()
            process.wait(timeout=20)
        backend = LocalCluster(self.address, self.folder, self.slots, "cpu")
        for job in self.mirror.jobs():
            backend.end_keeper(job.id)
        self.mirror.close()
        self.store.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path, 4)
    yield found
    found.close()


def trains(job: Job) -> bool:
    return job.seen is not None and job.seen.activity is Activity.TRAINING and job.seen.order == job.state.order


def reference(folder: Path, epochs: int) -> bytes:
    """What one worker, never disturbed, comes to."""
    command = str(Path(sys.executable).with_name("concertina"))
    words = [command, "run", "--virtual", "4", "--workers", "1", str(EXAMPLES / "digits.py")]
    out = folder / "reference.pt"
    subprocess.run([*words, "--epochs", str(epochs), "--out", str(out)], check=True, capture_output=True, timeout=LIMIT)
    return weights(out)


def weights(path: Path) -> bytes:
    import torch

    found = torch.load(path, weights_only=True)
    return b"".join(found[name].numpy().tobytes() for name in sorted(found))


def test_a_controller_is_killed_and_replaced_while_a_job_trains(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start()
    cluster.submit("a", 2)
    cluster.until_job("a", lambda job: job.state.phase is JobPhase.RUNNING and trains(job))
    before = cluster.job("a")
    cluster.kill()
    assert before.seen is not None
    made = before.seen.step
    cluster.until_job("a", lambda job: job.seen is not None and job.seen.step > made)
    cluster.start()
    done = cluster.until_job("a", lambda job: job.state.phase.is_end)
    assert (done.state.phase, done.state.reason) == (JobPhase.FINISHED, "all its work is done")
    assert (done.state.attempt, done.state.failures) == (1, 0), "its keeper did not notice"
    assert weights(tmp_path / "cwd-a" / "model.pt") == reference(tmp_path, 2)


@pytest.mark.slow
def test_jobs_share_shrink_are_refused_suspended_and_resumed_with_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start()
    cluster.submit("a", 12)
    cluster.until_job("a", lambda job: len(job.state.slots) == 4 and trains(job))
    cluster.submit("b", 12, deadline_s=time.time() + 150)
    cluster.until_job("b", lambda job: job.state.phase is JobPhase.RUNNING and bool(job.state.slots))
    b = cluster.job("b")
    assert b.state.promised_s == b.request.deadline_s
    a = cluster.job("a")
    assert len(a.state.slots) < 4
    assert "promises" in a.state.reason
    cluster.kill()
    cluster.start()
    cluster.submit("c", 12, deadline_s=time.time() + 8)
    c = cluster.until_job("c", lambda job: job.state.phase.is_end)
    assert c.state.phase is JobPhase.REJECTED
    assert c.state.earliest_s is not None
    cluster.ask(Op.RECLAIM, number=4)
    began = time.monotonic()
    cluster.until(lambda: all(not (job.seen and job.seen.slots) for job in cluster.mirror.jobs()))
    print(f"slots were free after {time.monotonic() - began:.1f} s")
    for name in "ab":
        job = cluster.until_job(name, lambda job: job.state.phase is JobPhase.WAITING)
        assert "reclaimed" in job.state.reason
    cluster.ask(Op.RETURN)
    for name in "ab":
        done = cluster.until_job(name, lambda job: job.state.phase.is_end)
        assert done.state.phase is JobPhase.FINISHED, done.state.reason
        assert done.state.failures == 0
        assert any("reclaimed" in line.reason and not line.workers for line in done.state.history)
    wanted = reference(tmp_path, 12)
    assert weights(tmp_path / "cwd-a" / "model.pt") == wanted
    assert weights(tmp_path / "cwd-b" / "model.pt") == wanted


def test_the_standby_takes_over_when_the_leader_is_killed(cluster: Cluster) -> None:
    cluster.start()
    cluster.until(lambda: cluster.mirror.cluster is not None)
    first = cluster.mirror.cluster
    assert first is not None
    cluster.start()
    time.sleep(1.5)  # the second one waits meanwhile
    assert cluster.mirror.cluster is not None
    assert cluster.mirror.cluster.controller == first.controller
    leader = cluster.controllers.pop(0)
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    cluster.until(lambda: cluster.mirror.cluster is not None and cluster.mirror.cluster.controller != first.controller)
    cluster.ask(Op.DOWN)
    assert cluster.controllers[0].wait(timeout=30) == 0, "nothing to suspend: it ends"
