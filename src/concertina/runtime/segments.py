"""Memory that processes share: the same pages on one machine, a copy that is kept up to date on another.

A segment has no name in any file system (memfd): others find it through its maker's descriptor, and once they have
mapped it, it lives as long as any of them, whatever becomes of the maker. So nothing can be left behind, and what a
killed worker wrote stays readable for the others.

Workers on another host hold a *mirror* (`mirrors.py`): the same layout, into which the maker's changes are written in
the order in which they were made. For that, whoever changes a segment says what it has changed (`push`); on one machine
that says nothing to nobody.
"""

import ctypes
import errno
import mmap
import os
import socket
from collections.abc import Iterator
from typing import Protocol

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise, since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Unreachable(ConnectionError):
    """The host of a segment's maker does not answer now. It may later, and its worker may live."""


class Reader(Protocol):
    """Who holds a mirror of a segment."""

    def changed(self, number: int, segment: "Segment", at: int, size: int) -> None: ...


class Served(Protocol):
    """Memory that others read piece by piece."""

    def admit(self, sock: socket.socket) -> None:
        """Somebody who may read it, and has a connection of its own for that."""

    def close(self) -> None: ...


class Wire(Protocol):
    """What connects this process with workers of other hosts."""

    def offer(self, segment: "Segment") -> str:
        """Where others find it."""

    def is_here(self, place: str) -> bool:
        """Whether what was offered there is on this host."""

    def mirror(self, place: str) -> "Segment":
        """A copy that follows the original; Unreachable if its owner does not answer, OSError if it is gone."""

    def serve(self, memory: "Served") -> str:
        """Where others find memory of ours that is read, not mirrored."""

    def call(self, place: str) -> socket.socket:
        """A connection of our own to who serves memory there; OSError if it cannot be reached."""


_wire: Wire | None = None  # of this process; None: all workers are on this machine


def connect(wire: Wire | None) -> None:
    """From here on, segments can be found from other hosts."""
    global _wire
    _wire = wire


def is_here(address: str) -> bool:
    """Whether a segment's memory can be mapped, and its maker's processes are on this machine."""
    place = address.partition("@")[2]
    return not place or (_wire is not None and _wire.is_here(place))


def serve(memory: Served) -> str:
    """Where workers of other hosts find it, as long as somebody keeps it; empty if there are none."""
    return "" if _wire is None else _wire.serve(memory)


def call(place: str) -> socket.socket:
    """A connection to the worker that serves memory at `place`, both sides having proved who they are."""
    if _wire is None:
        raise OSError("this worker has no connection to other hosts")
    return _wire.call(place)


def host_of(address: str) -> str:
    """The host of a segment's maker; empty where nobody speaks of hosts."""
    return address.partition("@")[2].partition("/")[0].rpartition(":")[0]


class Segment:
    """A piece of shared memory; `memory` is mapped for reading and writing."""

    _fd = _probe = -1

    def __init__(self, fd: int, size: int, address: str) -> None:
        self.size = size
        self.address = address  # how others open it, as long as the maker keeps the descriptor
        self.memory = mmap.mmap(fd, size)
        self._fd = fd
        self._wire = _wire
        self._probe = os.dup(fd) if _wire is not None else -1  # stays when the descriptor is hidden
        self.readers: tuple[tuple[Reader, int], ...] = ()  # and the number that each knows this segment by

    @classmethod
    def create(cls, size: int) -> "Segment":
        size = max(size, mmap.PAGESIZE)
        fd = os.memfd_create("concertina", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        segment = cls(fd, size, f"{os.getpid()}/fd/{fd}")
        if _wire is not None:
            segment.address += f"@{_wire.offer(segment)}"
        return segment

    @classmethod
    def open(cls, address: str) -> "Segment":
        """Maps another process's segment; OSError if that process is gone."""
        path, _, place = address.partition("@")
        if _wire is not None and not is_here(address):
            return _wire.mirror(place)
        fd = os.open(f"/proc/{path}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(fd, os.fstat(fd).st_size, address)
        finally:
            os.close(fd)
        segment._fd = -1
        return segment

    def push(self, at: int, size: int) -> None:
        """These bytes have changed. Others see changes in the order of these calls."""
        for reader, number in self.readers:
            reader.changed(number, self, at, size)

    def offer(self) -> int:
        """The number that workers of other hosts find this copy by; 0: there are none."""
        return 0 if self._wire is None else int(self._wire.offer(self).rpartition("/")[2])

    def another(self, number: int) -> "Segment":
        """What the maker of this segment has offered under that number."""
        if self._wire is None:
            raise OSError("this worker has no connection to other hosts")
        return self._wire.mirror(f"{self.address.partition('@')[2].rpartition('/')[0]}/{number}")

    def seal(self) -> None:
        """The maker is gone for good: what is here now stays as it is."""

    def take_over(self, other: "Segment") -> None:
        """All that a copy of the same segment holds, what says that something is there last."""
        for at, size in reversed(list(other.used())):
            self.memory[at : at + size] = other.memory[at : at + size]

    def used(self) -> Iterator[tuple[int, int]]:
        """Stretches that were ever written to: (offset, size). Reading the rest would set memory aside for it."""
        at = 0
        while at < self.size:
            try:
                begin = os.lseek(self._probe, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but holes from here on
                    return
                raise
            at = os.lseek(self._probe, begin, os.SEEK_HOLE)
            yield begin, min(at, self.size) - begin

    def touch(self) -> None:
        """Makes all pages present now, so that nobody waits for the kernel later; threads run on meanwhile."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(self.size), _POPULATE_WRITE) != 0:
            view = memoryview(self.memory)
            for at in range(0, self.size, mmap.PAGESIZE):
                view[at] = view[at]

    def look(self) -> None:
        """Makes another's pages present in this process, for reading."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(self.size), _POPULATE_READ)

    def __del__(self) -> None:
        self.hide()
        if self._probe >= 0:
            os.close(self._probe)

    def hide(self) -> None:
        """All who need it have mapped it: nobody can open it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
