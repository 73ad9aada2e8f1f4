"""A job whose workers are on several hosts: the bits of one machine, whatever comes, goes, dies or is cut off."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from namespaces import network
from several_hosts import SCRIPT, LoopbackHosts, NamespaceHosts, differences

from concertina.backends.base import Seat
from concertina.backends.local import LocalBackend
from concertina.core.seats import choose
from concertina.runner import Run, RunSettings, parse_changes
from concertina.runtime.mirrors import UNANSWERED_SECONDS

STEPS = 60
PATIENCE = 120.0


class Job:
    """One run, driven from the test."""

    def __init__(self, folder: Path, backend: Any, changes: str = "", steady: bool = False, **settings: Any) -> None:
        """With `steady`, all steps take as long until the test has done all it wants."""
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "train.py"
        script.write_text(SCRIPT.replace("1 if session.step < 30 else 300", "5") if steady else SCRIPT)
        self.go, self.step, self.events, self.checkpoint = (
            folder / "go",
            0,
            [],
            folder / "checkpoints" / f"step-{STEPS:08}",
        )
        wanted: dict[str, Any] = {"virtual": 4, "workers": 3, "steps": STEPS, **settings}
        self.run = Run(
            RunSettings(
                script=script,
                args=[str(self.go)],
                changes=parse_changes(changes),
                checkpoint_dir=folder / "checkpoints",
                run_dir=folder / "run",
                **wanted,
            ),
            self._listen,
            backend,
            self._seat if backend.address else lambda worker: Seat(),
        )
        self._backend = backend

    def _seat(self, worker: int) -> Seat | None:
        host = choose(self._backend.hosts(), {n: seat.node for n, seat in self.run.seats.items()})
        return None if host is None else Seat(node=host.name)

    def _listen(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "step":
            self.step = event["step"]

    def go_on(self, until: Callable[[], bool] = lambda: False) -> bool:
        """Turns the run's loop; True when the job is over."""
        patience = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < patience, f"stands still at step {self.step}: {self.events[-5:]}"
            if self.run.turn():
                return True
        return False

    def to_end(self) -> None:
        self.go.touch()
        assert self.go_on()
        assert self.run.close_report().exit == 0

    def told(self, kind: str) -> list[Mapping[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    def workers(self) -> list[int]:
        """Of the generation in force."""
        return next(e["members"] for e in reversed(self.events) if e["event"] == "generation_started")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, backend: LocalBackend) -> Path:
    """The last checkpoint of the job on one machine, with two workers from beginning to end."""
    job = Job(tmp_path_factory.mktemp("one"), backend, workers=2)
    with job.run:
        job.to_end()
    assert job.run.report.reduction == "shared-memory fold"
    return job.checkpoint


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHosts]:
    backend = LoopbackHosts.open(tmp_path_factory.mktemp("loopback"), 1)
    yield backend
    backend.close()


def test_growing_and_shrinking_across_hosts_leaves_the_bits(
    tmp_path: Path, loopback: LoopbackHosts, wanted: Path
) -> None:
    job = Job(tmp_path, loopback, "10=3,30=1,45=2", workers=2)
    with job.run:
        job.to_end()
    assert job.run.report.reduction == "virtual ring"
    assert differences(wanted, job.checkpoint) == []


def test_newcomers_on_other_hosts_follow_and_are_handed_next_to_nothing(
    tmp_path: Path, loopback: LoopbackHosts, wanted: Path
) -> None:
    """From one member first, then from two at once; nothing is left for the switch."""
    job = Job(tmp_path, loopback, steady=True, workers=1)
    with job.run:
        for workers in (2, 3):
            job.go_on(lambda: job.step >= 2)
            job.run.resize(workers)
            job.go_on(lambda workers=workers: len(job.workers()) == workers)  # type: ignore[misc]
        job.to_end()
    assert job.told("handed_over") == []
    first, second = job.told("synced")
    assert (first["sources"], second["sources"]) == ([0], [0, 1])
    for e in (first, second):
        assert e["network"]
        assert not e["gave_up"]
        assert e["differing"] == 0
    let_in = [e for e in job.told("training") if "late" in e]
    assert [e["late"] for e in let_in] == [0, 0]
    assert all(e["replayed"] > 0 for e in let_in)
    assert differences(wanted, job.checkpoint) == []


@pytest.mark.parametrize("slots", [(1, 1, 1), (2, 1)], ids=["three hosts", "two workers share one"])
def test_killed_workers_on_other_hosts_leave_the_bits(
    tmp_path: Path, loopback: LoopbackHosts, wanted: Path, slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "slots", slots)
    job = Job(tmp_path, loopback)
    with job.run:
        for step, rank in ((6, 2), (12, 0), (18, 1)):
            job.go_on(lambda step=step: job.step >= step and len(job.workers()) == 3)  # type: ignore[misc]
            os.kill(job.run.workers[job.workers()[rank]], signal.SIGKILL)
            job.go_on(lambda: len(job.workers()) == 2)
        job.to_end()
    assert differences(wanted, job.checkpoint) == []


def test_a_worker_per_virtual_worker_sums_as_ddp_does_across_hosts(
    tmp_path: Path, loopback: LoopbackHosts, wanted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "slots", (2, 2))
    job = Job(tmp_path, loopback, workers=4)
    with job.run:
        job.to_end()
    assert job.run.report.reduction == "native all-reduce"
    assert differences(wanted, job.checkpoint) == []


def test_a_worker_that_stands_still_for_longer_than_a_dead_connection_may_is_waited_for(
    tmp_path: Path, loopback: LoopbackHosts, wanted: Path
) -> None:
    """Its script may load, compile or evaluate for long, in whatever way: its host answers, so nothing is cut."""
    job = Job(tmp_path, loopback, silence_s=60.0)
    with job.run:
        job.go_on(lambda: job.step >= 6)
        slow = job.run.workers[job.workers()[1]]
        os.kill(slow, signal.SIGSTOP)
        wakes = time.monotonic() + 2 * UNANSWERED_SECONDS
        job.go_on(lambda: time.monotonic() > wakes)
        os.kill(slow, signal.SIGCONT)
        job.to_end()
    assert [e["event"] for e in job.events if e["event"] in ("worker_stuck", "recovering", "worker_lost")] == []
    assert differences(wanted, job.checkpoint) == []


@pytest.mark.timeout(300)
def test_a_host_whose_link_is_cut_is_done_without_and_used_again_when_it_returns(tmp_path: Path, wanted: Path) -> None:
    """Nobody can end its worker; whatever that one says when it is back is not listened to."""
    with network() as net:
        backend = NamespaceHosts(net, tmp_path / "nurseries")
        try:
            job = Job(tmp_path, backend, silence_s=4.0)
            with job.run:
                job.go_on(lambda: job.step >= 6)
                victim, lost = net.hosts[1], job.workers()
                there = next(n for n, home in backend._home.items() if home == victim.name)
                pid = backend.pid_of(there)
                victim.cut()
                backend.deaf.add(victim.name)
                job.go_on(lambda: any(e["event"] == "worker_stuck" and e["worker"] == there for e in job.events))
                backend.give_up(victim.name)
                job.go_on(lambda: len(job.workers()) == 2)
                assert pid is not None
                os.kill(pid, 0)  # it still runs, and would like to go on
                victim.mend()
                job.go_on(lambda: backend.pid_of(there) is None)  # told that it is not needed, it leaves
                assert job.run.log_path(there).read_text() == ""
                backend.take_back(victim.name)
                job.go_on(lambda: len(job.workers()) == 3)
                assert set(job.workers()) != set(lost)
                assert victim.name in [backend._home[n] for n in job.workers()]
                job.to_end()
            assert differences(wanted, job.checkpoint) == []
        finally:
            backend.close()


@pytest.mark.timeout(300)
def test_two_hosts_that_are_cut_from_each_other_only_cost_the_job_one_of_them_until_they_are_not(
    tmp_path: Path, wanted: Path
) -> None:
    """The master hears all three workers; the one with virtual worker 0 and the third host's are kept."""
    with network() as net:
        backend = NamespaceHosts(net, tmp_path / "nurseries")
        try:
            job = Job(tmp_path, backend, silence_s=4.0)
            with job.run:
                job.go_on(lambda: job.step >= 6)
                before = job.workers()
                cut = [host for host in net.hosts if host.name in (backend._home[n] for n in before[:2])]
                for host in cut:
                    host.isolate()
                job.go_on(lambda: len(job.workers()) == 2)
                assert job.workers() == [before[0], before[2]]
                stuck = [e for e in job.events if e["event"] == "worker_stuck"]
                assert [e["worker"] for e in stuck] == [before[1]]
                assert f"worker {before[1]} and worker {before[0]} have not reached each other" in stuck[0]["reason"]
                went_on = job.step
                job.go_on(lambda: job.step > went_on + 1)
                for host in cut:
                    host.isolate(on=False)
                job.go_on(lambda: len(job.workers()) == 3)
                job.to_end()
            assert differences(wanted, job.checkpoint) == []
        finally:
            backend.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1], ids=["the main worker", "another"])
def test_a_member_that_is_killed_while_a_newcomer_on_another_host_follows_it_costs_a_step_and_no_more(
    tmp_path: Path, wanted: Path, victim: int
) -> None:
    with network() as net:
        backend = NamespaceHosts(net, tmp_path / "nurseries")
        try:
            job = Job(tmp_path, backend, steady=True, workers=2)
            with job.run:
                job.go_on(lambda: job.step >= 2)
                job.run.resize(3)
                job.go_on(lambda: job.told("following") != [])
                newcomer, old = job.told("following")[0]["worker"], job.workers()
                os.kill(job.run.workers[old[victim]], signal.SIGKILL)
                job.go_on(lambda: len(job.workers()) == 3)
                assert newcomer in job.workers()
                assert old[victim] not in job.workers()
                job.to_end()
            assert job.told("handed_over") == []
            last = [e for e in job.told("synced") if e["worker"] == newcomer][-1]
            assert last["network"]
            assert last["sources"] == [old[1 - victim]]
            assert [e["late"] for e in job.told("training") if e["worker"] == newcomer] == [0]
            assert differences(wanted, job.checkpoint) == []
        finally:
            backend.close()
