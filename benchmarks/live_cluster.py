"""A live cluster as a user has it, for benchmarks and tests: the processes of `concertina up`, and requests to them.

Everything is started by this process and ended by it, also the keepers that outlive a killed server.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from concertina.cli.places import read_server

START_SECONDS, REQUEST_SECONDS, END_SECONDS = 90.0, 10.0, 60.0
Plain = dict[str, Any]


class Up:
    """One `concertina up` process."""

    def __init__(self, state: Path, port: int, *args: str) -> None:
        self.state, self.port, self.args = state, port, args
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", "from concertina.cli import main; main()", "up", "--state", str(self.state)]
        command += ["--port", str(self.port), "--no-open", *self.args]
        with (self.state / f"up-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=END_SECONDS)

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self.alive:
            assert self._process is not None
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


def free_port() -> int:
    """One that a server keeps when it is killed and started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, method: str, path: str, body: Mapping[str, object] | None = None, *, limit_s: float = 60.0) -> Any:
    """One request, tried again until it is answered: the server may be down for a moment."""
    headers = {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}
    ends = time.monotonic() + limit_s
    while True:
        try:
            response = httpx.request(
                method, f"{url}/api/v1{path}", json=body, headers=headers, timeout=REQUEST_SECONDS, trust_env=False
            )
            if response.status_code < 500:
                break
        except httpx.TransportError:
            pass
        if time.monotonic() > ends:
            raise TimeoutError(f"{method} {path}: no answer within {limit_s:.0f} s")
        time.sleep(0.1)
    if response.status_code >= 400:
        raise RuntimeError(f"{method} {path}: {response.status_code} {response.text}")
    return response.json()


def all_jobs(url: str) -> list[Plain]:
    found: list[Plain] = []
    after = ""
    while True:
        page = ask(url, "GET", f"/jobs?limit=200{after}")
        found += page["items"]
        if not page["next"]:
            return found
        after = f"&after={page['next']}"


def wait_for_server(state: Path, url: str) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        there = read_server(state)
        try:
            if there is not None and httpx.get(f"{url}/healthz", timeout=2.0, trust_env=False).json()["leader"]:
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"no cluster with a controller at {url} within {START_SECONDS:.0f} s")


@contextmanager
def cluster(state: Path, port: int, *args: str) -> Iterator[Up]:
    """Up, with a controller in office; at the end everything is down and nothing is left."""
    up = Up(state, port, *args)
    try:
        up.start()
        wait_for_server(state, up.url)
        yield up
    finally:
        up.stop()
        end_keepers(state)


def end_keepers(state: Path) -> None:
    """Kills what a killed server has left: keepers of this state folder, and with them their workers."""
    mark = str(state.absolute()).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"concertina.cluster.keeper" in words and mark in words:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
