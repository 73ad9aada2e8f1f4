"""Summing through memory that the workers of one machine share: nothing travels, everybody adds a part.

Each worker lays its virtual workers' terms into memory that the others can read. When all terms are there, each of the
W workers adds up a W-th part of every bucket, each chunk in ring order, and takes the other parts from their makers.
Against the virtual ring this saves the way through sockets; the bits are the same, since the order of additions is.

Terms and parts lie in memory that outlives its maker, so a worker that dies after folding has done its part.
"""

from torch import Tensor

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.fabric import Fabric, PeersLost
from concertina.runtime.reduce import add_up
from concertina.runtime.ring_order import Chunk, ring_chunks
from concertina.runtime.segments import Segment
from concertina.runtime.sums import Shared, SharedSums, aligned, carve


class SharedFold:
    """Reducer for several workers on one machine, with parameters in host memory."""

    name = "shared-memory fold"
    overwrites_early = False

    def __init__(self, layout: BucketLayout, placement: VirtualPlacement, fabric: Fabric) -> None:
        self._fabric = fabric
        self._layout = layout
        self._shared: SharedSums | None = None  # while somebody follows
        self.order = tuple(sorted(placement.workers[fabric.rank], reverse=True))
        self._sums = [layout.new_flat(b) for b in range(len(layout.buckets))]
        sizes = [aligned(flat.numel() * flat.element_size()) for flat in self._sums]
        # A worker's memory: its parts of the sums first, then the terms of its virtual workers.
        room = sum(sizes) * (1 + len(self.order))
        own = Segment.create(room)
        self._own = own
        self._segments = self._map_all(own)
        maps = [segment.memory for segment in self._segments]
        self._parts = [carve(shared, self._sums, sizes, 0) for shared in maps]
        self._terms: dict[int, list[Tensor]] = {}
        for w, shared in enumerate(maps):
            for k, v in enumerate(sorted(placement.workers[w], reverse=True)):
                self._terms[v] = carve(shared, self._sums, sizes, (1 + k) * sum(sizes))
        self._plans = [self._plan(b, placement.virtual) for b in range(len(self._sums))]

    def _map_all(self, own: Segment) -> list[Segment]:
        addresses = self._fabric.gather_bytes(own.address.encode())
        segments = []
        for rank, address in enumerate(addresses):
            try:
                segments.append(own if rank == self._fabric.rank else Segment.open(address.decode()))
            except OSError:
                raise PeersLost([self._fabric.members[rank]]) from None
        self._fabric.meet()  # everybody has mapped; the descriptor may go
        own.hide()
        return segments

    def _plan(self, bucket: int, virtual: int) -> list[Chunk]:
        """The chunks of a bucket, cut down to the stretch that this worker adds up."""
        flat = self._sums[bucket]
        lo, hi = self._stretch(bucket, self._fabric.rank)
        chunks = ring_chunks(flat.numel(), virtual, flat.element_size())
        cut = [Chunk(c.index, max(c.lo, lo), min(c.hi, hi), c.order) for c in chunks]
        return [c for c in cut if c.hi > c.lo]

    def _stretch(self, bucket: int, worker: int) -> tuple[int, int]:
        n = self._sums[bucket].numel()
        return n * worker // self._fabric.size, n * (worker + 1) // self._fabric.size

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        return self._terms[virtual_worker][bucket]

    def ready(self, virtual_worker: int, bucket: int) -> None:
        """Nothing to send: the term already lies where the others can read it."""

    def fold(self) -> None:
        self._fabric.meet()  # all terms of all workers are there
        for bucket, chunks in enumerate(self._plans):
            for chunk in chunks:
                stretch = slice(chunk.lo, chunk.hi)
                first, *rest = [self._terms[v][bucket][stretch] for v in chunk.order]
                add_up(self._parts[self._fabric.rank][bucket][stretch], rest, first)

    def results(self) -> list[Tensor]:
        """All parts are there, since everybody has folded; from here on, terms may be overwritten."""
        if self._shared is not None:
            self._sums = self._shared.flats
        for bucket, total in enumerate(self._sums):
            for worker in range(self._fabric.size):
                stretch = slice(*self._stretch(bucket, worker))
                total[stretch].copy_(self._parts[worker][bucket][stretch])
        return self._sums

    def share_sums(self) -> None:
        """From the next step on, the sums lie where newcomers can use them."""
        if self._shared is None:
            self._shared = SharedSums(self._layout)

    @property
    def shared(self) -> list[Shared]:
        return [] if self._shared is None else [self._shared.where]

    def warm(self) -> None:
        self._own.touch()
        for segment in self._segments:
            segment.look()
        for flat in self._sums:
            flat.zero_()

    def close(self) -> None:
        """The memory goes with the last who has mapped it."""
