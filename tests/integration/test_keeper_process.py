"""Keepers as processes, with real jobs and a store in a file: whatever happens, the same bits and nothing left over."""

import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcd_server import etcd

from concertina.backends.local import LocalBackend
from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.keeper_start import (
    LOCK,
    end_holders,
    is_held,
    job_folder,
    keeper_alive,
    reap,
    start_keeper,
    start_ticks,
)
from concertina.cluster.records import ENDED, Activity, JobRequest, JobSeen, JobState, Keeper, NodeState
from concertina.core.checkpoints import newest_whole
from concertina.core.errors import JobFailed
from concertina.core.job import JobPhase
from concertina.runner import RunSettings, run
from concertina.store import open_store

STEPS = 160
JOB = """
import hashlib, os, sys, time, torch, concertina as ct
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
out, pace = Path(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
session = ct.join()
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(128, 8, generator=g), torch.randn(128, 1, generator=g))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = session.prepare(model, optimizer)
loader = session.loader(data, batch_size=4)
for epoch in session.epochs(20):
    for x, y in loader:
        time.sleep(float((out / "pause").read_text()) if (out / "pause").exists() else pace)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        if (out / "fail").exists():
            raise ValueError("the data\\n\\x1b[2Jis not what it was")
if session.is_main:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    (out / "digest").write_text(digest.hexdigest())
"""
LIMIT_SECONDS = 100.0


class Trial:
    """A cluster of one job, whose controller is the test."""

    def __init__(self, folder: Path, pace: float = 0.02, script: str = JOB, address: str = "") -> None:
        self.folder, self.state_dir = folder, folder / "state"
        self.state_dir.mkdir(parents=True)
        (folder / "job.py").write_text(script)
        self.address = address or f"sqlite:{self.state_dir / 'cluster.db'}"
        self.store = open_store(self.address)
        request = JobRequest(
            id="j",
            name="j",
            user="me",
            script=str(folder / "job.py"),
            args=(str(folder), str(pace)),
            cwd=str(folder),
            virtual=4,
        )
        self.state = JobState(id="j", phase=JobPhase.RUNNING)
        self.store.put(keys.NODES + "n", dump(NodeState(id="n", device_type="cpu", slots=8)))
        self.store.put(keys.REQUESTS + "j", dump(request))

    def decide(self, *slots: int, **more: Any) -> None:
        self.state = replace(self.state, order=self.state.order + 1, slots=tuple(f"n/{i}" for i in slots), **more)
        self.store.put(keys.STATES + "j", dump(self.state))

    def start(self, *slots: int) -> None:
        """The next attempt."""
        self.decide(*slots, attempt=self.state.attempt + 1)
        start_keeper(self.address, self.state_dir, "j", self.state.attempt)

    @property
    def seen(self) -> JobSeen | None:
        found = self.store.get(keys.SEEN + "j")
        return None if found is None else load(JobSeen, found.value)

    @property
    def keeper(self) -> Keeper | None:
        found = self.store.get(keys.KEEPERS + "j")
        return None if found is None else load(Keeper, found.value)

    def until(self, so: Callable[[JobSeen], object]) -> JobSeen:
        patience = time.monotonic() + LIMIT_SECONDS
        while True:
            seen = self.seen
            if seen is not None and seen.attempt == self.state.attempt and so(seen):
                return seen
            assert time.monotonic() < patience, (seen, self.story()[-20:], self.log)
            time.sleep(0.01)

    def settled(self) -> JobSeen:
        seen = self.until(lambda seen: seen.order == self.state.order)
        assert sorted(seen.slots) == sorted(self.state.slots) == sorted(seen.pids)
        assert seen.workers == len(seen.slots)
        return seen

    def steps(self, more: int) -> JobSeen:
        first = self.seen.step if self.seen is not None else 0
        return self.until(lambda seen: seen.step >= first + more)

    def gone(self) -> None:
        """Nothing of the job is left."""
        patience = time.monotonic() + 10.0
        while is_held(self.state_dir, "j"):
            assert time.monotonic() < patience, self.log
            time.sleep(0.01)
        reap()

    def story(self, kind: str = "") -> list[dict[str, Any]]:
        lines = (job_folder(self.state_dir, "j") / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if not kind or event["event"] == kind]

    @property
    def log(self) -> str:
        return (job_folder(self.state_dir, "j") / "logs" / "keeper.log").read_text()

    @property
    def digest(self) -> str:
        return (self.folder / "digest").read_text()

    def close(self) -> None:
        end_holders(job_folder(self.state_dir, "j") / LOCK)
        self.gone()
        self.store.close()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(**more: Any) -> Trial:
        made.append(Trial(tmp_path / f"trial-{len(made)}", **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, backend: LocalBackend) -> str:
    """What an undisturbed run gives."""
    folder = tmp_path_factory.mktemp("wanted")
    (folder / "job.py").write_text(JOB)
    settings = RunSettings(script=folder / "job.py", args=(str(folder), "0"), virtual=4, run_dir=folder / "run")
    assert run(settings, backend=backend).steps == STEPS
    return (folder / "digest").read_text()


def test_a_job_follows_its_slots_and_ends_with_the_same_bits(trial: Callable[..., Trial], wanted: str) -> None:
    job = trial()
    job.start(0)
    job.settled()
    job.decide(0, 1, 2)  # grows
    job.settled()
    job.steps(12)
    job.decide(3, 1, 4)  # two of three move
    job.settled()
    job.decide(3, 4, 5, 6)  # one moves, and one more comes
    job.decide(4, 6)  # and before they have come, fewer
    job.settled()
    job.decide(7)  # everybody moves, with time for it
    job.decide(7, vacate_s=30.0)
    job.settled()
    job.decide()  # no slot at all
    last = job.until(lambda seen: seen.activity is Activity.SUSPENDED)
    assert (last.slots, last.pids, last.exit) == ((), {}, 0)
    assert last.checkpoint_step == last.step > 0
    job.gone()
    job.start(1, 2)
    resumed = job.settled()
    assert resumed.step >= last.step
    assert resumed.speeds[3] == last.speeds[3] > 0  # what was measured before is not forgotten
    end = job.until(lambda seen: seen.activity is Activity.FINISHED)
    assert last.at_s >= last.trains_s > 0
    assert resumed.trains_s > last.at_s, "it came to its first step anew"
    assert (end.step, end.total_steps, end.epochs, end.exit, end.error) == (STEPS, STEPS, 20, 0, "")
    assert "loss" in end.values
    assert job.digest == wanted
    job.gone()
    assert job.keeper is None
    check_places(job)
    check_samples(job)


def check_samples(job: Trial) -> None:
    """Over all attempts, every sample was trained on once in every epoch."""
    report = json.loads((job_folder(job.state_dir, "j") / "report.json").read_text())
    assert report["steps"] == STEPS
    assert [row["epoch"] for row in report["samples"]] == list(range(20))
    assert all((row["seen"], row["duplicated"], row["missed"]) == (128, 0, 0) for row in report["samples"])


def check_places(job: Trial) -> None:
    """No slot ever had two workers at once; every order that was carried out had exactly its slots (see `settled`)."""
    places: dict[int, str] = {}
    for event in job.story():
        if event["event"] == "run_started":  # whatever was left of the run before has been ended
            places = {}
        elif event["event"] == "worker_seated":
            assert event["slot"] not in places.values()
            places[event["worker"]] = event["slot"]
        elif event["event"] == "worker_exited":
            places.pop(event["worker"])


def test_a_killed_keeper_takes_all_with_it_and_the_next_goes_on(
    trial: Callable[..., Trial], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONCERTINA_CHECKPOINT_SECONDS", "1")
    job = trial()
    job.start(0, 1)
    first = job.settled()
    job.until(lambda seen: seen.checkpoint_step > 0)
    assert job.keeper is not None
    os.kill(job.keeper.pid, signal.SIGKILL)
    job.gone()
    assert [pid for pid in first.pids.values() if start_ticks(pid) is not None] == []
    job.start(1)
    saved = job.until(lambda seen: seen.activity is Activity.TRAINING)
    assert saved.step >= saved.checkpoint_step > 0
    stand_still(job)
    end = job.until(lambda seen: seen.activity is Activity.FINISHED)
    assert end.attempt == 2
    assert job.digest == wanted
    check_samples(job)
    assert len(list((job_folder(job.state_dir, "j") / "checkpoints").iterdir())) <= 2


def stand_still(job: Trial) -> None:
    """Nobody can write to the store for longer than a keeper's lease lasts: the job does not notice."""
    (job.folder / "pause").write_text("0.2")
    job.steps(1)
    with closing(sqlite3.connect(job.state_dir / "cluster.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        before = job.story("step")[-1]["step"]
        time.sleep(4.0)
        assert job.story("step")[-1]["step"] > before
        other.execute("COMMIT")
    (job.folder / "pause").unlink()
    job.steps(1)


def test_slots_are_free_in_time_whatever_the_workers_do(trial: Callable[..., Trial], wanted: str) -> None:
    job = trial()
    job.start(0, 1, 2)
    job.settled()
    job.steps(10)
    (job.folder / "pause").write_text("30")
    job.until(lambda seen: time.time() - seen.at_s > 0.7)  # they are in the long step
    job.decide(1)
    job.until(lambda seen: seen.slots == ("n/1",))
    assert [e["reason"] for e in job.story("workers_killed")] == ["its slot was taken away and not free 2 s later"]
    (job.folder / "pause").unlink()
    os.kill(job.seen.pids["n/1"], signal.SIGKILL)  # type: ignore[union-attr]  # it sleeps on; all is lost
    job.until(lambda seen: seen.activity is Activity.TRAINING)
    job.until(lambda seen: seen.activity is Activity.FINISHED)
    assert job.digest == wanted


def test_a_keeper_that_is_asked_to_end_suspends_its_job(trial: Callable[..., Trial]) -> None:
    job = trial()
    job.start(0)
    job.settled()
    keeper = job.keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGTERM)
    seen = job.until(lambda seen: seen.activity is Activity.SUSPENDED)
    assert seen.slots == ()
    assert seen.checkpoint_step == seen.step
    job.gone()


def test_a_keeper_whose_workers_can_not_be_started_any_more_leaves_the_job_to_the_next(
    trial: Callable[..., Trial],
) -> None:
    job = trial(pace=0.1)
    job.start(0)
    job.settled()
    os.kill(job.story("nursery_ready")[-1]["pid"], signal.SIGKILL)
    job.gone()
    seen = job.seen
    assert seen is not None
    assert (seen.activity, seen.slots, seen.pids) == (Activity.TRAINING, (), {})  # it has not ended
    assert "the process that starts workers has died" in job.log


def test_a_cancelled_job_is_stopped_and_a_later_attempt_never_shares_it(trial: Callable[..., Trial]) -> None:
    job = trial(pace=0.1)
    job.start(0)
    job.settled()
    first = job.keeper
    assert first is not None
    job.start(1)  # though the first attempt is well: it gives way
    job.settled()
    assert job.keeper is not None
    assert (job.keeper.attempt, keeper_alive(first)) == (2, False)
    job.decide(1, phase=JobPhase.CANCELLED)
    seen = job.until(lambda seen: seen.activity is Activity.CANCELLED)
    assert seen.slots == ()
    job.gone()
    assert not (job.folder / "digest").exists()


def test_a_job_that_ends_while_the_disk_is_full_has_ended(trial: Callable[..., Trial], wanted: str) -> None:
    job = trial(pace=0)
    folder = job_folder(job.state_dir, "j")
    folder.mkdir(parents=True)
    (folder / "report.json").symlink_to("/dev/full")
    job.start(0)
    seen = job.until(lambda seen: seen.step == STEPS and not is_held(job.state_dir, "j"))
    assert (seen.activity, seen.exit) == (Activity.FINISHED, 0), "else it would be run again, and fail again"
    assert job.digest == wanted
    assert "No space left on device" in job.log


def test_a_job_whose_script_fails_has_failed(trial: Callable[..., Trial]) -> None:
    job = trial()
    (job.folder / "fail").touch()
    job.start(0)
    seen = job.until(lambda seen: seen.activity is Activity.FAILED)
    assert (seen.exit, seen.slots) == (1, ())
    assert "ValueError: the data [2Jis not what it was at job.py" in seen.error, (
        "on one line, and nothing for a terminal"
    )
    missing = trial()
    (missing.folder / "job.py").unlink()
    missing.start(0)
    seen = missing.until(lambda seen: seen.activity is Activity.FAILED)
    assert seen.exit == 2
    assert "is not a file" in seen.error


def test_a_job_that_is_interrupted_as_soon_as_it_goes_on_stands_where_it_stood(
    backend: LocalBackend, tmp_path: Path, wanted: str
) -> None:
    """In the middle of a pass, that is, though it has not come there again."""
    stop = "if (out / 'stop').exists(): os.kill(os.getpid(), 15)\n"
    (tmp_path / "job.py").write_text(JOB.replace("for epoch", stop + "for epoch"))
    base: dict[str, Any] = {"script": tmp_path / "job.py", "args": (str(tmp_path), "0"), "virtual": 4, "workers": 2}
    settings = RunSettings(**base, run_dir=tmp_path / "run", checkpoint_dir=tmp_path / "saved")
    run(replace(settings, steps=11), backend=backend)
    there = newest_whole(tmp_path / "saved")[0]
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    (tmp_path / "stop").touch()
    with pytest.raises(JobFailed, match="interrupted"):
        run(replace(settings, resume=there), backend=backend)
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before
    (tmp_path / "stop").unlink()
    assert run(replace(settings, resume=newest_whole(tmp_path / "saved")[0]), backend=backend).steps == STEPS
    assert (tmp_path / "digest").read_text() == wanted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_trains_on_while_etcd_does_not_answer(trial: Callable[..., Trial], wanted: str) -> None:
    with etcd() as server:
        job = trial(pace=0.1, address=server.address("keeper"))
        job.start(0, 1)
        job.settled()
        job.steps(2)
        server.processes[0].send_signal(signal.SIGSTOP)
        before = job.story("step")[-1]["step"]
        time.sleep(6.0)  # longer than the lease lasts
        assert job.story("step")[-1]["step"] > before
        server.processes[0].send_signal(signal.SIGCONT)
        job.decide(1, 2, 3)
        job.settled()
        end = job.until(lambda seen: seen.activity is Activity.FINISHED)
        assert (end.attempt, job.digest) == (1, wanted)
        job.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_in_whatever_order(
    seed: int, trial: Callable[..., Trial], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONCERTINA_CHECKPOINT_SECONDS", "2")
    chance, job = random.Random(seed), trial(pace=0.05)
    job.start(*some_slots(chance))
    for _ in range(30):
        disturb(job, chance)
        time.sleep(chance.choice([0.05, 0.3, 1.0, 3.0]))
        if not is_held(job.state_dir, "j") and not finished(job):
            begin_again(job, chance)
    (job.folder / "pause").unlink(missing_ok=True)
    patience = time.monotonic() + 200.0
    while not finished(job):
        assert time.monotonic() < patience, (job.seen, job.story()[-20:], job.log)
        if not is_held(job.state_dir, "j"):
            begin_again(job, chance)
        elif not job.state.slots:
            job.decide(1, 2)
        time.sleep(0.1)
    assert job.digest == wanted
    job.gone()
    check_places(job)
    check_samples(job)


def finished(job: Trial) -> bool:
    return job.seen is not None and job.seen.activity is Activity.FINISHED


def begin_again(job: Trial, chance: random.Random) -> None:
    job.start(*some_slots(chance))
    job.until(lambda seen: seen.slots or seen.activity in ENDED)


def some_slots(chance: random.Random) -> list[int]:
    return chance.sample(range(6), chance.randint(1, 4))


def disturb(job: Trial, chance: random.Random) -> None:
    what = chance.choice(["slots"] * 8 + ["suspend", "worker", "worker", "keeper", "slow", "quick", "quick", "term"])
    seen, keeper = job.seen, job.keeper
    if what == "slots":
        job.decide(*some_slots(chance), vacate_s=chance.choice([1.0, 2.0, 30.0]))
    elif what == "suspend":
        job.decide()
    elif what == "worker" and seen is not None and seen.pids:
        end(chance.choice(list(seen.pids.values())), signal.SIGKILL)
    elif what in ("keeper", "term") and keeper is not None:
        end(keeper.pid, signal.SIGKILL if what == "keeper" else signal.SIGTERM)
    elif what == "slow":
        (job.folder / "pause").write_text("1.5")
    elif what == "quick":
        (job.folder / "pause").unlink(missing_ok=True)


def end(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
