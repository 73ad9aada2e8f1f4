"""A Ray cluster whose nodes are network namespaces: every host has its own address, name and session folder.

The head's folder is a real one, so that a driver can be started beside it; each other host has its own in memory, and
a process namespace, with which everything on it ends. `ray stop` is never used: it would end every Ray of the machine.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import Namespace, Network, network

START_SECONDS = 90.0
END_SECONDS = 20.0
PORT = 6399
RAY = str(Path(sys.executable).with_name("ray"))
SETTINGS = {  # a silent host is noticed within about 4 s instead of 65
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray makes one in the user's home
}


class RayHosts:
    """Running nodes; the first host is the head."""

    def __init__(self, net: Network, folder: Path, session: Path, slots: int) -> None:
        self.net, self._folder, self._slots = net, folder, slots
        self.session = session
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, **SETTINGS}

    @property
    def head(self) -> Namespace:
        return self.net.hosts[0]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def start(self, host: Namespace) -> None:
        where = f"--node-ip-address={host.address}"
        common = [RAY, "start", "--block", where, f"--num-cpus={self._slots}", "--disable-usage-stats"]
        common += [f"--object-store-memory={100 << 20}"]
        if host is self.head:
            role = ["--head", f"--port={PORT}", f"--temp-dir={self.session}", "--include-dashboard=false"]
            command = [*host.prefix, *common, *role]
        else:
            script = f'hostname {host.name} && mount -t tmpfs none {self.session} && exec "$@"'
            apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
            command = [*host.prefix, *apart, "sh", "-c", script, "sh", *common, f"--address={self.address}"]
        with (self._folder / f"{host.name}.log").open("ab") as log:
            self._nodes[host.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, start_new_session=True
            )

    def has_ended(self, host: Namespace) -> bool:
        """Ray ends a node that its head has given up on."""
        return self._nodes[host.name].poll() is not None

    def log(self, host: Namespace) -> str:
        return (self._folder / f"{host.name}.log").read_text()

    def stop(self, host: Namespace) -> None:
        node = self._nodes.pop(host.name, None)
        if node is None:
            return
        if node.poll() is None:
            node.send_signal(signal.SIGTERM if host is self.head else signal.SIGKILL)
            try:
                node.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait(END_SECONDS)
        if host is self.head:
            _end_all_of(str(self.session))


def _end_all_of(session: str) -> None:
    """What a head has started and not ended: found by its session folder on the command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if session.encode() in command:
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue


@contextmanager
def ray_hosts(folder: Path, slots: int = 1, hosts: int = 3) -> Iterator[RayHosts]:
    """Started and known to the head; always ended."""
    pytest.importorskip("ray", reason="Ray is missing: pip install 'concertina[ray]'")
    short = tempfile.TemporaryDirectory(prefix="ctray", ignore_cleanup_errors=True)  # sockets lie below it
    with short as session, network(hosts) as net:
        cluster = RayHosts(net, folder, Path(session), slots)
        try:
            cluster.start(cluster.head)
            _wait_for(cluster, cluster.head)
            for host in net.hosts[1:]:
                cluster.start(host)
            for host in net.hosts[1:]:
                _wait_for(cluster, host)
            yield cluster
        finally:
            for host in reversed(net.hosts):
                cluster.stop(host)


def _wait_for(cluster: RayHosts, host: Namespace) -> None:
    """Says so in its log when it belongs to the cluster."""
    until = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in cluster.log(host):
        if cluster.has_ended(host) or time.monotonic() > until:
            pytest.fail(f"Ray did not start on {host.name}:\n{cluster.log(host)}")
        time.sleep(0.1)
