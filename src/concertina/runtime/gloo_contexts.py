"""The reduction without any emulation: one gloo context per virtual worker, all P of them in W processes.

Whatever order gloo adds in, this follows it, because it is gloo that adds. It costs several times the virtual ring,
so it serves as the oracle of the tests, one of which asks whether the installed gloo adds in the order of
`ring_order.py`. It cannot give up waiting, so a job that uses it does not survive the loss of a worker.
"""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.fabric import Fabric
from concertina.runtime.group import TIMEOUT
from concertina.runtime.ring_order import ring_chunks
from concertina.runtime.torch_internals import file_store, gloo_group

PROBE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PROBE_ELEMENTS = 4099  # prime, so that the last chunk is short
PROBE_SEED = 20


class GlooContexts:
    """P ranks of one gloo group, of which this process plays those in `mine`."""

    def __init__(self, rendezvous: Path, virtual: int, mine: tuple[int, ...], timeout: timedelta = TIMEOUT) -> None:
        self.virtual = virtual
        self.contexts: dict[int, Any] = {}
        failures: list[Exception] = []

        def connect(v: int) -> None:
            # Contexts of one process wait for each other, so each connects in its own thread with its own store.
            try:
                self.contexts[v] = gloo_group(file_store(rendezvous, virtual, timeout), v, virtual, timeout, 1)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=connect, args=(v,)) for v in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def sum(self, terms: dict[int, Tensor]) -> Tensor:
        """All-reduces in place; every term ends as the sum, one of them is returned."""
        works = [self.contexts[v].allreduce([term]) for v, term in terms.items()]
        for work in works:
            work.wait()
        return next(iter(terms.values()))


def follows_ring_order(contexts: GlooContexts) -> bool:
    """Whether this build of gloo adds in the order of `ring_order.py`, tried on one random vector per dtype."""
    for dtype in PROBE_DTYPES:
        generator = torch.Generator().manual_seed(PROBE_SEED)
        drawn = torch.randn(contexts.virtual, PROBE_ELEMENTS, generator=generator, dtype=torch.float64)
        terms = [row.to(dtype) for row in drawn]
        got = contexts.sum({v: terms[v].clone() for v in contexts.contexts})
        if not torch.equal(got, ring_sum(terms)):
            return False
    return True


def ring_sum(terms: list[Tensor]) -> Tensor:
    """The slow, obvious sum in ring order."""
    total = torch.empty_like(terms[0])
    for chunk in ring_chunks(total.numel(), len(terms), total.element_size()):
        part = terms[chunk.order[0]][chunk.lo : chunk.hi].clone()
        for v in chunk.order[1:]:
            part = part + terms[v][chunk.lo : chunk.hi]
        total[chunk.lo : chunk.hi] = part
    return total


class ContextsReducer:
    """Reducer over `GlooContexts`."""

    name = "gloo contexts"
    overwrites_early = True

    def __init__(
        self, layout: BucketLayout, placement: VirtualPlacement, contexts: GlooContexts, fabric: Fabric
    ) -> None:
        self.order = tuple(sorted(placement.workers[fabric.rank], reverse=True))
        self._contexts = contexts
        self._sums: list[Tensor] = []
        self._terms = {v: [layout.new_flat(b) for b in range(len(layout.buckets))] for v in self.order}
        self._buckets = range(len(layout.buckets))

    def buffer(self, virtual_worker: int, bucket: int) -> Tensor:
        return self._terms[virtual_worker][bucket]

    def ready(self, virtual_worker: int, bucket: int) -> None:
        """Nothing to start: contexts of one process must be served together."""

    def fold(self) -> None:
        self._sums = [self._contexts.sum({v: self._terms[v][b] for v in self.order}) for b in self._buckets]

    def results(self) -> list[Tensor]:
        return self._sums

    def warm(self) -> None:
        for flat in (flat for terms in self._terms.values() for flat in terms):
            flat.zero_()

    def close(self) -> None:
        self._contexts.contexts.clear()
