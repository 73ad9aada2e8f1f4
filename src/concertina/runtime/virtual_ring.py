"""Summing along DDP's logical ring, with fewer workers than ranks: a hop inside a process is an addition in memory."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.group import Group
from concertina.runtime.reduce import add_up
from concertina.runtime.ring_order import Chunk, ring_chunks
from concertina.runtime.sums import flats_apart

PIECE_BYTES = 1 << 22  # unit in which running sums travel: large enough to be cheap, small enough to overlap


@dataclass(frozen=True, slots=True)
class Visit:
    """A running sum's stay at one worker: the terms it collects there, where it comes from and goes to."""

    step: int  # 0 for the first worker on the way
    terms: tuple[int, ...]
    source: int | None
    target: int | None  # None: the sum is complete


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bucket that travels as one message."""

    tag: int
    lo: int
    hi: int
    visits: tuple[Visit, ...]  # at this worker, in order
    owner: int  # where the sum is complete


TAGS_PER_PIECE = 256  # visits of one piece (at most P + 1, so P <= 254), and one for handing round the result
ALL_GATHER_TAG = TAGS_PER_PIECE - 1


def plan_pieces(chunks: tuple[Chunk, ...], placement: VirtualPlacement, worker: int, piece: int) -> list[Piece]:
    """Cuts the chunks into pieces of at most `piece` elements, with the stays each has at `worker`."""
    host = {v: w for w, block in enumerate(placement.workers) for v in block}
    pieces: list[Piece] = []
    for chunk in chunks:
        stays: list[tuple[int, list[int]]] = []
        for v in chunk.order:
            if stays and stays[-1][0] == host[v]:
                stays[-1][1].append(v)
            else:
                stays.append((host[v], [v]))
        visits = tuple(
            Visit(
                s,
                tuple(terms),
                stays[s - 1][0] if s else None,
                stays[s + 1][0] if s + 1 < len(stays) else None,
            )
            for s, (where, terms) in enumerate(stays)
            if where == worker
        )
        for lo in range(chunk.lo, chunk.hi, piece):
            hi = min(lo + piece, chunk.hi)
            pieces.append(Piece(len(pieces), lo, hi, visits, stays[-1][0]))
    return pieces


class VirtualRing:
    """DDP's ring of P ranks walked by W processes.

    A chunk's running sum visits the workers of virtual workers c-1, c-2, ..., c; consecutive virtual workers of one
    worker are folded in one visit. Complete sums are then handed round a ring of workers. A worker never sends more
    than it would under DDP with P processes.

    Sums travel in the result's own memory: what arrives for a stretch can only arrive after everything sent from it
    has been received, so no second buffer is needed.
    """

    name = "virtual ring"

    def __init__(
        self, layout: BucketLayout, placement: VirtualPlacement, group: Group, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._group = group
        self._layout = layout
        self._apart: list[Tensor] | None = None  # while somebody follows: sums that outlast the step
        self._left = (group.rank - 1) % group.size
        self._right = (group.rank + 1) % group.size
        self.order = tuple(sorted(placement.workers[group.rank], reverse=True))
        buckets = range(len(layout.buckets))
        self._on_gpu = [layout.params[layout.buckets[b][0]].is_cuda for b in buckets]
        self._terms = {v: [layout.new_flat(b, self._on_gpu[b]) for b in buckets] for v in self.order}
        self._sums = [layout.new_flat(b, self._on_gpu[b]) for b in buckets]
        self._device_flats = [layout.new_flat(b) if self._on_gpu[b] else None for b in buckets]
        self._plans = [self._plan(flat, placement, piece_bytes) for flat in self._sums]
        self._first_tag = [0]
        for plan in self._plans:
            self._first_tag.append(self._first_tag[-1] + len(plan))
        self._sends: list[Any] = []
        self._arrivals: dict[int, Any] = {}
        self._copied: dict[int, Any] = {}
        self.bytes_sent = 0

    def _plan(self, flat: Tensor, placement: VirtualPlacement, piece_bytes: int) -> list[Piece]:
        chunks = ring_chunks(flat.numel(), placement.virtual, flat.element_size())
        return plan_pieces(chunks, placement, self._group.rank, max(1, piece_bytes // flat.element_size()))

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        device_flat = self._device_flats[bucket]
        return self._terms[virtual_worker][bucket] if device_flat is None else device_flat

    def ready(self, virtual_worker: int, bucket: int) -> None:
        device_flat = self._device_flats[bucket]
        if device_flat is not None:
            self._terms[virtual_worker][bucket].copy_(device_flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copied[bucket] = event
        if virtual_worker == self.order[-1]:
            self._group.try_to(lambda: self._open(bucket))

    def _open(self, bucket: int) -> None:
        """All local terms are there: expect what will come, and send off the sums that start here."""
        if bucket in self._copied:
            self._copied.pop(bucket).synchronize()
        total = self._sums[bucket]
        for piece in self._plans[bucket]:
            for visit in piece.visits:
                if visit.source is not None:
                    self._expect(bucket, piece, visit.step, visit.source, total)
            if piece.owner != self._group.rank:
                self._expect(bucket, piece, ALL_GATHER_TAG, self._left, total)
        for piece in self._plans[bucket]:
            if piece.visits and piece.visits[0].step == 0:
                self._add_terms_and_send(bucket, piece, piece.visits[0], total)

    def _tag(self, bucket: int, piece: Piece, step: int) -> int:
        return (self._first_tag[bucket] + piece.tag) * TAGS_PER_PIECE + step

    def _expect(self, bucket: int, piece: Piece, step: int, source: int, total: Tensor) -> None:
        tag = self._tag(bucket, piece, step)
        self._arrivals[tag] = self._group.pg.recv([total[piece.lo : piece.hi]], source, tag)

    def _send(self, bucket: int, piece: Piece, step: int, target: int, data: Tensor) -> None:
        self._sends.append(self._group.pg.send([data], target, self._tag(bucket, piece, step)))
        self.bytes_sent += data.numel() * data.element_size()

    def _add_terms_and_send(self, bucket: int, piece: Piece, visit: Visit, total: Tensor) -> None:
        lo, hi = piece.lo, piece.hi
        terms = [self._terms[v][bucket][lo:hi] for v in visit.terms]
        running = total[lo:hi]
        if visit.step > 0:
            add_up(running, terms)
        elif len(terms) == 1 and visit.target is not None:
            running = terms[0]
        else:
            add_up(running, terms[1:], first=terms[0])
        if visit.target is not None:
            self._send(bucket, piece, visit.step + 1, visit.target, running)
        else:
            self._send(bucket, piece, ALL_GATHER_TAG, self._right, running)

    def fold(self) -> None:
        try:
            with self._group.watched():
                self._fold()
        except BaseException:
            self._sends.clear()
            self._arrivals.clear()
            raise

    def _fold(self) -> None:
        deepest = max((v.step for plan in self._plans for p in plan for v in p.visits), default=0)
        for step in range(1, deepest + 1):
            for bucket, plan in enumerate(self._plans):
                for piece in plan:
                    for visit in piece.visits:
                        if visit.step == step:
                            self._arrivals.pop(self._tag(bucket, piece, step)).wait()
                            self._add_terms_and_send(bucket, piece, visit, self._sums[bucket])
        self._pass_on_results()
        for work in self._sends:
            work.wait()
        self._sends.clear()

    @property
    def overwrites_early(self) -> bool:
        return self._apart is None

    def share_sums(self) -> None:
        if all(self._on_gpu):
            self._apart = self._apart or flats_apart(self._layout)

    def stop_sharing(self) -> None:
        self._apart = None

    def results(self) -> list[Tensor]:
        return [self._result(b) for b in range(len(self._sums))]

    def warm(self) -> None:
        for flat in (*self._sums, *(flat for terms in self._terms.values() for flat in terms)):
            flat.zero_()

    def close(self) -> None:
        self._group.close()

    def _pass_on_results(self) -> None:
        """Complete sums go round the ring of workers, in the order of distance from their owners."""
        size, rank = self._group.size, self._group.rank
        for distance in range(1, size):
            owner = (rank - distance) % size
            for bucket, plan in enumerate(self._plans):
                for piece in plan:
                    if piece.owner == owner:
                        self._arrivals.pop(self._tag(bucket, piece, ALL_GATHER_TAG)).wait()
                        if self._right != owner:
                            part = self._sums[bucket][piece.lo : piece.hi]
                            self._send(bucket, piece, ALL_GATHER_TAG, self._right, part)

    def _result(self, bucket: int) -> Tensor:
        device_flat = self._device_flats[bucket] if self._apart is None else self._apart[bucket]
        if device_flat is None:
            return self._sums[bucket]
        return device_flat.copy_(self._sums[bucket], non_blocking=True)
