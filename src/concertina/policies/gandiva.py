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
        return Shares(
            workers=workers, kind=kinds, level=level, stamp=stamp, wake_s=self._next_turn(table, sliced)
        )

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
        self.sets: list[NodeSet] = []
        self.unseated: list[int] = []
        self._read(rows, len(table.types))

    def _read(self, rows: list[int], types: int) -> None:
        """Find the sets again in the notes of the last round."""
        by_number: dict[int, NodeSet] = {}
        stamp, level = self.table.stamp, self.table.level
        for row in sorted(rows, key=lambda r: (stamp[r], r)):
            number = int(level[row]) // types
            if not stamp[row]:
                self.unseated.append(row)
                continue
            if number not in by_number:
                by_number[number] = self._new(int(self.table.gpus[row]), number)
            by_number[number].rows.append(row)
        for number in sorted(by_number):
            group = by_number[number]
            if group.nodes <= self.free:
                self.free -= group.nodes
                self.sets.append(group)
            else:  # nodes were lost
                self.unseated += group.rows
        self.unseated.sort()

    def _new(self, size: int, number: int | None = None) -> NodeSet:
        nodes = -(-size // self.slots)
        if number is None:
            number = max((group.number for group in self.sets), default=0) + 1
        return NodeSet(number=number, size=size, nodes=nodes, at_once=nodes * self.slots // size)

    def of_size(self, size: int) -> list[NodeSet]:
        """The sets of one job size."""
        return [group for group in self.sets if group.size == size]

    def adjust(self) -> None:
        """Let each size have the sets it can fill; if there are too few nodes, in proportion to its
        demand."""
        jobs: dict[int, int] = {}
        for size in [g.size for g in self.sets for _ in g.rows]:
            jobs[size] = jobs.get(size, 0) + 1
        nodes = self.free + sum(group.nodes for group in self.sets)
        total = sum(size * count for size, count in jobs.items())
        shape = {size: self._new(size) for size in jobs}
        wanted = {size: -(-count // shape[size].at_once) for size, count in jobs.items()}
        if sum(wanted[size] * shape[size].nodes for size in jobs) > nodes:
            for size, count in jobs.items():
                fair = size * count * nodes // (total * shape[size].nodes)
                wanted[size] = max(1, min(wanted[size], fair))
        have = {size: len(self.of_size(size)) for size in jobs}
        for size in sorted(jobs):
            if wanted[size] < have[size]:
                self._shrink(size, have[size] - wanted[size])
        for size in sorted(jobs):
            if wanted[size] > have[size]:
                self._expand(size, wanted[size] - have[size])

    def _expand(self, size: int, wanted: int) -> None:
        """Open sets for a size that has too few and move jobs over from the fullest ones."""
        for _ in range(wanted):
            group = self._new(size)
            if group.nodes > self.free:
                return
            others = self.of_size(size)
            while len(group.rows) < group.at_once:
                fullest = max(others, key=lambda g: (len(g.rows), -g.number))
                if len(fullest.rows) <= len(group.rows) + 1:
                    break
                group.rows.append(fullest.rows.pop())
            if group.rows:
                self.free -= group.nodes
                self.sets.append(group)

    def _shrink(self, size: int, surplus: int) -> None:
        """Close the emptiest sets of a size; their jobs go to the others."""
        groups = sorted(self.of_size(size), key=lambda g: (len(g.rows), g.number))
        closed, kept = groups[:surplus], groups[surplus:]
        for group in closed:
            self.sets.remove(group)
            self.free += group.nodes
        heap = [(len(group.rows), group.number, group) for group in kept]
        heapq.heapify(heap)
        for row in [row for group in closed for row in group.rows]:
            load, number, group = heap[0]
            group.rows.append(row)
            heapq.heapreplace(heap, (load + 1, number, group))

    def rotate(self) -> None:
        """The next jobs have their turn."""
        for group in self.sets:
            if len(group.rows) > group.at_once:
                group.rows = group.rows[group.at_once :] + group.rows[: group.at_once]

    def seat(self) -> None:
        """Give every job without a set one: a set with room, else new nodes, else turns on a full set."""
        for row in self.unseated:
            size = int(self.table.gpus[row])
            groups = self.of_size(size)
            emptiest = min(groups, key=lambda g: (len(g.rows), g.number), default=None)
            new = self._new(size)
            if emptiest is not None and len(emptiest.rows) < emptiest.at_once:
                emptiest.rows.append(row)
            elif new.nodes <= self.free:
                self.free -= new.nodes
                new.rows.append(row)
                self.sets.append(new)
            elif emptiest is not None:
                emptiest.rows.append(row)


def _node_slots(table: Table, kind: int) -> int:
    """Devices of a node of this type; all of them where nodes are not known."""
    if table.rooms is None:
        return max(table.capacity[kind], 1)
    return max((s for s, k in zip(table.rooms.slots, table.rooms.kind, strict=True) if k == kind), default=1)
