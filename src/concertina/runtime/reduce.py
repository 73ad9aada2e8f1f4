"""Summing the virtual workers' gradients in DDP's own order, whatever the number of workers.

A reducer is made for one bucket layout and one placement. Per step it hands out the memory for every virtual
worker's (already scaled) bucket, is told when a bucket is complete, and at the end folds. What it has folded counts
when all workers have; then each takes the sums, which are the same everywhere:

* `LocalFold`         one worker: folds while the virtual workers run, with (P+1)/2 gradients of memory
* `NativeAllReduce`   as many workers as virtual workers: gloo's own all-reduce, as DDP calls it
* `VirtualRing`       anything between: DDP's logical ring, in which a hop inside a process is an addition in memory

`shared_fold.py` has one for workers that share a machine's memory, and `gloo_contexts.py` one that emulates nothing: it
opens P gloo contexts in W processes.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout, pinned_flat
from concertina.runtime.group import Group
from concertina.runtime.ring_order import Chunk, chunk_elements, ring_chunks
from concertina.runtime.sums import Shared, SharedSums, flats_apart

PIECE_BYTES = 1 << 22  # unit in which running sums travel: large enough to be cheap, small enough to overlap
CACHE_BYTES = 1 << 17  # unit in which they are added up


class Reducer(Protocol):
    """What the engine needs of a reduction."""

    name: str
    order: tuple[int, ...]  # local virtual workers in the order in which they should run

    @property
    def overwrites_early(self) -> bool:
        """Whether the sums of one step are lost as soon as the next one's gradients come."""
        ...

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        """Memory for the scaled gradients of `bucket`; valid until `ready` is called for it."""

    def ready(self, virtual_worker: int, bucket: int) -> None:
        """The buffer is filled."""

    def fold(self) -> None:
        """Adds up; raises PeersLost if that cannot be done. When all workers have passed it, all can have the sums."""

    def results(self) -> list[Tensor]:
        """The sum of each bucket, valid until the next step's first `ready`."""

    def warm(self) -> None:
        """Touches all memory, so that the first step does not wait for it."""

    def close(self) -> None:
        """Ends connections; the memory goes with the object."""


class LocalFold:
    """All virtual workers in one process, summed as they come.

    They run in the order P-1, ..., 0. Seen from virtual worker v, the chunks of a bucket fall into contiguous ranges:
    chunk v+1 starts with v's term; chunks after it, and chunk 0, have begun and take v's term now; chunks 1..v must
    wait until 0 has been added, so v's part of them is put aside. That keeps (P-1)/2 gradients instead of P.
    """

    name = "streaming fold"

    def __init__(self, layout: BucketLayout, virtual: int) -> None:
        self._virtual = virtual
        self._layout = layout
        self.order = tuple(reversed(range(virtual)))
        sums = [layout.new_flat(b) for b in range(len(layout.buckets))]
        self._terms = sums if virtual == 1 else [torch.empty_like(flat) for flat in sums]
        self._asides: dict[tuple[int, int], Tensor] = {}  # by bucket and virtual worker
        self._now = self._plan_all(sums)
        self._spare: list[_FoldPlan] = []  # other places for the sums
        self._sets: list[SharedSums] = []

    @property
    def overwrites_early(self) -> bool:
        """The sums of a step are gone when the next one begins to add, unless there are two places for them."""
        return not self._spare

    def share_sums(self) -> None:
        """Two places for the sums, used in turn: what one step summed stays whole, and where newcomers can read it,
        during the next."""
        if self._spare or self._virtual == 1:
            return
        if any(param.is_cuda for param in self._layout.params):
            places = [flats_apart(self._layout) for _ in range(2)]
            self._spare = [self._plan_all(flats, shared=True) for flats in places if flats is not None]
            return
        sets = [SharedSums(self._layout) for _ in range(2)]
        self._sets, self._spare = sets, [self._plan_all(made.flats, shared=True) for made in sets]

    def stop_sharing(self) -> None:
        self._sets, self._spare = [], []

    @property
    def shared(self) -> list[Shared]:
        return [made.where for made in self._sets]

    def _plan_all(self, sums: list[Tensor], shared: bool = False) -> "_FoldPlan":
        moves = [self._plan(b, sums[b]) for b in range(len(sums))]
        everybody = range(self._virtual)
        copies = [[bucket[v][0] for bucket in moves] for v in everybody]
        adds = [[bucket[v][1] for bucket in moves] for v in everybody]
        return _FoldPlan(
            sums=sums,
            copies=copies,
            adds=adds,
            late_adds=[[pair for bucket in moves for pair in bucket[v][2]] for v in everybody],
            all_copies=[Moves(pair for bucket in copies[v] for pair in bucket) for v in everybody],
            all_adds=[Moves(pair for bucket in adds[v] for pair in bucket) for v in everybody],
            shared=shared,
        )

    def _plan(self, bucket: int, total: Tensor) -> list[tuple["Moves", "Moves", "Moves"]]:
        """By virtual worker: what to copy when its term is complete, what to add then, and what to add at the end."""
        term, last = self._terms[bucket], self._virtual - 1
        edges = _chunk_edges(total, self._virtual)
        plans: list[tuple[Moves, Moves, Moves]] = []
        for v in range(self._virtual):
            copies, adds, late_adds = Moves(), Moves(), Moves()
            if v > 0 and edges[v + 1] > edges[1]:
                waiting = slice(edges[1], edges[v + 1])
                aside = self._asides.setdefault((bucket, v), torch.empty_like(total[waiting]))
                copies.append((aside, term[waiting]))
                late_adds.append((total[waiting], aside))
            begun = slice(0, edges[1])
            if v == last:
                copies.append((total[begun], term[begun]))
            else:
                starting, going = slice(edges[v + 1], edges[v + 2]), slice(edges[v + 2], edges[-1])
                copies.append((total[starting], term[starting]))
                adds.append((total[going], term[going]))
                adds.append((total[begun], term[begun]))
            plans.append((copies, adds, late_adds))
        return plans

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        return self._terms[bucket]

    def ready(self, virtual_worker: int, bucket: int) -> None:
        if self._virtual > 1:
            _carry_out(self._now.copies[virtual_worker][bucket], self._now.adds[virtual_worker][bucket])

    def all_ready(self, virtual_worker: int) -> None:
        """Like `ready` for every bucket, in a handful of calls."""
        if self._virtual > 1:
            _carry_out(self._now.all_copies[virtual_worker], self._now.all_adds[virtual_worker])

    def scale(self, factor: float) -> None:
        """Multiplies the terms of all buckets, one by one: `_foreach_mul_` rounds the factor to bfloat16 first."""
        for term in self._terms:
            term.mul_(factor)

    def fold(self) -> None:
        for v in range(self._virtual - 1, 0, -1):
            _carry_out(Moves(), self._now.late_adds[v])

    def results(self) -> list[Tensor]:
        done = self._now
        if self._spare:
            self._now = self._spare.pop(0)
            if done.shared:
                self._spare.append(done)
        return done.sums

    def warm(self) -> None:
        for flat in (*self._now.sums, *self._terms, *self._asides.values()):
            flat.zero_()

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class _FoldPlan:
    """What to move and add for one place of the sums; lists by virtual worker, inner ones by bucket."""

    sums: list[Tensor]
    copies: list[list["Moves"]]
    adds: list[list["Moves"]]
    late_adds: list[list[tuple[Tensor, Tensor]]]
    all_copies: list["Moves"]
    all_adds: list["Moves"]
    shared: bool


class Moves(list[tuple[Tensor, Tensor]]):
    """Pairs of (where to, where from)."""


def _carry_out(copies: list[tuple[Tensor, Tensor]], adds: list[tuple[Tensor, Tensor]]) -> None:
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
    if adds:
        torch._foreach_add_([to for to, _ in adds], [source for _, source in adds])


class NativeAllReduce:
    """One virtual worker per worker: exactly the call that DDP makes, started as soon as a bucket is complete."""

    name = "native all-reduce"

    def __init__(self, layout: BucketLayout, group: Group) -> None:
        self.order: tuple[int, ...] = (group.rank,)
        self._group = group
        self._layout = layout
        self._apart: list[Tensor] | None = None  # while somebody follows: sums that outlast the step
        self._flats = [layout.new_flat(b) for b in range(len(layout.buckets))]
        self._works: list[Any] = []

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        return self._flats[bucket]

    def ready(self, virtual_worker: int, bucket: int) -> None:
        self._group.try_to(lambda: self._works.append(self._group.sum_async(self._flats[bucket])))

    def fold(self) -> None:
        works, self._works = self._works, []
        with self._group.watched():
            for work in works:
                work.wait()

    @property
    def overwrites_early(self) -> bool:
        return self._apart is None

    def share_sums(self) -> None:
        if any(param.is_cuda for param in self._layout.params):
            self._apart = self._apart or flats_apart(self._layout)

    def stop_sharing(self) -> None:
        self._apart = None

    def results(self) -> list[Tensor]:
        if self._apart is None:
            return self._flats
        return [apart.copy_(flat) for apart, flat in zip(self._apart, self._flats, strict=True)]

    def warm(self) -> None:
        for flat in self._flats:
            flat.zero_()
        # From a GPU, gloo goes through pinned memory of torch's pool, which is slow to get for the first time.
        staged = [pinned_flat(flat.numel(), flat.dtype) for flat in self._flats if flat.is_cuda]
        staged.clear()

    def close(self) -> None:
        self._group.close()


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


def add_up(running: Tensor, terms: list[Tensor], first: Tensor | None = None) -> None:
    """running = ((first or running) + terms[0]) + terms[1] ..., in blocks whose running sum stays in the cache."""
    block = CACHE_BYTES // running.element_size()
    for lo in range(0, running.numel(), block):
        total = running[lo : lo + block]
        rest = terms
        if first is not None:
            if terms:
                torch.add(first[lo : lo + block], terms[0][lo : lo + block], out=total)
            else:
                total.copy_(first[lo : lo + block])
            rest = terms[1:]
        for term in rest:
            total.add_(term[lo : lo + block])


def _chunk_edges(flat: Tensor, virtual: int) -> list[int]:
    """Element offsets of the P chunks of a bucket: chunk c is [edges[c], edges[c+1])."""
    size = chunk_elements(flat.numel(), virtual, flat.element_size())
    return [min(c * size, flat.numel()) for c in range(virtual + 1)]
