"""Memory that processes of one machine share.

A segment has no name in any file system (memfd): others find it through its maker's descriptor, and once they have
mapped it, it lives as long as any of them, whatever becomes of the maker. So nothing can be left behind, and what a
killed worker wrote stays readable for the others.
"""

import ctypes
import mmap
import os

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise, since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class Segment:
    """A piece of shared memory; `memory` is mapped for reading and writing."""

    _fd = -1

    def __init__(self, fd: int, size: int, address: str) -> None:
        self.size = size
        self.address = address  # how others open it, as long as the maker keeps the descriptor
        self.memory = mmap.mmap(fd, size)
        self._fd = fd

    @classmethod
    def create(cls, size: int) -> "Segment":
        size = max(size, mmap.PAGESIZE)
        fd = os.memfd_create("concertina", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size, f"{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, address: str) -> "Segment":
        """Maps another process's segment; OSError if that process is gone."""
        fd = os.open(f"/proc/{address}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(fd, os.fstat(fd).st_size, address)
        finally:
            os.close(fd)
        segment._fd = -1
        return segment

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

    def hide(self) -> None:
        """All who need it have mapped it: nobody can open it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
