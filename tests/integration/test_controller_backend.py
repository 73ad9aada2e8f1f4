"""What every backend must do for the controller: start keepers that outlive it, and know for sure when one is gone."""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.unit.pretend_cluster import PretendCluster

from concertina.cluster import keys
from concertina.cluster.backend import ClusterBackend, LocalCluster, devices
from concertina.cluster.codec import dump
from concertina.cluster.keeper import gpus_of
from concertina.cluster.keeper_start import LOCK, take_lock
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import JobRequest, JobState, NodePhase, NodeState
from concertina.core.job import JobPhase
from concertina.store import Store, open_store

LIMIT = 60.0
ENDLESS = "import time\nwhile True:\n    time.sleep(0.1)\n"


@dataclass
class Rig:
    backend: ClusterBackend
    store: Store
    mirror: Mirror
    kill: Callable[[str], None]
    folder: Path

    def state(self, attempt: int, **fields: object) -> JobState:
        given = {"id": "a", "phase": JobPhase.RUNNING, "slots": ("n/0",), "order": 1, "attempt_s": time.time()}
        state = JobState(**{**given, "attempt": attempt, **fields})  # type: ignore[arg-type]
        self.store.put(keys.STATES + "a", dump(state))
        return state

    def is_gone(self, state: JobState) -> bool:
        return self.backend.is_gone(state, self.mirror.keeper("a"), time.time())

    def until(self, there: Callable[[], bool]) -> None:
        patience = time.monotonic() + LIMIT
        while not there():
            assert time.monotonic() < patience
            time.sleep(0.05)


def corpses() -> list[str]:
    """Children of this process that have ended and that nobody took note of."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            if fields and fields[0] == "Z" and int(fields[1]) == os.getpid():
                found.append(entry.name)
    return found


@pytest.fixture(params=["local", "pretend"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    address = f"sqlite-unsynced:{tmp_path / 'cluster.db'}"
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with open_store(address) as store:
        mirror = Mirror(store)
        mirror.start()
        asked = JobRequest(id="a", name="a", user="u", script=str(script), virtual=2, steps=10**9)
        store.put(keys.REQUESTS + "a", dump(asked))
        if request.param == "local":
            local = LocalCluster(address, tmp_path, 2, "cpu")
            yield Rig(local, store, mirror, local.end_keeper, tmp_path)
            local.end_keeper("a")
            local.close()
        else:
            pretend = PretendCluster(store, (NodeState(id="n", device_type="cpu", slots=2),))
            pretend.start()
            yield Rig(pretend, store, mirror, pretend.kill, tmp_path)
            pretend.stop()
        mirror.close()


def test_nodes_have_slots_and_a_type(rig: Rig) -> None:
    assert rig.backend.name
    for node in rig.backend.nodes():
        assert node.slots >= 1
        assert node.device_type
        assert node.phase in (NodePhase.UP, NodePhase.LOST)


def test_a_keeper_is_there_until_it_is_killed_and_then_for_sure_not(rig: Rig) -> None:
    state = rig.state(attempt=1)
    rig.backend.start_keeper("a", 1)
    assert not rig.is_gone(state), "it is being started"
    rig.until(lambda: rig.mirror.keeper("a") is not None and bool(rig.mirror.seen("a")))
    assert not rig.is_gone(state)
    rig.kill("a")
    rig.until(lambda: rig.is_gone(state))
    again = rig.state(attempt=2)
    rig.backend.start_keeper("a", 2)
    rig.until(lambda: (seen := rig.mirror.seen("a")) is not None and seen.attempt == 2)
    rig.backend.end_keeper("a")
    rig.until(lambda: rig.is_gone(again))
    rig.until(lambda: bool(rig.backend.nodes()) and not corpses())


def test_an_attempt_that_was_never_started_is_gone_after_a_moment(rig: Rig) -> None:
    assert not rig.is_gone(rig.state(attempt=1))
    assert rig.is_gone(rig.state(attempt=1, attempt_s=time.time() - 5.0))


@pytest.mark.parametrize(("attempt", "there"), [(1, True), (2, False)])
def test_a_keeper_that_another_controller_started_is_found_before_it_is_in_office(
    tmp_path: Path, attempt: int, there: bool
) -> None:
    """By its command line: between being started and holding the job's lock, there is nothing else to go by."""
    address = f"sqlite-unsynced:{tmp_path / 'cluster.db'}"
    words = ["concertina.cluster.keeper", address, str(tmp_path), "a", "1"]
    process = subprocess.Popen(["tail", "-f", *words, "/dev/null"], stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.2)
        state = JobState(id="a", attempt=attempt, attempt_s=time.time() - 5.0)
        assert LocalCluster(address, tmp_path, 2, "cpu").is_gone(state, None, time.time()) is not there
    finally:
        process.kill()
        process.wait()


def test_a_machine_has_at_least_one_slot(tmp_path: Path) -> None:
    (node,) = LocalCluster.open(f"sqlite:{tmp_path / 'cluster.db'}", tmp_path).nodes()
    assert node.device_type
    assert node.slots >= 1


def test_only_the_gpus_that_are_allowed_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.cluster.backend._gpus", lambda: ("H200", 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices() == ("H200", ("0", "1", "2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert devices() == ("H200", ("2", "3"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices() == ("cpu", ())


def test_slots_take_the_gpus_of_their_node_in_turn() -> None:
    assert gpus_of(NodeState(id="n", device_type="H200", slots=4, devices=("2", "3"))) == ("2", "3")
    assert gpus_of(NodeState(id="n", device_type="H200", slots=2)) == ("0", "1")
    assert gpus_of(NodeState(id="n", device_type="cpu", slots=2)) == ()


def test_as_long_as_anything_of_a_job_holds_its_lock_it_is_not_gone(tmp_path: Path) -> None:
    """Workers may outlive a keeper for a moment; they hold its lock, too."""
    (tmp_path / "jobs" / "a").mkdir(parents=True)
    backend = LocalCluster(f"sqlite:{tmp_path / 'cluster.db'}", tmp_path, 2, "cpu")
    state = JobState(id="a", attempt=1, attempt_s=time.time() - 5.0)
    lock = take_lock(tmp_path / "jobs" / "a" / LOCK, 1.0)
    assert lock is not None
    assert not backend.is_gone(state, None, time.time())
    os.close(lock)
    assert backend.is_gone(state, None, time.time())


def test_a_folder_that_can_not_be_moved_away_stays_and_is_moved_later(tmp_path: Path) -> None:
    cluster = LocalCluster("memory:", tmp_path, 1, "cpu")
    folder = tmp_path / "jobs" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "trash").rmdir()
    (tmp_path / "trash").write_text("in the way")
    with pytest.raises(FileExistsError):
        cluster.discard("a")
    assert folder.is_dir()
    (tmp_path / "trash").unlink()
    assert cluster.discard("a")
    assert not folder.exists()
    cluster.close()


def test_a_job_is_forgotten_on_a_disk_on_which_no_folder_can_be_made_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To forget jobs is what makes room there."""
    cluster = LocalCluster("memory:", tmp_path, 1, "cpu")
    folder = tmp_path / "jobs" / "a"
    folder.mkdir(parents=True)

    def full(name: str, mode: int = 0o777) -> None:
        raise OSError(errno.EEXIST if os.path.exists(name) else errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    assert cluster.discard("a")
    assert not folder.exists()
    cluster.close()
