"""Who gets the devices that become free between two rounds of a policy that is too dear to be asked each time.

The last round shows whom the policy prefers: of a few simple orders, the one in which those it gave devices
to come first is taken to be its own until the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from concertina.policies.round import Change
from concertina.policies.table import Bools, Floats, Ints, Table


class StandIn:
    """An order among those who wait, and a size for those who may have any."""

    def __init__(self, *, gang: bool) -> None:
        self.gang = gang
        self.queue: list[int] = []
        """Keys of the waiting jobs, the next one last."""
        self.size = 1
        """What the policy gave a job on average, as a power of two."""

    def learn(self, table: Table) -> None:
        """Look at what the policy has just decided."""
        runs = table.held > 0
        waits: Ints = np.flatnonzero(~runs)
        if runs.any():
            mean = float(table.held[runs].mean())
            self.size = 1 << max(int(np.log2(mean)), 0)
        order = min(_orders(table), key=lambda values: _mean_rank(values, runs))
        self.queue = [table.keys[row] for row in waits[np.argsort(order[waits], kind="stable")][::-1].tolist()]

    def starts(self, table: Table, row_of: Callable[[int], int]) -> Iterator[Change]:
        """Jobs that start on what is free now. Each has to be carried out before the next is asked for."""
        while self.queue:
            free = table.free()
            kind = max(range(len(free)), key=lambda k: (free[k], -k))
            row = row_of(self.queue[-1])
            if row >= len(table) or table.keys[row] != self.queue[-1] or table.held[row]:
                self.queue.pop()
                continue
            count = self._count(table, row, kind, free[kind])
            if not count:
                return
            self.queue.pop()
            yield Change(row, 0, count, ((kind, count),))

    def _count(self, table: Table, row: int, kind: int, free: int) -> int:
        """Devices for the head of the queue; 0: it has to wait, and so have those behind it."""
        spec = table.specs[row]
        if not int(table.allowed[row]) >> kind & 1:
            return 0
        if self.gang:
            count = spec.gpus
        else:
            low, high = spec.min_workers or 1, spec.max_workers or free
            count = max(min(self.size, high, 1 << (free.bit_length() - 1) if free > 0 else 0), low)
        fits = 0 < count <= free and table.curves[row].speed(table.types[kind], count) > 0
        return count if fits else 0


def _orders(table: Table) -> tuple[Floats, ...]:
    """By submission, by time left, by deadline, by service."""
    return table.submit, table.time_left(), table.deadline, table.service()


def _mean_rank(values: Floats, chosen: Bools) -> float:
    """How far in front those that were chosen are in this order."""
    rank = np.empty(len(values))
    rank[np.argsort(values, kind="stable")] = np.arange(len(values))
    return float(rank[chosen].mean()) if chosen.any() else 0.0
