"""What the controller needs of the machines: which there are, and processes that keep jobs on them.

`LocalCluster` is this machine. Keepers outlive the controller; whether one is there is asked of its lock and of the
kernel, never remembered.
"""

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any, Protocol

from concertina.cluster.keeper_start import (
    LOCK,
    end_holders,
    is_held,
    job_folder,
    keeper_alive,
    start_keeper,
    start_ticks,
)
from concertina.cluster.records import JobState, Keeper, NodeState
from concertina.cluster.trash import Trash

NODE = "local"
CPU = "cpu"
START_SECONDS = 1.0  # a keeper that was asked for may not be a process yet


class ClusterBackend(Protocol):
    """Where jobs run. All calls are quick."""

    @property
    def name(self) -> str:
        """As in `--backend`."""
        ...

    def nodes(self) -> tuple[NodeState, ...]:
        """Every machine there is or was, up or lost."""
        ...

    def start_keeper(self, job: str, attempt: int) -> None:
        """Start a keeper that outlives us."""
        ...

    def is_gone(self, state: JobState, keeper: Keeper | None, now: float) -> bool:
        """Whether for sure nothing is left of the job's last keeper: no process of it, none of its workers."""
        ...

    def end_keeper(self, job: str) -> None:
        """Kill what is left of a job's keeper and of its workers."""
        ...

    def discard(self, job: str) -> bool:
        """Remove all files of a job that has ended; False if anything still runs there. Raises OSError."""
        ...

    def close(self) -> None:
        """Keepers stay."""
        ...


class LocalCluster:
    """Keepers as processes of this machine."""

    def __init__(
        self, store: str, state_dir: Path, slots: int, device_type: str, devices: tuple[str, ...] = ()
    ) -> None:
        self._store, self._state_dir = store, state_dir
        self._node = NodeState(id=NODE, device_type=device_type, slots=slots, devices=devices)
        self._started: dict[str, tuple[int, int]] = {}  # job -> attempt, pid: of keepers that are our children
        self._children: dict[int, str] = {}
        self._trash = Trash.open(state_dir / "trash")

    @classmethod
    def open(cls, store: str, state_dir: Path, slots: int = 0) -> "LocalCluster":
        """`slots` 0: one for each GPU, or else for each core."""
        device_type, found = devices()
        return cls(store, state_dir, slots or len(found) or max(os.cpu_count() or 1, 1), device_type, found)

    @property
    def name(self) -> str:
        return "local"

    def nodes(self) -> tuple[NodeState, ...]:
        self._reap()
        return (self._node,)

    def start_keeper(self, job: str, attempt: int) -> None:
        pid = start_keeper(self._store, self._state_dir, job, attempt)
        self._started[job], self._children[pid] = (attempt, pid), job

    def is_gone(self, state: JobState, keeper: Keeper | None, now: float) -> bool:
        if keeper is not None and keeper.attempt == state.attempt and keeper_alive(keeper):
            return False
        mine = self._started.get(state.id)
        if mine is not None and mine[0] == state.attempt and start_ticks(mine[1]) is not None:
            return False
        if is_held(self._state_dir, state.id) or 0 <= now - state.attempt_s < START_SECONDS:
            return False
        return not self._processes(state.id, state.attempt)

    def end_keeper(self, job: str) -> None:
        end_holders(job_folder(self._state_dir, job) / LOCK)
        for pid in self._processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def discard(self, job: str) -> bool:
        if is_held(self._state_dir, job):
            return False
        self._trash.take(job_folder(self._state_dir, job))
        return True

    def close(self) -> None:
        self._reap()
        self._trash.close()

    def _reap(self) -> None:
        """Children that have ended leave the kernel's table, and ours; other children are not our business."""
        for pid, job in list(self._children.items()):
            try:
                ended = os.waitpid(pid, os.WNOHANG)[0] != 0
            except ChildProcessError:
                ended = True
            if ended:
                del self._children[pid]
                if self._started.get(job, (0, 0))[1] == pid:
                    del self._started[job]

    def _processes(self, job: str, attempt: int | None = None) -> list[int]:
        """Keepers of a job, by their command lines: also those that do not hold its lock yet."""
        wanted = [b"concertina.cluster.keeper", self._store.encode(), str(self._state_dir).encode(), job.encode()]
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")[2:]
                    if words[:4] == wanted and attempt in (None, int(words[4])):
                        found.append(int(entry.name))
        return found


def devices() -> tuple[str, tuple[str, ...]]:
    """The type and the names of the GPUs that CUDA_VISIBLE_DEVICES allows here; none: the CPU."""
    with contextlib.suppress(Exception):  # no driver, no card, no library: all the same here
        device_type, count = _gpus()
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(n) for n in range(count)] if allowed is None else [n for n in allowed.split(",") if n.strip()]
        if names:
            return device_type, tuple(names)
    return CPU, ()


def _gpus() -> tuple[str, int]:
    nvml: Any = __import__("pynvml")
    nvml.nvmlInit()
    try:
        count = int(nvml.nvmlDeviceGetCount())
        name: Any = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
        return (name if isinstance(name, str) else name.decode()).replace(" ", "-"), count
    finally:
        nvml.nvmlShutdown()


def holder_name() -> str:
    """Who is in office, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"
