"""A gloo group for the reductions that travel over sockets, built beside torch's global process group.

A script's own use of `torch.distributed` and our generations never meet. Only tensors travel. gloo cannot be told to
give up waiting for a peer that is gone, so the group knows its own connections and can cut them.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concertina.runtime.fabric import Fabric, PeersLost
from concertina.runtime.fabric_store import FabricStore
from concertina.runtime.torch_internals import file_store, gloo_group

TIMEOUT = timedelta(minutes=30)  # as long as DDP: one worker may evaluate for long while the others wait
CONNECT = timedelta(minutes=1)  # all are there and about to connect when this is waited for
THREADS = 2  # of gloo, per group
NEWS_SECONDS = 20.0  # after a connection broke, how long to wait for the master to say who is gone
FAR_NEWS_SECONDS = 120.0  # where a whole host may be gone and nobody sees its processes end

_building = threading.Lock()  # so that new connections are surely those of the group being built


class Group:
    """One worker's end of the group."""

    def __init__(self, rendezvous: Path, fabric: Fabric, host: str = "", timeout: timedelta = TIMEOUT) -> None:
        """Meets the others through a file, and gloo listens on the loopback interface only; where members are on
        several hosts, through the fabric, and gloo listens at this host's address."""
        self.rank = fabric.rank
        self.size = fabric.size
        self._fabric = fabric
        self._connections: set[int] = set()
        self._broken: RuntimeError | None = None
        fabric.on_loss.append(self.cut)
        with _building, self.watched():
            before = _connections()
            self.pg = self._connect(rendezvous, host)
            self.pg.allreduce([torch.zeros(1)]).wait()  # connects all pairs now, not in the first step
            self.pg._set_default_timeout(timeout)
            self._connections = _connections() - before
        if fabric.lost:
            self.cut()

    def _connect(self, rendezvous: Path, host: str) -> Any:
        if not self._fabric.spans_hosts:
            store = file_store(rendezvous, self.size, CONNECT)
            return gloo_group(store, self.rank, self.size, CONNECT, THREADS)
        meeting = FabricStore(self._fabric)
        try:
            return gloo_group(meeting, self.rank, self.size, CONNECT, THREADS, host)
        except Exception:
            if meeting.failure is not None:
                raise meeting.failure from None
            raise

    def sum_async(self, values: Tensor) -> Any:
        return self.pg.allreduce([values])

    def try_to(self, work: Callable[[], None]) -> None:
        """Inside the user's backward(): what breaks there is told by the next `watched`, where it can be dealt with."""
        if self._broken is None:
            try:
                work()
            except RuntimeError as error:
                self._broken = error

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Turns a broken connection into the loss that caused it."""
        try:
            if self._broken is not None:
                raise self._broken
            yield
        except RuntimeError:
            until = time.monotonic() + (FAR_NEWS_SECONDS if self._fabric.spans_hosts else NEWS_SECONDS)
            while not self._fabric.lost and time.monotonic() < until:
                time.sleep(0.005)
            if not self._fabric.lost:
                raise
            raise PeersLost(self._fabric.lost) from None

    def cut(self) -> None:
        """Breaks every connection, so that nothing waits for a peer that is gone."""
        for fd in self._connections:
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                try:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
                finally:
                    connection.close()

    def close(self) -> None:
        """gloo's destructor takes a tenth of a second per peer; call this where nobody waits."""
        with contextlib.suppress(ValueError):
            self._fabric.on_loss.remove(self.cut)
        self._connections = set()
        self.pg = None


def _connections() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found
