"""Summing the virtual workers' gradients in DDP's own order, whatever the number of workers.

A reducer is made for one bucket layout and one placement. Per step it hands out the memory for every virtual
worker's (already scaled) bucket, is told when a bucket is complete, and at the end folds. What it has folded counts
when all workers have; then each takes the sums, which are the same everywhere:

* `LocalFold`         one worker: folds while the virtual workers run, with (P+1)/2 gradients of memory
* `NativeAllReduce`   as many workers as virtual workers: gloo's own all-reduce, as DDP calls it

Anything between is in `virtual_ring.py`. `shared_fold.py` has one for workers that share a machine's memory, and
`gloo_contexts.py` one that emulates nothing: it opens P gloo contexts in W processes.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from concertina.runtime.buckets import BucketLayout, pinned_flat
from concertina.runtime.group import Group
from concertina.runtime.ring_order import chunk_elements
from concertina.runtime.sums import Shared, SharedSums, flats_apart

CACHE_BYTES = 1 << 17  # unit in which running sums are added up


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
