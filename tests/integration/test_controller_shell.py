"""The controller's shell on real stores: office, writes, restarts, standby. Jobs are numbers here."""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.pretend_cluster import PretendCluster

from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.controller import Controller
from concertina.cluster.mirror import Mirror
from concertina.cluster.now import moment_now, quote_now, why_now
from concertina.cluster.records import Activity, Ask, ClusterState, JobRequest, JobSeen, JobState, NodeState, Op
from concertina.core.errors import ConcertinaError
from concertina.core.job import JobPhase
from concertina.store import Store, open_store

LIMIT = 60.0


class Shared:
    """One store for several users: closing it is its owner's business."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __enter__(self) -> "Shared":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Site:
    """A store, a mirror, a pretended machine, and controllers."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.mirror = Mirror(store)
        self.mirror.start()
        self.cluster = PretendCluster(store, (NodeState(id="n", device_type="cpu", slots=4),))
        self.cluster.start()
        self.script = folder / "train.py"
        self.script.write_text("pass")
        self.controllers: list[Controller] = []
        self.asked = 0

    def controller(self, keep_jobs: int = 1000) -> Controller:
        found = Controller(
            lambda: Shared(self.store),  # type: ignore[arg-type, return-value]
            self.mirror,
            self.cluster,
            log=self.folder / "controller.log",
            ttl_s=1.0,
            keep_jobs=keep_jobs,
        )
        self.controllers.append(found)
        found.start()
        return found

    def submit(self, name: str, **fields: object) -> JobRequest:
        given = {"id": name, "name": name, "user": "u", "script": str(self.script), "virtual": 4, "steps": 400}
        request = JobRequest(**{**given, "submitted_s": time.time(), **fields})  # type: ignore[arg-type]
        self.store.put(keys.REQUESTS + name, dump(request))
        return request

    def ask(self, op: Op, target: str = "", number: int = 0) -> str:
        self.asked += 1
        name = f"ask-{self.asked}"
        self.store.put(keys.ASKS + name, dump(Ask(id=name, op=op, user="u", target=target, number=number)))
        self.until(lambda: self.mirror.reply(name) is not None)
        reply = self.mirror.reply(name)
        assert reply is not None
        return f"{'yes' if reply.accepted else 'no'}: {reply.reason}"

    def until(self, there: Callable[[], bool]) -> None:
        assert self.mirror.wait_until(there, LIMIT), (self.folder / "controller.log").read_text()[-4000:]

    def phase(self, name: str) -> JobPhase | None:
        job = self.mirror.job(name)
        return job.state.phase if job else None

    def reason(self, name: str) -> str:
        job = self.mirror.job(name)
        return job.state.reason if job else ""

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()
        self.cluster.stop()
        self.mirror.close()


@pytest.fixture(params=["memory", "sqlite"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    address = "memory:" if request.param == "memory" else f"sqlite-unsynced:{tmp_path / 'cluster.db'}"
    with open_store(address) as store:
        found = Site(store, tmp_path)
        yield found
        found.close()


def test_jobs_are_taken_measured_run_and_finished(site: Site) -> None:
    site.controller()
    names = [f"j{i}" for i in range(6)]
    for name in names:
        site.submit(name)
    site.until(lambda: all(site.phase(name) is JobPhase.FINISHED for name in names))
    assert site.cluster.clashes == []
    assert [job for job, _ in site.cluster.started].count("j0") == 1
    job = site.mirror.job("j0")
    assert job is not None
    assert job.state.history[-1].reason == "all its work is done"
    assert site.mirror.cluster is not None
    assert site.mirror.cluster.rounds > 0
    assert site.mirror.cluster.error == ""


def test_jobs_that_ended_long_ago_are_forgotten_and_what_they_received_is_not(site: Site) -> None:
    day = 86_400.0
    for number in range(6):
        request = site.submit(f"old{number}", idempotency=f"key{number}", submitted_s=time.time() - 9 * day)
        ended_s = time.time() - (8 - number) * day
        state = JobState(id=request.id, phase=JobPhase.FINISHED, ended_s=ended_s, service_s=100.0, attempt=1)
        seen = JobSeen(id=request.id, attempt=1, activity=Activity.FINISHED)
        site.store.put(keys.submission_key("u", request.idempotency), b"{}")
        site.store.put(keys.STATES + request.id, dump(state))
        site.store.put(keys.SEEN + request.id, dump(seen))
    broken_off = JobState(id="headless", phase=JobPhase.FINISHED, ended_s=time.time() - 8 * day)
    site.store.put(keys.STATES + "headless", dump(broken_off))
    site.submit("live", steps=10**6)
    site.controller(keep_jobs=4)
    site.until(lambda: len(site.mirror.jobs()) == 5)
    assert [job.id for job in site.mirror.jobs()] == ["old2", "old3", "old4", "old5", "live"]
    assert site.ask(Op.PRUNE, number=int(4.5 * day)).startswith("yes: their records")
    site.until(lambda: len(site.mirror.jobs()) == 3)
    site.until(lambda: site.phase("live") is JobPhase.RUNNING)
    assert [job.id for job in site.mirror.jobs()] == ["old4", "old5", "live"]
    spent = site.mirror.spent("u")
    assert spent is not None
    assert (spent.service_s, spent.jobs) == (400.0, ("old0", "old1", "old2", "old3"))
    assert site.cluster.discarded == ["old0", "old1", "old2", "old3"]
    left = {entry.key for entry in site.store.list_prefix("").entries}
    assert not [key for key in left if key.endswith(("/old0", "/old3", "/headless"))]
    assert keys.submission_key("u", "key3") not in left
    assert keys.submission_key("u", "key4") in left
    site.controllers[-1].close()
    site.controller(keep_jobs=4)  # and another that comes into office starts none of them anew
    site.until(lambda: site.mirror.cluster is not None and site.mirror.cluster.rounds > 1)
    assert len(site.mirror.jobs()) == 3


def test_what_can_not_be_removed_is_noted_once_and_hinders_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_s = time.time() - 5 * 86_400.0
    site.submit("old", submitted_s=ended_s)
    site.store.put(keys.STATES + "old", dump(JobState(id="old", phase=JobPhase.FINISHED, ended_s=ended_s)))
    tried = []

    def discard(job: str) -> bool:
        tried.append(job)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(site.cluster, "discard", discard)
    site.controller()
    for number in range(1, 4):
        assert site.ask(Op.PRUNE, number=86_400).startswith("yes")
        site.until(lambda number=number: len(tried) >= number)  # type: ignore[misc]
    site.submit("new")
    site.until(lambda: site.phase("new") is JobPhase.FINISHED)
    assert site.phase("old") is JobPhase.FINISHED
    assert (site.folder / "controller.log").read_text().count('"not removed"') == 1


def test_asks_are_answered_once_and_removed(site: Site) -> None:
    site.controller()
    site.submit("a", steps=10**6)
    site.until(lambda: site.phase("a") is JobPhase.RUNNING)
    assert site.ask(Op.RECLAIM, number=3).startswith("yes: 3 slots taken back")
    site.until(lambda: len(site.mirror.job("a").state.slots) == 1)  # type: ignore[union-attr]
    assert site.ask(Op.CANCEL, "b").startswith("no: there is no job 'b'")
    assert site.ask(Op.RETURN).startswith("yes: 3 slots back in use")
    assert site.ask(Op.CANCEL, "a") == "yes: job a is cancelled"
    site.until(lambda: site.phase("a") is JobPhase.CANCELLED)
    assert site.ask(Op.CANCEL, "a").startswith(("yes: job a is cancelled", "no: job a has ended"))
    site.until(lambda: not site.mirror.asks())


def test_a_controller_that_comes_later_goes_on_where_the_other_was(site: Site) -> None:
    first = site.controller()
    for name in ("a", "b"):
        site.submit(name, steps=1000)
    site.until(lambda: site.phase("a") is JobPhase.RUNNING)
    second = site.controller()
    assert not second.in_office.wait(0.3)
    first.close()
    assert second.in_office.wait(5.0), "it need not wait for the lease to run out"
    site.submit("c")
    site.until(lambda: all(site.phase(name) is JobPhase.FINISHED for name in "abc"))
    attempts = [attempt for job, attempt in site.cluster.started if job == "a"]
    assert attempts == list(range(1, len(attempts) + 1)), "never the same attempt twice"
    assert site.cluster.clashes == []


def test_keepers_and_controllers_that_die_cost_no_job(site: Site) -> None:
    chance = random.Random(7)
    names = [f"j{i}" for i in range(5)]
    for name in names:
        site.submit(name, steps=800)
    began = time.monotonic()
    while not all((phase := site.phase(name)) and phase.is_end for name in names):
        controller = site.controller()
        site.mirror.wait_until(lambda: False, chance.uniform(0.3, 1.2))
        if chance.random() < 0.4:
            site.cluster.kill(chance.choice(names))
        if time.monotonic() - began < 4:
            controller.close()
        else:
            site.until(lambda: all((phase := site.phase(name)) and phase.is_end for name in names))
    assert {site.phase(name) for name in names} == {JobPhase.FINISHED}
    assert site.cluster.clashes == []


def test_down_suspends_all_and_the_next_controller_goes_on(site: Site) -> None:
    first = site.controller()
    site.submit("a", steps=10**6)
    site.until(lambda: site.phase("a") is JobPhase.RUNNING)
    site.ask(Op.DOWN)
    assert first.is_down.wait(10.0)
    assert site.phase("a") is JobPhase.WAITING
    first.close()
    time.sleep(0.01)
    site.controller()
    site.until(lambda: site.phase("a") is JobPhase.RUNNING)
    site.ask(Op.CANCEL, "a")


def test_an_old_down_is_over_also_where_the_clock_was_set_back_since(site: Site) -> None:
    down = ClusterState(policy="", backend="", going_down=True, down_s=time.time() + 3600.0)
    site.store.put(keys.CLUSTER, dump(down))
    site.submit("a")
    site.controller()
    site.until(lambda: site.phase("a") is JobPhase.FINISHED)
    cluster = site.mirror.cluster
    assert cluster is not None
    assert not cluster.going_down


def test_a_machine_that_went_while_nobody_was_in_office_is_not_shown_for_ever(site: Site) -> None:
    site.store.put(keys.NODES + "gone", dump(NodeState(id="gone", device_type="cpu", slots=8)))
    site.until(lambda: [node.id for node in site.mirror.nodes()] == ["gone"])
    site.controller()
    site.until(lambda: [node.id for node in site.mirror.nodes()] == ["n"])


def test_scripts_are_not_all_kept_in_memory(site: Site) -> None:
    controller = site.controller()
    kinds = set()
    for number in range(200):
        site.script.write_text(f"number = {number:04d}" + " " * number)
        kinds.add(controller._kind(JobRequest(id="a", name="a", user="u", script=str(site.script))))
    assert len(kinds) == 200
    assert len(controller._scripts) <= 64


def test_a_request_that_makes_no_sense_stops_nobody(site: Site) -> None:
    os.mkfifo(site.folder / "pipe.py")
    site.submit("half", args=("\ud800",))
    site.submit("pipe", script=str(site.folder / "pipe.py"))
    site.submit("device", script="/dev/zero")
    site.submit("no-path", script="/a\0b")
    site.submit("good")
    site.controller()
    site.until(lambda: site.phase("good") is JobPhase.FINISHED)
    for name in ("half", "pipe", "device", "no-path"):
        assert site.phase(name) is JobPhase.REJECTED


def test_a_job_whose_keeper_can_not_be_started_stops_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    start = site.cluster.start_keeper

    def start_some(job: str, attempt: int) -> None:
        if job == "bad":
            raise OSError(errno.ENOSPC, "No space left on device")
        start(job, attempt)

    monkeypatch.setattr(site.cluster, "start_keeper", start_some)
    for name in ("bad", "good"):
        site.submit(name, args=(name,), min_workers=1, max_workers=1)
    site.controller()
    site.until(lambda: site.phase("good") is JobPhase.FINISHED)
    log = (site.folder / "controller.log").read_text()
    assert log.count('"office taken"') == 1
    assert "No space left on device" in log
    site.until(lambda: "No space left on device" in site.reason("bad"))


def test_questions_are_answered_from_the_mirror(site: Site) -> None:
    with pytest.raises(ConcertinaError, match="ask again"):
        moment_now(site.mirror, time.time())
    site.controller()
    site.submit("a", steps=10**6)
    site.until(lambda: site.phase("a") is JobPhase.RUNNING)
    sentence, eta = why_now(site.mirror, "a", time.time())
    assert "devices" in sentence
    assert eta is not None
    assert eta.end.expected_s > time.time()
    asked = JobRequest(id="q", name="q", user="u", script=str(site.script), virtual=4, steps=100)
    quote, measured = quote_now(site.mirror, asked, site.script.read_bytes(), time.time())
    assert measured
    assert quote.taken
    guess, measured = quote_now(site.mirror, asked, b"something else", time.time())
    assert not measured
    assert guess.reason.startswith("a guess")
    with pytest.raises(ConcertinaError, match="no job 'nobody'"):
        why_now(site.mirror, "nobody", time.time())
    site.ask(Op.CANCEL, "a")
    site.until(lambda: site.phase("a") is JobPhase.CANCELLED)
    assert why_now(site.mirror, "a", time.time())[0].startswith("it has ended (cancelled)")
