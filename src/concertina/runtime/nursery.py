"""A process that has imported torch once and forks workers, and their job's master, on request.

Importing takes seconds, forking milliseconds; so a generation of workers starts at once. The nursery never trains,
draws no random numbers and starts no threads. It reads one JSON command per line on standard input and answers on the
event pipe. When whoever started it goes away, it and all its workers end.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from concertina.core.messages import MASTER, encode
from concertina.core.process import die_with_parent
from concertina.master import service
from concertina.runtime.worker import run_script


def import_what_workers_need() -> None:
    """torch loads some parts on first use (an optimizer step needs its compiler package); do so once, here."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.utils.data")


def end_group(pid: int) -> None:
    """Kills a worker and whatever its script has started and left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Nursery:
    """Forks, waits, reports."""

    def __init__(self, events_fd: int) -> None:
        self._events_fd = events_fd
        self._children: dict[int, int] = {}  # pid -> worker
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def emit(self, **event: Any) -> None:
        os.write(self._events_fd, encode(event))

    def serve(self) -> None:
        pending = b""
        self.emit(event="nursery_ready", pid=os.getpid())
        while True:
            readable, _, _ = select.select([0, self._wake_read], [], [], 1.0)
            if self._wake_read in readable:
                os.read(self._wake_read, 512)
            self._reap()
            if 0 in readable:
                data = os.read(0, 1 << 16)
                if not data:
                    for pid in self._children:
                        end_group(pid)
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._start(json.loads(line))

    def _start(self, command: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_worker(command)
        self._children[pid] = command["worker"]
        name = "master_started" if command["worker"] == MASTER else "worker_started"
        self.emit(event=name, worker=command["worker"], pid=pid, at=time.monotonic())

    def _become_worker(self, command: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)  # so that what the script starts can be ended with it
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._wake_read, self._wake_write):
                os.close(fd)
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os.environ.update(command["env"])
            os.chdir(command["cwd"])
            code = service.main() if command["worker"] == MASTER else run_script(command["script"], command["args"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            # Skips the interpreter's shutdown: gloo's destructors may wait for peers that are gone.
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            worker = self._children.pop(pid)
            end_group(pid)
            code = os.waitstatus_to_exitcode(status)
            name = "master_exited" if worker == MASTER else "worker_exited"
            self.emit(event=name, worker=worker, pid=pid, code=code)


def main() -> None:
    die_with_parent()
    import_what_workers_need()
    Nursery(int(sys.argv[1])).serve()
    sys.stderr.flush()
    os._exit(0)  # taking down an interpreter with all of torch in it lasts seconds, in which whoever waits for us waits


if __name__ == "__main__":
    main()
