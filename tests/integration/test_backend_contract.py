"""What every backend does alike: start, signal and listen to workers and a master, and leave nothing behind."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_hosts import SETTINGS

from concertina.backends.base import HERE, WorkerBackend
from concertina.backends.local import LocalBackend
from concertina.core.messages import MASTER

PATIENCE = 60.0
WAITS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


class Place:
    """A backend, a node of it, and everything that it has said."""

    def __init__(self, backend: WorkerBackend, node: str, folder: Path) -> None:
        self.backend, self.node, self.folder = backend, node, folder
        self.said: list[dict[str, Any]] = []
        folder.mkdir()

    def start(self, worker: int, code: str, env: dict[str, str] | None = None, args: tuple[str, ...] = ()) -> Path:
        script, log = self.folder / f"script-{worker}.py", self.folder / f"worker-{worker}.log"
        script.write_text(code)
        self.backend.start_worker(worker, script, args, env or {}, log, self.node)
        return log

    def try_out(self) -> None:
        self.start(0, "raise SystemExit(3)")
        self.event("worker_exited", 0)

    def wait(self, there: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not there():
            assert time.monotonic() < until, self.said
            self.said += self.backend.events(0.2)

    def event(self, kind: str, worker: int) -> dict[str, Any]:
        """Waits for it."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.said if e["event"] == kind and e.get("worker") == worker]

        self.wait(lambda: bool(found()))
        return found()[-1]


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray of one node, this machine, for as long as these tests take."""
    ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'concertina[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SETTINGS | {"RAY_AUTH_MODE": "disabled"}).items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        local = LocalBackend.open(folder, 1)
        yield local, HERE
        local.close()
        return
    request.getfixturevalue("ray_here")
    from concertina.backends.ray import RayBackend

    there = RayBackend(folder, 1)
    name = there.hosts()[0].name
    Place(there, name, folder / "first").try_out()  # what the node keeps for all workers is there before the tests
    yield there, name
    there.close()


@pytest.fixture
def place(opened: tuple[Any, str], tmp_path: Path) -> Iterator[Place]:
    backend, node = opened
    yield Place(backend, node, tmp_path / "place")
    backend.end_workers()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_is_started_and_its_end_is_told_with_its_code(place: Place) -> None:
    log = place.start(1, "import sys\nprint('said', *sys.argv[1:])\nsys.exit(7)\n", args=("a", "b c"))
    pid = place.event("worker_started", 1)["pid"]
    ended = place.event("worker_exited", 1)
    assert (ended["pid"], ended["code"]) == (pid, 7)
    assert log.read_text() == "said a b c\n"
    assert place.backend.pid_of(1) is None


def test_a_worker_has_the_environment_it_was_given_and_the_folder_of_who_asked(place: Place) -> None:
    code = "import os, sys\nprint(os.environ['COLOUR'], os.getcwd())\nsys.exit(3)\n"
    log = place.start(2, code, {"COLOUR": "blue"})
    place.event("worker_exited", 2)
    assert log.read_text() == f"blue {os.getcwd()}\n"


def test_only_those_named_get_a_signal_and_a_killed_one_is_told_as_such(place: Place) -> None:
    for worker in (3, 4):
        place.start(worker, WAITS)
    pids = {worker: place.event("worker_started", worker)["pid"] for worker in (3, 4)}
    assert {worker: place.backend.pid_of(worker) for worker in (3, 4)} == pids
    place.backend.signal_workers(signal.SIGKILL, (3, 99))
    assert place.event("worker_exited", 3)["code"] == -signal.SIGKILL
    assert not is_there(pids[3])
    assert is_there(pids[4])
    place.backend.signal_workers(signal.SIGKILL)
    assert place.event("worker_exited", 4)["code"] == -signal.SIGKILL


def test_a_worker_that_is_killed_before_it_is_there_does_not_stay(place: Place) -> None:
    place.start(10, WAITS)
    place.backend.signal_workers(signal.SIGKILL, (10,))
    place.backend.signal_workers(signal.SIGTERM, (10,))
    assert place.event("worker_exited", 10)["code"] == -signal.SIGKILL
    assert place.backend.pid_of(10) is None


def test_what_a_worker_has_started_ends_with_it(place: Place) -> None:
    code = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)\n"
    log = place.start(5, code)
    place.wait(lambda: log.exists() and log.read_text().endswith("\n"))
    place.backend.signal_workers(signal.SIGKILL, (5,))
    place.event("worker_exited", 5)
    place.wait(lambda: not is_there(int(log.read_text())))


def test_the_master_is_started_apart_from_the_workers(place: Place, tmp_path: Path) -> None:
    env = {"CONCERTINA_STORE": f"sqlite:{tmp_path / 'store.db'}", "CONCERTINA_JOB": "none", "CONCERTINA_KEY": "key"}
    place.start(6, WAITS)
    place.event("worker_started", 6)
    place.backend.start_master(env, tmp_path / "master.log")
    pid = place.event("master_started", MASTER)["pid"]
    place.backend.signal_workers(signal.SIGKILL)
    place.event("worker_exited", 6)
    assert place.backend.pid_of(MASTER) in (pid, None)  # it may have ended by itself: there is no such job
    place.backend.signal_workers(signal.SIGKILL, (MASTER,))
    place.event("master_exited", MASTER)


def test_waiting_for_events_ends_when_somebody_else_has_something(place: Place) -> None:
    place.backend.events(0.0)
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        began = time.monotonic()
        place.said += place.backend.events(PATIENCE, read)
        assert time.monotonic() - began < PATIENCE / 2
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)


def test_ending_the_workers_leaves_none(place: Place) -> None:
    for worker in (7, 8):
        place.start(worker, WAITS)
    pids = [place.event("worker_started", worker)["pid"] for worker in (7, 8)]
    place.backend.end_workers()
    assert [pid for pid in pids if is_there(pid)] == []
    assert place.backend.pid_of(7) is None


def test_a_node_that_does_not_exist_is_told_as_an_end(place: Place) -> None:
    place.node = "f" * 56
    place.start(9, WAITS)
    if place.backend.address:
        assert place.event("worker_exited", 9)["code"] < 0
    else:
        assert place.event("worker_started", 9)["pid"]  # every node is this machine
