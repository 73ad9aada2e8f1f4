"""How fast a job would be on a configuration, for EasyScale's policy: by the planner of 3.4.1 and by the nodes.

The planner counts whole virtual workers. Curves also say, for some models, how slow a job is whose devices lie on
several nodes; such a job is estimated where it would be placed, because a language model on two nodes may be
slower than on one device. Configurations of several types have no such figures.
"""

from __future__ import annotations

from concertina.policies.easyscale_notes import Counts
from concertina.policies.mixed_speed import virtual_plan
from concertina.policies.placement import Placer, Spot
from concertina.policies.table import Table


class Speeds:
    """Estimates for one round, and the nodes as they would be after what was decided so far."""

    def __init__(self, table: Table, most_waste: float, before: dict[int, Counts]) -> None:
        self.table = table
        self.most_waste = most_waste
        self.before = before
        self._planned: dict[tuple[int, Counts], float] = {}
        by_nodes = table.rooms is not None and any(curve.spread for curve in table.curves)
        self.rooms: Placer | None = table.rooms.copy() if table.rooms is not None and by_nodes else None
        self.spots: dict[int, tuple[Spot, ...]] = {}
        if self.rooms is not None and table.rooms is not None:
            self._find_spots(table.rooms)
        self._at_first = dict(self.spots)

    def _find_spots(self, rooms: Placer) -> None:
        """Where each job is, told to the copy as well."""
        row_of = {key: row for row, key in enumerate(self.table.keys)}
        for node, on_node in enumerate(rooms.on_node):
            for key, count in on_node.items():
                row = row_of[key]
                self.spots[row] = (*self.spots.get(row, ()), (node, count))
        assert self.rooms is not None
        for row, spots in self.spots.items():
            for node, count in spots:
                self.rooms.on_node[node][row] = count

    @property
    def by_nodes(self) -> bool:
        """Whether it matters on how many nodes a job is."""
        return self.rooms is not None

    def planned(self, row: int, counts: Counts) -> float:
        """Iterations/s by the planner; 0 where the job can not run or too much would be wasted."""
        key = (row, counts)
        found = self._planned.get(key)
        if found is None:
            found = self._planned[key] = self._plan(row, counts)
        return found

    def _plan(self, row: int, counts: Counts) -> float:
        virtual = int(self.table.gpus[row])
        found = virtual_plan(self.table.curves[row], virtual, self.table.types, counts)
        if found is None:
            return 0.0
        # A job that holds a wasteful configuration (a node was lost) is slow, but it runs.
        if found.waste_norm > self.most_waste and counts != self.before.get(row):
            return 0.0
        return found.perf / virtual

    def placed(self, row: int, counts: Counts, held: Counts | None) -> float:
        """The same on the nodes it has (`held`), or would get now."""
        speed = self.planned(row, counts)
        curve = self.table.curves[row]
        if self.rooms is None or not curve.spread or sum(counts) < 2 or speed <= 0 or max(counts) < sum(counts):
            return speed
        kind, count = next((k, n) for k, n in enumerate(counts) if n)
        nodes = len(self.spots[row]) if counts == held and row in self.spots else self._nodes(row, kind, count)
        name = self.table.types[kind]
        return speed * curve.speed(name, count, nodes) / curve.speed(name, count)

    def spread_out(self, row: int, counts: Counts) -> bool:
        """Whether it would be faster on as many devices of fewer nodes."""
        return self.placed(row, counts, counts) < self.planned(row, counts)

    def moved_closer(self, row: int) -> bool:
        """Whether it would lie on fewer nodes than it does now."""
        return len(self.spots.get(row, ())) < len(self._at_first.get(row, ()))

    def _nodes(self, row: int, kind: int, count: int) -> int | None:
        """On how many nodes its devices would lie once its own are free; None: as few as possible."""
        assert self.rooms is not None
        own = self.spots.get(row, ())
        self.rooms.release(row, own)
        spots = self.rooms.compact(kind, count)
        if (
            spots is None
            and sum(f for f, k in zip(self.rooms.free, self.rooms.kind, strict=True) if k == kind) >= count
        ):
            spots = self.rooms.spread(kind, count)
        self.rooms.take(row, own)
        return None if spots is None else len(spots)

    def take(self, row: int, counts: Counts) -> None:
        """A job gets this configuration."""
        if self.rooms is None:
            return
        self.rooms.release(row, self.spots.pop(row, ()))
        spots: tuple[Spot, ...] = ()
        for kind, count in enumerate(counts):
            if count:
                spots += self.rooms.place(row, kind, count).spots
        if spots:
            self.spots[row] = spots

    def save(self) -> tuple[Placer | None, dict[int, tuple[Spot, ...]]]:
        """The nodes as they are, for `restore`."""
        if self.rooms is None:
            return None, {}
        kept = self.rooms.copy()
        kept.on_node = [dict(on_node) for on_node in self.rooms.on_node]
        return kept, dict(self.spots)

    def restore(self, saved: tuple[Placer | None, dict[int, tuple[Spot, ...]]]) -> None:
        """Forget what was decided since."""
        self.rooms, self.spots = saved
