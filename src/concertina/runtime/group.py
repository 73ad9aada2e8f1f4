"""A gloo group for the reductions that travel over sockets, built beside torch's global process group.

A script's own use of `torch.distributed` and our generations never meet. Only tensors travel. gloo cannot be told to
give up waiting for a peer that is gone, so the group knows its own connections and can cut them.
"""

import contextlib
import os
import socket
import sys
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
from concertina.runtime.keepalive import mind_silence
from concertina.runtime.torch_internals import file_store, gloo_group

TIMEOUT = timedelta(minutes=30)  # as long as DDP: one worker may evaluate for long while the others wait
CONNECT = timedelta(minutes=1)  # all are there and about to connect when this is waited for
FAR_CONNECT = timedelta(seconds=20)  # all have just met
THREADS = 2  # of gloo, per group
UNANSWERED_SECONDS = 20.0  # a connection to another host that the host answers nothing on for so long is broken
NEWS_SECONDS = 20.0  # after a connection broke, how long to wait for the master to say who is gone

Connection = tuple[int, str]  # descriptor, and what it was; another connection may have the same number later

_building = threading.Lock()  # so that new connections are surely those of the group being built


class Group:
    """One worker's end of the group."""

    def __init__(
        self,
        rendezvous: Path,
        fabric: Fabric,
        host: str = "",
        timeout: timedelta = TIMEOUT,
        device: torch.device | None = None,
    ) -> None:
        """Meets the others through a file, and gloo listens on the loopback interface only; where members are on
        several hosts, through the fabric, and gloo listens at this host's address. `device`: of what is summed."""
        self.rank = fabric.rank
        self.size = fabric.size
        self._fabric = fabric
        self._connections: set[Connection] = set()
        self._before: set[Connection] | None = None  # connections that are none of ours, while ours are being made
        self._broken: RuntimeError | None = None
        fabric.on_loss.append(self.cut)
        with _building, self.watched():
            self._before = _connections()
            self.pg = self._connect(rendezvous, host)
            # Now, not in the first step: this connects all pairs, and a GPU's streams are made for it.
            self.pg.allreduce([torch.zeros(1, device=device)]).wait()
            self.pg._set_default_timeout(timeout)
            self._connections, self._before = self._made(), None
        if fabric.spans_hosts:
            _each(self._connections, lambda connection: mind_silence(connection, UNANSWERED_SECONDS))
        if fabric.lost:
            self.cut()

    def _connect(self, rendezvous: Path, host: str) -> Any:
        if not self._fabric.spans_hosts:
            store = file_store(rendezvous, self.size, CONNECT)
            return gloo_group(store, self.rank, self.size, CONNECT, THREADS)
        meeting = FabricStore(self._fabric)
        try:
            return gloo_group(meeting, self.rank, self.size, FAR_CONNECT, THREADS, host)
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
        """Turns a broken connection into the loss that caused it. If nobody is lost, all members begin anew."""
        with self._fabric.waiting():
            try:
                if self._broken is not None:
                    raise self._broken
                yield
            except RuntimeError as error:
                self._wait_for_news()
                if not self._fabric.lost:
                    print(f"concertina: a connection between workers broke: {error}", file=sys.stderr, flush=True)
                    self.cut()  # nobody else shall wait for what will not come
                raise PeersLost(self._fabric.lost) from None

    def _wait_for_news(self) -> None:
        until = time.monotonic() + NEWS_SECONDS
        while not (self._fabric.lost or self._fabric.others_stopped) and time.monotonic() < until:
            time.sleep(0.005)

    def cut(self) -> None:
        """Breaks every connection, so that nothing waits for a peer that is gone."""
        _each(self._connections | self._made(), _end)

    def _made(self) -> set[Connection]:
        """What has been connected while the group is being built, and not by the script, as far as that shows."""
        new = set() if self._before is None else _connections() - self._before
        return {connection for connection in new if _may_be_gloos(connection, self._fabric.spans_hosts)}

    def close(self) -> None:
        """gloo's destructor takes a tenth of a second per peer; call this where nobody waits."""
        with contextlib.suppress(ValueError):
            self._fabric.on_loss.remove(self.cut)
        self._connections = set()
        self.pg = None


def _each(connections: set[Connection], act: Callable[[socket.socket], object]) -> list[object]:
    found = []
    for fd, what in connections:
        with contextlib.suppress(OSError):
            if _what(fd) == what:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    found.append(act(connection))
    return found


def _may_be_gloos(connection: Connection, spans_hosts: bool) -> bool:
    """TCP, and within this machine if the group is."""

    def judge(it: socket.socket) -> bool:
        tcp = it.family in (socket.AF_INET, socket.AF_INET6) and it.type == socket.SOCK_STREAM
        return tcp and (spans_hosts or it.getsockname()[0].startswith("127."))

    return _each({connection}, judge) == [True]


def _end(connection: socket.socket) -> None:
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> set[Connection]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = _what(int(name))
            if what.startswith("socket:"):
                found.add((int(name), what))
    return found


def _what(fd: int) -> str:
    """For a connection, a number that no other one has."""
    return os.readlink(f"/proc/self/fd/{fd}")
