"""Summing through memory that the workers of one machine share: nothing travels, everybody adds a part.

Each worker lays its virtual workers' terms into memory that the others can read. When all terms are there, each of the
W workers adds up a W-th part of every bucket, each chunk in ring order, and takes the other parts from their makers.
Against the virtual ring this saves the way through sockets; the bits are the same, since the order of additions is.

The memory has no name in any file system (memfd), so nothing can be left behind, however the workers end.
"""

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.group import Group
from concertina.runtime.reduce import add_up
from concertina.runtime.ring_order import Chunk, ring_chunks

ALIGNMENT = 64  # bytes; every bucket starts on a cache line


class SharedMemory:
    """Memory of this worker that the others of its group have mapped too."""

    def __init__(self, size: int, group: Group) -> None:
        own = os.memfd_create("concertina")
        try:
            os.ftruncate(own, max(size, 1))
            address = f"{os.getpid()}/fd/{own}".encode()
            self.maps = [_map_of(who) for who in group.gather_bytes(address)]
            group.barrier()  # everybody has mapped; the descriptor may go
        finally:
            os.close(own)


def _map_of(address: bytes) -> mmap.mmap:
    fd = os.open(b"/proc/" + address, os.O_RDWR)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


class SharedFold:
    """Reducer for several workers on one machine, with parameters in host memory."""

    name = "shared-memory fold"

    def __init__(self, layout: BucketLayout, placement: VirtualPlacement, group: Group) -> None:
        self._group = group
        self.order = tuple(sorted(placement.workers[group.rank], reverse=True))
        self._sums = [layout.new_flat(b) for b in range(len(layout.buckets))]
        sizes = [_aligned(flat.numel() * flat.element_size()) for flat in self._sums]
        # A worker's memory: its parts of the sums first, then the terms of its virtual workers.
        room = sum(sizes) * (1 + len(self.order))
        memory = SharedMemory(room, group)
        self._parts = [_carve(shared, self._sums, sizes, 0) for shared in memory.maps]
        self._terms: dict[int, list[Tensor]] = {}
        for w, shared in enumerate(memory.maps):
            for k, v in enumerate(sorted(placement.workers[w], reverse=True)):
                self._terms[v] = _carve(shared, self._sums, sizes, (1 + k) * sum(sizes))
        self._plans = [self._plan(b, placement.virtual) for b in range(len(self._sums))]

    def _plan(self, bucket: int, virtual: int) -> list[Chunk]:
        """The chunks of a bucket, cut down to the stretch that this worker adds up."""
        flat = self._sums[bucket]
        lo, hi = self._stretch(bucket, self._group.rank)
        chunks = ring_chunks(flat.numel(), virtual, flat.element_size())
        cut = [Chunk(c.index, max(c.lo, lo), min(c.hi, hi), c.order) for c in chunks]
        return [c for c in cut if c.hi > c.lo]

    def _stretch(self, bucket: int, worker: int) -> tuple[int, int]:
        n = self._sums[bucket].numel()
        return n * worker // self._group.size, n * (worker + 1) // self._group.size

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        return self._terms[virtual_worker][bucket]

    def ready(self, virtual_worker: int, bucket: int) -> None:
        """Nothing to send: the term already lies where the others can read it."""

    def finish(self) -> list[Tensor]:
        self._group.barrier()  # all terms of all workers are there
        for bucket, chunks in enumerate(self._plans):
            for chunk in chunks:
                stretch = slice(chunk.lo, chunk.hi)
                first, *rest = [self._terms[v][bucket][stretch] for v in chunk.order]
                add_up(self._parts[self._group.rank][bucket][stretch], rest, first)
        self._group.barrier()  # all parts are there; from here on, terms may be overwritten
        for bucket, total in enumerate(self._sums):
            for worker in range(self._group.size):
                stretch = slice(*self._stretch(bucket, worker))
                total[stretch].copy_(self._parts[worker][bucket][stretch])
        return self._sums


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _carve(shared: Any, like: list[Tensor], sizes: list[int], offset: int) -> list[Tensor]:
    """One tensor per bucket out of mapped memory."""
    out = []
    for flat, size in zip(like, sizes, strict=True):
        out.append(torch.frombuffer(shared, dtype=flat.dtype, count=flat.numel(), offset=offset))
        offset += size
    return out
