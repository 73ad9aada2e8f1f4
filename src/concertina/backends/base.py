"""What a job needs of the place it runs in: processes that are started, signalled and listened to.

A backend serves one job at a time. Whoever drives it (`runner.Run`) knows nothing of how a process gets to its node.
Nothing that a backend started outlives it, however it ends.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

HERE = ""  # the node that the backend itself runs on


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a new worker goes."""

    node: str = HERE
    slot: str = ""  # NODE/INDEX in a cluster; empty where nobody counts
    env: Mapping[str, str] = field(default_factory=dict)  # what the slot adds to the worker's environment


class WorkerBackend(Protocol):
    """Starts, signals and listens to the workers of one job, and its master."""

    @property
    def address(self) -> str:
        """Of this machine, for processes on other nodes; empty: all nodes are this machine."""
        ...

    def host_of(self, node: str) -> str:
        """The address at which workers on other nodes reach a process on this one."""
        ...

    def start_worker(
        self, worker: int, script: Path, args: Sequence[str], env: Mapping[str, str], log: Path, node: str = HERE
    ) -> None:
        """Asks for a process; `worker_started` tells when it is there, `worker_exited` when it is gone.

        `env` comes on top of the backend's own environment. Does not wait. A node that can not start it (any more) is
        told by `worker_exited` with a negative code; JobFailed is raised when nothing can be started at all.
        """
        ...

    def start_master(self, env: Mapping[str, str], log: Path) -> None:
        """The same for the job's master, near whoever drives the job: `master_started`, `master_exited`."""
        ...

    def events(self, timeout: float, also: int | None = None) -> list[dict[str, object]]:
        """What workers said and what became of them, in order; waits up to `timeout` seconds for something.

        Another descriptor, `also`, ends the waiting too; what is in it is thrown away. Started and exited events carry
        `worker` (MASTER for the master), `pid` and `code` (negative: the signal). An exit comes after the last word of
        that worker, and when all that its script had started is ended, too.
        """
        ...

    def pid_of(self, worker: int) -> int | None:
        """Of a worker that runs, on its own node, or of the master (MASTER)."""
        ...

    def signal_workers(self, number: signal.Signals, workers: Sequence[int] | None = None) -> None:
        """All workers, or those named (MASTER among them, if named). Whoever is gone is passed over."""
        ...

    def end_workers(self) -> None:
        """Kills what is still there, the master too, and waits (bounded) until it is gone."""
        ...

    def close(self) -> None:
        """Ends everything that was started here. Bounded."""
        ...
