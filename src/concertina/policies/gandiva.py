"""Gandiva: jobs of one size share sets of nodes and take turns on them, a minute each.

Xiao et al., "Gandiva: Introspective cluster scheduling for deep learning" (OSDI 2018), as ElasticFlow's
baseline (6) models it: gangs as asked, no deadlines, nobody waits as long as jobs of the same size have a
set. Each size gets nodes in proportion to what its jobs ask for; a set that holds more jobs than fit at
once is sliced in time.

What survives a round is in the table: `level` is the number of the job's set, `stamp` its place in the
set's queue.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.table import Table


@dataclass(slots=True, kw_only=True)
class NodeSet:
    """Nodes on which jobs of one size take turns."""

    number: int
    size: int
    """Devices of each of its jobs."""
    nodes: int
    at_once: int
    """Jobs that fit at the same time."""
    rows: list[int] = field(default_factory=list)
    """Its jobs in the order of their turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GandivaPolicy:
    """Time slicing within sets of nodes by job size."""

    name: str = "gandiva"
    paper: str = "Xiao et al. (OSDI 2018); ElasticFlow (ASPLOS 2023), 6: baseline"
    admission: str = "fits"
    slice_s: float = 60.0
    """A turn."""

    def allocate(self, table: Table) -> Shares:
        """Sets by size, turns within each set."""
        n = len(table)
        workers, level = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        kinds, stamp = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.float64)
        kind_of = self._types(table)
        sliced = False
        for kind in range(len(table.types)):
            rows = [row for row in range(n) if kind_of[row] == kind]
            board = Board(table, kind, rows)
            board.adjust()
            if self.turn_is_over(table):
                board.rotate()
            board.seat()
            for group in board.sets:
                sliced = sliced or len(group.rows) > group.at_once
                for place, row in enumerate(group.rows):
                    level[row], stamp[row] = group.number * len(table.types) + kind, place + 1
                    if place < group.at_once:
                        workers[row], kinds[row] = group.size, kind
        return Shares(workers=workers, kind=kinds, level=level, stamp=stamp, wake_s=self._next_turn(table, sliced))

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its turn, or somebody else's."""
        if after > before:
            return f"its turn on a set of nodes for jobs of {after} devices"
        return "its turn is over, or no set of nodes for its size is there yet"

    def turn_is_over(self, table: Table) -> bool:
        """Whether `now` is the end of a slice; slices are counted from time zero, so nothing is
        remembered."""
        return table.now % self.slice_s == 0.0

    def _next_turn(self, table: Table, sliced: bool) -> float | None:
        return (table.now // self.slice_s + 1) * self.slice_s if sliced else None

    @staticmethod
    def _types(table: Table) -> list[int]:
        """Each job's device type: where its set is, else the allowed one with most room per demand."""
        count = len(table.types)
        kinds = [int(level) % count if level else -1 for level in table.level]
        demand = [0] * count
        for row, kind in enumerate(kinds):
            if kind >= 0:
                demand[kind] += int(table.gpus[row])
        for row, kind in enumerate(kinds):
            if kind < 0:
                need = int(table.gpus[row])
                fits = [k for k in range(count) if table.allowed[row] >> k & 1 and table.capacity[k] >= need]
                if fits:
                    kinds[row] = min(fits, key=lambda k: (demand[k] / table.capacity[k], k))
                    demand[kinds[row]] += need
        return kinds


class Board:
    """The sets of one device type while a round works on them."""

    def __init__(self, table: Table, kind: int, rows: list[int]) -> None:
        self.table = table
        self.slots = _node_slots(table, kind)
        self.free = table.capacity[kind] // self.slots
        """Nodes in no set."""
        self.by_size: dict[int, dict[int, NodeSet]] = {}
        """Sets by the size of their jobs, then by number."""
        self.last = 0
        """The largest number of a set so far."""
        self.unseated: list[int] = []
        self._read(rows, len(table.types))

    @property
    def sets(self) -> list[NodeSet]:
        """All sets."""
        return [group for groups in self.by_size.values() for group in groups.values()]

    def _read(self, rows: list[int], types: int) -> None:
        """Find the sets again in the notes of the last round."""
        found: dict[int, NodeSet] = {}
        stamp, level, gpus = self.table.stamp.tolist(), self.table.level.tolist(), self.table.gpus.tolist()
        for row in sorted(rows, key=lambda r: (stamp[r], r)):
            number = level[row] // types
            if not stamp[row]:
                self.unseated.append(row)
                continue
            if number not in found:
                found[number] = self._shape(gpus[row], number)
            found[number].rows.append(row)
        for number in sorted(found):
            self.last = number
            if not self._open(found[number]):  # nodes were lost
                self.unseated += found[number].rows
        self.unseated.sort()

    def _shape(self, size: int, number: int = 0) -> NodeSet:
        nodes = -(-size // self.slots)
        return NodeSet(number=number, size=size, nodes=nodes, at_once=nodes * self.slots // size)

    def _open(self, group: NodeSet) -> bool:
        """Take nodes for a set; False: there are not enough."""
        if group.nodes > self.free:
            return False
        self.free -= group.nodes
        self.by_size.setdefault(group.size, {})[group.number] = group
        return True

    def _open_new(self, size: int) -> NodeSet | None:
        group = self._shape(size, self.last + 1)
        if not self._open(group):
            return None
        self.last += 1
        return group

    def adjust(self) -> None:
        """Let each size have the sets it can fill; if there are too few nodes, in proportion to its
        demand."""
        jobs = {size: sum(len(g.rows) for g in groups.values()) for size, groups in self.by_size.items()}
        for size in self.table.gpus[self.unseated].tolist():
            jobs[size] = jobs.get(size, 0) + 1
        have = {size: len(self.by_size.get(size, ())) for size in jobs}
        shape = {size: self._shape(size) for size in jobs}
        nodes = self.free + sum(have[size] * shape[size].nodes for size in jobs)
        total = sum(size * count for size, count in jobs.items())
        wanted = {size: -(-count // shape[size].at_once) for size, count in jobs.items()}
        if sum(wanted[size] * shape[size].nodes for size in jobs) > nodes:
            for size, count in jobs.items():
                fair = size * count * nodes // (total * shape[size].nodes)
                wanted[size] = max(1, min(wanted[size], fair))
        for size in sorted(jobs):
            if wanted[size] < have[size]:
                self._shrink(size, have[size] - wanted[size])
        for size in sorted(jobs):
            if wanted[size] > have[size] > 0:  # a size without any set gets its first when its jobs are seated
                self._expand(size, wanted[size] - have[size])

    def _expand(self, size: int, wanted: int) -> None:
        """Open sets for a size that has too few and move jobs over from the fullest ones."""
        fullest = [(-len(g.rows), g.number, g) for g in self.by_size[size].values()]
        heapq.heapify(fullest)
        for _ in range(wanted):
            group = self._open_new(size)
            if group is None:
                return
            while len(group.rows) < group.at_once and -fullest[0][0] > len(group.rows) + 1:
                load, number, other = fullest[0]
                group.rows.append(other.rows.pop())
                heapq.heapreplace(fullest, (load + 1, number, other))
            if not group.rows:
                self._close(group)
                return
            heapq.heappush(fullest, (-len(group.rows), group.number, group))

    def _close(self, group: NodeSet) -> None:
        del self.by_size[group.size][group.number]
        self.free += group.nodes

    def _shrink(self, size: int, surplus: int) -> None:
        """Close the emptiest sets of a size; their jobs go to the others."""
        groups = sorted(self.by_size[size].values(), key=lambda g: (len(g.rows), g.number))
        for group in groups[:surplus]:
            self._close(group)
        heap = self._emptiest(size)
        for row in [row for group in groups[:surplus] for row in group.rows]:
            _join(heap, row)

    def _emptiest(self, size: int) -> list[Load]:
        heap = [(len(g.rows), g.number, g) for g in self.by_size.get(size, {}).values()]
        heapq.heapify(heap)
        return heap

    def rotate(self) -> None:
        """The next jobs have their turn."""
        for group in self.sets:
            if len(group.rows) > group.at_once:
                group.rows = group.rows[group.at_once :] + group.rows[: group.at_once]

    def seat(self) -> None:
        """Give every job without a set one: a set with room, else new nodes, else turns on a full set."""
        heaps: dict[int, list[Load]] = {}
        for row in self.unseated:
            size = int(self.table.gpus[row])
            if size not in heaps:
                heaps[size] = self._emptiest(size)
            heap = heaps[size]
            if heap and heap[0][0] < heap[0][2].at_once:
                _join(heap, row)
            elif (new := self._open_new(size)) is not None:
                new.rows.append(row)
                heapq.heappush(heap, (1, new.number, new))
            elif heap:
                _join(heap, row)


Load: TypeAlias = tuple[int, int, NodeSet]
"""(jobs in the set, its number, the set)"""


def _join(heap: list[Load], row: int) -> None:
    """Let a job into the emptiest set."""
    load, number, group = heap[0]
    group.rows.append(row)
    heapq.heapreplace(heap, (load + 1, number, group))


def _node_slots(table: Table, kind: int) -> int:
    """Devices of a node of this type; all of them where nodes are not known."""
    if table.rooms is None:
        return max(table.capacity[kind], 1)
    return max((s for s, k in zip(table.rooms.slots, table.rooms.kind, strict=True) if k == kind), default=1)
