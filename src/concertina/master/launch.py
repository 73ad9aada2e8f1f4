"""Starting a job's master, talking to it, and replacing it when it dies."""

import contextlib
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from concertina.core.errors import JobFailed
from concertina.master.link import MasterLink
from concertina.master.service import JobSpec, spec_key
from concertina.master.words import LAUNCHER
from concertina.store import open_store
from concertina.store.address import UNSYNCED

QUICK_SECONDS, MOST_QUICK = 2.0, 5  # a master that ends at once, again and again, is a defect
FROZEN_SECONDS = 5.0  # a master that says nothing for so long has to make room for another

StartMaster = Callable[[Mapping[str, str]], None]


class MasterKeeper:
    """Keeps a master in office for one job."""

    def __init__(
        self, folder: Path, spec: JobSpec, start: StartMaster, *, store: str = "", job: str = "job", host: str = ""
    ) -> None:
        """On several hosts: the address of this one; and a store that all of them reach, with a name for the job there.
        Without such a store, all masters of the job are on this host, at one port, and workers need none to find them.
        """
        self.store = store or f"{UNSYNCED}:{folder / 'store.db'}"  # worth nothing without the workers of this machine
        self.job = job
        self._host = host
        self._port = _free_port(host) if host and not store else 0
        self.workers_store = f"tcp://{f'[{host}]' if ':' in host else host}:{self._port}" if self._port else self.store
        self.key = secrets.token_hex(16)
        self.starts = 0
        self._start_process = start
        self._started_at = 0.0
        self._quick = 0
        self._heard: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.wake_fd, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        with open_store(self.store) as opened:
            opened.put(spec_key(self.job), spec.to_json().encode())
        self._start()
        self._link = MasterLink(self.store, self.job, self.key, LAUNCHER, self._on_message)
        self._link.start()

    def _start(self) -> None:
        self.starts += 1
        self._started_at = time.monotonic()
        env = {"CONCERTINA_STORE": self.store, "CONCERTINA_JOB": self.job, "CONCERTINA_KEY": self.key}
        self._start_process({**env, "CONCERTINA_HOST": self._host, "CONCERTINA_PORT": str(self._port)})

    def came_up(self) -> None:
        """There is a process: until now it was not its fault that it said nothing."""
        self._started_at = time.monotonic()

    def ended(self, code: int) -> None:
        """The master has ended; if its work was not done, another takes over when the lease has run out."""
        if code == 0:
            return
        quick = code > 0 and time.monotonic() - self._started_at < QUICK_SECONDS
        self._quick = self._quick + 1 if quick else 0
        if self._quick >= MOST_QUICK:
            raise JobFailed("the master ends as soon as it is started; see master.log among the logs")
        self._start()

    @property
    def is_frozen(self) -> bool:
        """It is there, but says nothing: end it. Should it wake first, its lease has run out and nobody obeys it."""
        silent = min(self._link.silence_s, time.monotonic() - self._started_at)
        return silent > FROZEN_SECONDS

    def say(self, **body: Any) -> None:
        self._link.say(**body)

    def _on_message(self, body: Mapping[str, Any]) -> None:
        self._heard.put(body)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def heard(self) -> Iterator[Mapping[str, Any]]:
        while True:
            try:
                yield self._heard.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        self._link.close()
        os.close(self.wake_fd)
        os.close(self._wake_write)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
