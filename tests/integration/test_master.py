"""Master and workers as processes: killed, frozen, doubled, slowed, asked for nonsense; the result stays the same."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zmq

from concertina.backends.local import LocalBackend
from concertina.core.errors import Deposed
from concertina.core.messages import MASTER
from concertina.master.link import MasterLink
from concertina.master.service import address_key
from concertina.master.words import FROM_MASTER, FROM_MEMBER, seal
from concertina.report import Report
from concertina.runner import Run, RunSettings
from concertina.store import Leadership, open_store

JOB = """
import hashlib, os, sys, time, torch, concertina as ct
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

folder = Path(sys.argv[1])
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(128, 8, generator=g), torch.randn(128, 1, generator=g))
session = ct.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
session.seed(3)
loader = session.loader(data, batch_size=4)
me = os.environ["CONCERTINA_WORKER"]
if (folder / f"die-{me}").exists():  # at the end of the first epoch, before it can tell which samples were trained on
    from concertina.runtime.loader import Pass
    Pass.account = lambda *_: os.kill(os.getpid(), 9)
if (folder / f"freeze-{me}").exists():  # when it leaves, before others can read what only it has
    from concertina.runtime.elastic import Elastic
    make_final = Elastic.make_final
    def freeze(self):
        if self.agreement is not None and self.agreement.change_to > 0:
            os.kill(os.getpid(), 19)
        make_final(self)
    Elastic.make_final = freeze
for epoch in session.epochs(1000):
    for x, y in loader:
        time.sleep(float((folder / f"pause-{me}").read_text() if (folder / f"pause-{me}").exists() else 0.01))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if session.is_main:
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]:
        digest.update(tensor.detach().numpy().tobytes())
    (folder / "digest").write_text(digest.hexdigest())
"""
LIMIT_SECONDS = 100.0


class Trial:
    """A job under test: what it did so far, and what to do to it when."""

    def __init__(self, folder: Path, backend: LocalBackend, **settings: Any) -> None:
        folder.mkdir()
        self.folder, self.backend = folder, backend
        script = folder / "job.py"
        script.write_text(JOB)
        self.events: list[Mapping[str, Any]] = []
        defaults: dict[str, Any] = {"virtual": 4, "workers": 2, "steps": 60, "silence_s": 3.0}
        chosen = RunSettings(script=script, args=[str(folder)], run_dir=folder / "run", **{**defaults, **settings})
        self.run = Run(chosen, self.events.append, backend)

    def go_on(self, until: Callable[[], object] = lambda: False) -> None:
        """Until something is so, or the job is over."""
        patience = time.monotonic() + LIMIT_SECONDS
        while not until():
            assert time.monotonic() < patience, self.events[-20:]
            if self.run.turn():
                return

    def to_end(self) -> Report:
        self.go_on()
        report = self.run.close_report()
        assert report.exit == 0, report.error
        assert all(row["duplicated"] == 0 for row in report.samples)
        return report

    @property
    def digest(self) -> str:
        return (self.folder / "digest").read_text()

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events if e["event"] == "step"), default=0)

    def seen(self, kind: str, **fields: Any) -> list[Mapping[str, Any]]:
        return [e for e in self.events if e["event"] == kind and all(e[k] == v for k, v in fields.items())]

    def kill(self, worker: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.backend._pids.get(worker)
        assert pid is not None
        os.kill(pid, number)

    def take_time(self, seconds: float = 0.06) -> None:
        """Every turn lasts longer from here on, so that a new master comes before the end."""
        for worker in range(10):
            self.pause(worker, seconds)

    def pause(self, worker: int, seconds: float) -> None:
        """How long a turn lasts there; renamed into place, since the job may read it at any moment."""
        fresh = self.folder / f"fresh-{worker}"
        fresh.write_text(str(seconds))
        fresh.rename(self.folder / f"pause-{worker}")

    def ask(self, request: str) -> tuple[bool, str]:
        self.go_on(lambda: self.run.answer(request))
        answer = self.run.answer(request)
        assert answer is not None
        return answer


Make = Callable[..., Trial]


@pytest.fixture
def trial(tmp_path: Path, backend: LocalBackend) -> Iterator[Make]:
    made: list[Trial] = []

    def make(name: str = "job", **settings: Any) -> Trial:
        made.append(Trial(tmp_path / name, backend, **settings))
        return made[-1]

    yield make
    for one in made:
        one.run.__exit__(None, None, None)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, backend: LocalBackend) -> str:
    """The digest of an undisturbed run on one worker."""
    alone = Trial(tmp_path_factory.mktemp("wanted") / "job", backend, workers=1)
    with alone.run:
        alone.to_end()
    return alone.digest


# -- a worker is killed ----------------------------------------------------------------------------------------------


def test_the_others_tell_what_a_main_worker_trained_on_that_was_killed_before_it_could(
    trial: Make, wanted: str
) -> None:
    job = trial()
    (job.folder / "die-0").touch()
    report = job.to_end()
    assert job.seen("worker_lost", worker=0)
    whole = report.samples[:-1]  # the last epoch is cut off by --steps
    assert [(row["epoch"], row["missed"]) for row in whole] == [(epoch, 0) for epoch in range(7)]
    assert job.digest == wanted


def test_a_newcomer_that_waits_for_a_leaver_that_is_lost_gives_up_and_the_others_go_on(
    trial: Make, wanted: str
) -> None:
    job = trial(workers=3)
    (job.folder / "freeze-1").touch()
    job.go_on(lambda: job.step >= 5)
    assert job.ask(job.run.remove([1], replaced=True))[0]
    job.take_time()
    job.to_end()
    assert job.seen("worker_lost", worker=1)
    assert job.digest == wanted


# -- the master is killed --------------------------------------------------------------------------------------------

MOMENTS = {
    "starting": lambda t: t.seen("change_begun"),
    "building": lambda t: t.seen("ready"),
    "armed": lambda t: t.seen("synced"),
    "over": lambda t: [e for e in t.seen("generation_started") if e["workers"] == 3],
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_master_killed_in_any_phase_of_a_change_is_replaced_and_the_change_completes(
    trial: Make, wanted: str, moment: str
) -> None:
    job = trial(steps=60)
    job.go_on(lambda: job.step >= 5)
    job.take_time()
    request = job.run.resize(3)
    job.go_on(lambda: MOMENTS[moment](job))
    job.kill(MASTER)
    report = job.to_end()
    assert job.run.answer(request) == (True, "changing to 3 workers")
    assert [g.workers for g in report.generations] == [2, 3]
    assert job.run.master.starts == 2
    assert job.digest == wanted


def test_a_master_killed_while_survivors_regroup_is_replaced(trial: Make, wanted: str) -> None:
    job = trial(workers=3)
    job.go_on(lambda: job.step >= 5)
    job.take_time()
    job.kill(2)
    job.kill(MASTER)
    report = job.to_end()
    assert "worker 2 lost: 2 workers go on" in [g.reason for g in report.generations]
    assert job.digest == wanted


def test_training_goes_on_without_a_master(trial: Make, wanted: str) -> None:
    job = trial()
    job.go_on(lambda: job.step >= 5)
    job.take_time()
    job.kill(MASTER)
    job.go_on(lambda: job.seen("master_exited"))
    before = job.step
    log = job.run.run_dir / "logs" / "master.log"
    job.go_on(lambda: log.read_text().count("in office") == 2)
    assert job.step > before
    job.to_end()
    assert job.digest == wanted


# -- two masters -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frozen_master_is_ended_and_replaced(trial: Make, wanted: str) -> None:
    job = trial()
    job.go_on(lambda: job.step >= 5)
    job.take_time(0.2)
    frozen = job.backend._pids[MASTER]
    os.kill(frozen, signal.SIGSTOP)
    request = job.run.resize(3)
    accepted, _ = job.ask(request)
    assert accepted
    assert job.backend._pids[MASTER] != frozen
    job.take_time()
    job.go_on(lambda: [e for e in job.seen("generation_started") if e["workers"] == 3])
    job.to_end()
    assert job.digest == wanted


def test_words_of_a_master_that_was_replaced_are_ignored(tmp_path: Path) -> None:
    """Two masters by hand: the older one wakes after its lease has run out and goes on talking."""
    store_address, heard = f"sqlite:{tmp_path / 'store.db'}", []
    context = zmq.Context()
    sockets = {}
    with open_store(store_address) as store:
        leaders = {}
        link = MasterLink(store_address, "job", "secret", "launcher", heard.append)
        link.start()
        try:
            for name in ("old", "new"):
                leader = Leadership.acquire(store, "master-job", 0.3, wait_s=5.0)
                assert leader is not None
                leaders[name], sockets[name] = leader, context.socket(zmq.ROUTER)
                port = sockets[name].bind_to_random_port("tcp://127.0.0.1")
                place = {"address": f"tcp://127.0.0.1:{port}", "fence": leader.fence}
                leader.put_fenced(address_key("job"), json.dumps(place).encode())
                assert sockets[name].poll(10_000), "the worker did not find this master"
            peers = {name: socket.recv_multipart()[0] for name, socket in sockets.items()}

            def say(name: str, number: int, what: str) -> None:
                frame = {"number": number, "body": {"op": what}, "taken": 0, "fence": leaders[name].fence}
                sockets[name].send_multipart([peers[name], seal(frame, "secret", FROM_MASTER)])

            say("new", 1, "from the new one")
            patience = time.monotonic() + 10
            while not heard and time.monotonic() < patience:
                time.sleep(0.01)
            frame = {"number": 2, "body": {"op": "stale"}, "taken": 0, "fence": leaders["old"].fence}
            assert link._decode(seal(frame, "secret", FROM_MASTER)) is None
            newer = {**frame, "fence": leaders["new"].fence}
            assert link._decode(seal(newer, "guess", FROM_MASTER)) is None
            assert link._decode(seal(newer, "secret", FROM_MEMBER)) is None, "a member is no master"
            say("new", 2, "again")
            while len(heard) < 2 and time.monotonic() < patience:
                time.sleep(0.01)
            assert heard == [{"op": "from the new one"}, {"op": "again"}]
            with pytest.raises(Deposed):
                leaders["old"].put_fenced("jobs/job/state", b"what the old one thinks")
        finally:
            link.close()
            for socket in sockets.values():
                socket.close(0)
            context.term()


# -- too few workers -------------------------------------------------------------------------------------------------


def test_with_too_few_left_survivors_wait_and_go_on_with_their_state(trial: Make, wanted: str) -> None:
    job = trial(workers=2, minimum=2)
    job.go_on(lambda: job.step >= 8)
    pid = job.run.workers[0]
    job.kill(1)
    report = job.to_end()
    assert "waiting for others" in report.generations[1].reason
    assert [g.workers for g in report.generations] == [2, 1, 2]
    waited, joined = report.generations[1].step, report.generations[2].step
    assert joined <= waited + 1  # at most the step in whose middle they waited
    assert job.seen("worker_exited", pid=pid)[0]["code"] == 0
    assert job.digest == wanted


def test_when_all_are_lost_the_job_goes_back_to_the_newest_checkpoint(trial: Make, wanted: str, tmp_path: Path) -> None:
    job = trial(workers=2, minimum=2, checkpoint_dir=tmp_path / "kept", checkpoint_every=10)
    job.go_on(lambda: job.seen("checkpoint") and job.step >= 14)
    for worker in (0, 1):
        job.kill(worker)
    report = job.to_end()
    assert "newest checkpoint" in report.generations[-1].reason
    assert [e["step"] for e in job.seen("training") if e["step"] >= 10]
    assert job.digest == wanted


# -- uneven workers --------------------------------------------------------------------------------------------------


def test_a_slowed_worker_gets_fewer_virtual_workers_within_20_steps(trial: Make, wanted: str) -> None:
    job = trial()
    job.go_on(lambda: job.step >= 10)
    job.pause(1, 0.09)
    job.pause(0, 0.03)
    slowed = job.step
    job.to_end()
    dealt = [e for e in job.seen("generation_started") if e["shares"] == [3, 1]]
    assert dealt, job.seen("generation_started")
    assert dealt[0]["step"] <= slowed + 20
    assert "times as long" in dealt[0]["reason"]
    assert job.digest == wanted


@pytest.mark.slow
def test_a_worker_that_stays_slow_is_removed_and_reported(trial: Make, wanted: str) -> None:
    job = trial()
    job.go_on(lambda: job.step >= 5)
    job.pause(1, 0.4)
    job.to_end()
    assert job.seen("worker_slow", worker=1)
    assert job.seen("generation_started")[-1]["members"] == [0]
    assert job.digest == wanted


def test_a_worker_that_stands_still_in_a_step_is_removed_though_its_heart_beats(trial: Make, wanted: str) -> None:
    job = trial(stall_s=2.0)
    job.go_on(lambda: job.step >= 5)
    job.pause(1, 1000)
    job.to_end()
    assert "stood still in a step" in job.seen("worker_stuck", worker=1)[0]["reason"]
    assert job.seen("worker_lost", worker=1)
    assert job.digest == wanted


def test_a_frozen_worker_is_removed(trial: Make, wanted: str) -> None:
    job = trial(silence_s=1.5)
    job.go_on(lambda: job.step >= 5)
    job.kill(1, signal.SIGSTOP)
    job.to_end()
    assert "no sign of life" in job.seen("worker_stuck", worker=1)[0]["reason"]
    assert job.digest == wanted


# -- bad requests ----------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_with_a_sentence_and_change_nothing(trial: Make, wanted: str) -> None:
    job = trial(maximum=3)
    job.go_on(lambda: job.step >= 5)
    for workers, sentence in [(0, "at least 1"), (-2, "at least 1"), (5, "4 virtual workers"), (4, "maximum of 3")]:
        accepted, why = job.ask(job.run.resize(workers))
        assert (accepted, sentence in why) == (False, True), why
    for numbers, sentence in [([0, 1], "remove all"), ([7], "worker 7 is not one of"), ([], "no worker was named")]:
        accepted, why = job.ask(job.run.remove(numbers))
        assert (accepted, sentence in why) == (False, True), why
    report = job.to_end()
    assert len(report.generations) == 1
    assert job.digest == wanted


def test_a_request_while_the_job_ends_is_refused(trial: Make) -> None:
    job = trial()
    job.go_on(lambda: job.step >= 5)
    job.run.interrupt()
    job.go_on(lambda: job.seen("worker_exited"))
    asked: list[str] = [job.run.resize(1)]
    job.go_on()
    assert job.run.answer(asked[0]) in (None, (False, "the job is ending: nothing can be changed any more"))
