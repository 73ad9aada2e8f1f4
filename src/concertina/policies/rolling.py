"""What `milp` and `greedy` share: moments at which jobs are resized, and the queue between two of them.

Hu et al., sections 3 and 5.1: every few minutes the allocator looks at all jobs; in between, a job that waits
gets as many nodes as are idle, in order of submission. Sizes are powers of two. Where they say node, a
device is meant here. The moment of the last resizing is kept in the jobs' `stamp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from concertina.policies.table import Floats, Ints, Table

Ladder = tuple[tuple[int, ...], tuple[float, ...]]
"""Sizes a job can have on a device type, rising, and its speed on each."""

_MOST_SIZES = 11
"""The largest are kept: more would be too many courses to look at (1,024 devices and less need no more)."""


def is_moment(table: Table, period_s: float) -> bool:
    """Whether the clock has passed a multiple of the period since jobs were last resized."""
    last = float(table.stamp.max(initial=0.0))
    return math.floor(table.now / period_s) > math.floor(last / period_s)


def next_moment(table: Table, period_s: float, workers: Ints) -> float | None:
    """When to look again; None where nobody runs, since nothing changes then before something happens."""
    return (math.floor(table.now / period_s) + 1) * period_s if workers.any() else None


def stamped(table: Table, moment: bool) -> Floats | None:
    """The notes after this round."""
    return np.full(len(table), table.now) if moment else None


def ladder(table: Table, row: int, kind: int, most: int) -> Ladder:
    """Powers of two up to `most` (or to what the job asked for), within what it allows; else the one size it
    has."""
    spec, curve, name = table.specs[row], table.curves[row], table.types[kind]
    low, high = spec.min_workers or 1, min(spec.max_workers or math.inf, table.capacity[kind])
    top = min(high, max(most, spec.gpus))
    doubled = [2**power for power in range(math.ceil(math.log2(low)), 63) if 2**power <= top]
    sizes = [size for size in doubled if curve.speed(name, size) > 0]
    if not sizes:
        sizes = [size for size in curve.counts(name) if low <= size <= high][:1]
    sizes = sizes[-_MOST_SIZES:]
    return tuple(sizes), tuple(curve.speed(name, size) for size in sizes)


class Sizing:
    """Devices of each job, as they are to be, and what is free by type."""

    def __init__(self, table: Table, most: int) -> None:
        self.table = table
        self.workers: Ints = table.held.copy()
        self.kind: Ints = table.kind.copy()
        self.free = table.free()
        self._most = most
        self._ladders: dict[tuple[int, int], Ladder] = {}

    def ladder(self, row: int, kind: int) -> Ladder:
        """The sizes and speeds of a job on a type, looked up once."""
        key = (row, kind)
        if key not in self._ladders:
            self._ladders[key] = ladder(self.table, row, kind, self._most)
        return self._ladders[key]

    def resize(self, row: int, kind: int, to: int) -> None:
        """Give a job this many devices of this type, whatever it has."""
        if self.workers[row]:
            self.free[int(self.kind[row])] += int(self.workers[row])
        self.free[kind] -= to
        self.workers[row], self.kind[row] = to, kind if to else -1

    def largest(self, row: int, kind: int, room: int) -> int:
        """The largest size that `room` devices allow; 0: none."""
        return max((size for size in self.ladder(row, kind)[0] if size <= room), default=0)

    def waiting(self) -> list[int]:
        """Jobs without devices, in order of submission."""
        return np.flatnonzero(self.workers == 0).tolist()

    def types_of(self, row: int) -> list[int]:
        """Device types on which a job can run."""
        allowed = int(self.table.allowed[row])
        return [k for k in range(len(self.table.types)) if allowed >> k & 1 and self.ladder(row, k)[0]]

    def start_waiting(self) -> None:
        """Let the head of the queue have as many devices as are idle, then the next."""
        for row in self.waiting():
            if max(self.free) <= 0:
                return
            found = [(self.largest(row, kind, self.free[kind]), -kind) for kind in self.types_of(row)]
            size, kind = max(found, default=(0, 0))
            if size:
                self.resize(row, -kind, size)

    def repair(self) -> None:
        """Take devices from the last submitted where nodes were lost. (Those that held them wait already.)"""
        for kind, free in enumerate(self.free):
            for row in reversed(np.flatnonzero(self.kind == kind).tolist()):
                if free >= 0:
                    break
                free += int(self.workers[row])
                self.resize(row, kind, 0)


def deal_types(sizing: Sizing, capacity: Sequence[int]) -> list[list[int]]:
    """The jobs of each type: those that run stay, others go where most devices are left for each job."""
    dealt: list[list[int]] = [[] for _ in capacity]
    for row in np.flatnonzero(sizing.workers > 0).tolist():
        dealt[int(sizing.kind[row])].append(row)
    for row in sizing.waiting():
        kinds = sizing.types_of(row)
        if kinds:
            dealt[max(kinds, key=lambda kind: (capacity[kind] / (1 + len(dealt[kind])), -kind))].append(row)
    return [sorted(rows) for rows in dealt]
