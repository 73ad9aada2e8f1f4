"""What runs on every node of a Ray cluster that a job uses: a nursery there, spoken to from afar."""

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from concertina.backends.local import LocalBackend
from concertina.core.errors import JobFailed


class RayNode:
    """An actor. Its calls come in several threads: one waits for events while others start and signal."""

    def __init__(self, log_dir: str, threads: int) -> None:
        self._backend = LocalBackend.open(Path(log_dir), threads)
        self._kept: list[dict[str, Any]] = []  # events that may not have arrived yet
        self._first = 0  # number of the first of them
        self._listening = threading.Lock()

    def start(
        self, worker: int, script: str, args: Sequence[str], env: Mapping[str, str], log: str, folder: str
    ) -> None:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        if os.getcwd() != folder:
            os.chdir(folder)  # where the job was started; its scripts may name files from there
        self._backend.start_worker(worker, Path(script), args, env, Path(log))

    def events(self, taken: int, timeout: float) -> tuple[float, list[dict[str, Any]]]:
        """This node's clock, and what has happened here after the first `taken` events; an answer may get lost."""
        with self._listening:
            del self._kept[: taken - self._first]
            self._first = taken
            if not self._kept:
                try:
                    self._kept += self._backend.events(timeout)
                except JobFailed as error:
                    raise RuntimeError(str(error)) from None
            return time.monotonic(), list(self._kept)

    def signal(self, number: int, workers: Sequence[int] | None) -> None:
        self._backend.signal_workers(signal.Signals(number), workers)

    def close(self) -> None:
        self._backend.close()
