"""Workers as child processes of this machine, forked by one nursery process per job."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from concertina.backends.base import HERE
from concertina.core.errors import JobFailed
from concertina.core.messages import MASTER, decode

LEAVE_SECONDS = 10.0


class LocalBackend:
    """Starts, signals and listens to the workers of one job."""

    def __init__(self, nursery: subprocess.Popen[bytes], events: int, log_dir: Path) -> None:
        self._nursery = nursery
        self._events = events
        self._log_dir = log_dir
        self._pids: dict[int, int] = {}  # worker -> pid
        self._asked: dict[int, signal.Signals | None] = {}  # not started yet -> the signal that waits for it
        self._pending = b""

    @classmethod
    def open(cls, log_dir: Path, threads: int, hold: Sequence[int] = (), prefix: Sequence[str] = ()) -> Self:
        """Starts the nursery; workers can be asked for at once.

        The descriptors in `hold` stay open in everything that is started: a lock on one of them is held until all of it
        is gone. `prefix` is a command to start the nursery through.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        env = {**os.environ, "CONCERTINA_EVENTS_FD": str(write)}
        if threads:
            env |= {
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "OPENBLAS_NUM_THREADS": str(threads),
            }
        with (log_dir / "nursery.log").open("ab") as log:
            nursery = subprocess.Popen(
                [*prefix, sys.executable, "-m", "concertina.runtime.nursery", str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write, *hold),
                env=env,
                start_new_session=True,
            )
        os.close(write)
        os.set_blocking(read, False)
        return cls(nursery, read, log_dir)

    address = ""  # nobody has to find this machine

    def host_of(self, node: str) -> str:
        return "127.0.0.1"

    def start_worker(
        self, worker: int, script: Path, args: Sequence[str], env: Mapping[str, str], log: Path, node: str = HERE
    ) -> None:
        command = {
            "worker": worker,
            "script": str(script),
            "args": list(args),
            "env": dict(env),
            "cwd": os.getcwd(),
            "log": str(log),
        }
        assert self._nursery.stdin is not None
        try:
            self._nursery.stdin.write(json.dumps(command).encode() + b"\n")
            self._nursery.stdin.flush()
        except BrokenPipeError:
            raise JobFailed(f"the process that starts workers has died; see {self._log_dir / 'nursery.log'}") from None
        self._asked[worker] = None

    @property
    def events_fd(self) -> int:
        """Readable when there is something to hear."""
        return self._events

    def start_master(self, env: Mapping[str, str], log: Path) -> None:
        self.start_worker(MASTER, Path(), (), env, log)

    def events(self, timeout: float, also: int | None = None) -> list[dict[str, object]]:
        """What workers and nursery said since the last call; waits up to `timeout` seconds for something.

        Another descriptor, `also`, ends the waiting too; what is in it is thrown away.
        """
        readable, _, _ = select.select([self._events] if also is None else [self._events, also], [], [], timeout)
        data = b""
        if also in readable:
            os.read(also, 4096)
        if self._events in readable:
            data = os.read(self._events, 1 << 20)
            if not data:
                raise JobFailed(f"the process that starts workers has died; see {self._log_dir / 'nursery.log'}")
        *lines, self._pending = (self._pending + data).split(b"\n")
        found = [decode(line) for line in lines]
        for event in found:
            self._follow(event)
        return found

    def _follow(self, event: Mapping[str, object]) -> None:
        kind, worker, pid = str(event["event"]), event.get("worker"), event.get("pid")
        if not isinstance(worker, int) or not isinstance(pid, int):
            return
        if kind in ("worker_started", "master_started"):
            self._pids[worker] = pid
            late = self._asked.pop(worker, None)
            if late is not None:
                self.signal_workers(late, (worker,))
        elif kind in ("worker_exited", "master_exited") and self._pids.get(worker) == pid:
            del self._pids[worker]

    def pid_of(self, worker: int) -> int | None:
        """Of a worker that runs, or of the master (MASTER)."""
        return self._pids.get(worker)

    def signal_workers(self, number: signal.Signals, workers: Sequence[int] | None = None) -> None:
        """All of them, or those named; who was asked for and is not there yet gets it when it is."""
        for worker, waits in list(self._asked.items()):
            if (worker in workers if workers is not None else worker != MASTER) and waits is not signal.SIGKILL:
                self._asked[worker] = number
        for worker, pid in list(self._pids.items()):
            if worker in workers if workers is not None else worker != MASTER:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end_workers(self) -> None:
        """Kills workers that are still there and waits until they are gone."""
        self.signal_workers(signal.SIGKILL, (*self._pids, *self._asked))
        patience = time.monotonic() + LEAVE_SECONDS
        while (self._pids or self._asked) and time.monotonic() < patience:
            self.events(0.1)

    def close(self) -> None:
        """Ends everything that was started here."""
        self.signal_workers(signal.SIGKILL)
        if self._nursery.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._nursery.stdin.close()
        try:
            self._nursery.wait(timeout=LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        os.close(self._events)
