"""A cluster made of numbers: it holds what a real backend would find out by asking its nodes.

Devices by node (a `Placer`), the table of active jobs, and the progress of each at its speed. The engine
tells it what time it is; policies only ever see its table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.errors import UnknownNameError
from concertina.core.job import JobPhase, JobView
from concertina.policies.placement import Placer, Shift, Spot
from concertina.policies.round import Change, moved, name_nodes, place_change
from concertina.policies.table import Table

PLACEMENTS = ("best-fit", "buddy", "roomiest", "count")
"""Pack; pack and move others aside; take the emptiest nodes; only count."""


def _placer(cluster: Cluster, placement: str) -> Placer | None:
    if placement not in PLACEMENTS:
        raise UnknownNameError(kind="placement", seen=placement, known=PLACEMENTS)
    if placement == "count":
        return None
    return Placer(cluster, migrate=placement == "buddy", roomiest=placement == "roomiest")


class SimulatedCluster:
    """Nodes, active jobs and their progress."""

    def __init__(self, cluster: Cluster, *, placement: str = "best-fit") -> None:
        self.cluster = cluster
        self.table = Table(cluster.types, [cluster.slots_of(kind) for kind in cluster.types])
        self.slots = list(self.table.capacity)
        """Devices by type when every node is up."""
        self.placer = _placer(cluster, placement)
        self.table.rooms = self.placer
        self.spots: dict[int, tuple[Spot, ...]] = {}
        """Where each running job is, by key; empty tuples if places are not tracked."""
        self.down: set[int] = set()

    def row(self, key: int) -> int:
        """The row of a job: keys rise with the rows."""
        return bisect_left(self.table.keys, key)

    def settle(self, row: int) -> None:
        """Write down progress and service until now, so that the speed may change."""
        c, at, now = self.table.raw, self.table.at(row), self.table.now
        held = c["held"][at]
        if held:
            mark = c["mark"][at]
            start = max(mark, c["resume"][at])
            if now > start:
                c["done_0"][at] += c["speed"][at] * (now - start)
                c["left_0"][at] = max(c["estimate"][at] - c["done_0"][at], 1e-9) / c["asked_speed"][at]
            c["service_0"][at] += held * (now - mark)
            c["executed_0"][at] += now - mark
        c["mark"][at] = now

    def forget(self, row: int, work: float) -> None:
        """Take progress back from a job that waits: what it had not saved."""
        c, at = self.table.raw, self.table.at(row)
        c["done_0"][at] = max(c["done_0"][at] - work, 0.0)
        c["left_0"][at] = max(c["estimate"][at] - c["done_0"][at], 1e-9) / c["asked_speed"][at]

    def give_back(self, row: int) -> None:
        """Take all devices from the job in this row."""
        table = self.table
        key = table.keys[row]
        spots = self.spots.pop(key, ())
        for kind, count in self.workers_of(row):
            table.used[kind] -= count
        if self.placer is not None:
            self.placer.release(key, spots)
        table.splits.pop(key, None)
        c, at = table.raw, table.at(row)
        c["held"][at], c["kind"][at], c["speed"][at] = 0, -1, 0.0

    def take(self, change: Change) -> tuple[Shift, ...]:
        """Give the devices of `change` to its job; returns the moves of others that this needed."""
        table = self.table
        key = table.keys[change.row]
        spots: tuple[Spot, ...] = ()
        moves: tuple[Shift, ...] = ()
        for kind, count in change.workers:
            table.used[kind] += count
        if self.placer is not None:
            spots, moves = place_change(self.placer, key, change)
        self.spots[key] = spots
        moves = tuple(self._shift(*move) for move in moves)
        if len(change.workers) > 1:
            by_type = dict(change.workers)
            table.splits[key] = tuple(by_type.get(kind, 0) for kind in range(len(table.types)))
        c, at = table.raw, table.at(change.row)
        c["held"][at], c["kind"][at] = change.after, change.workers[0][0]
        return moves

    def _shift(self, key: int, old: tuple[Spot, ...], new: tuple[Spot, ...]) -> Shift:
        """A job moved aside; what it holds of other types stays where it is."""
        before = self.spots[key]
        self.spots[key] = moved(before, old, new)
        return key, before, self.spots[key]

    def speed_of(self, row: int) -> float:
        """What the curve says about the devices the job in this row holds."""
        table = self.table
        key = table.keys[row]
        nodes = len(self.spots[key]) or None
        if key in table.splits:
            return table.speed_on(row, [(table.types[kind], count) for kind, count in self.workers_of(row)], nodes)
        c, at = table.raw, table.at(row)
        return table.curves[row].speed(table.types[c["kind"][at]], int(c["held"][at]), nodes)

    def workers_of(self, row: int) -> Sequence[tuple[int, int]]:
        """(device type, devices) pairs of the job in this row."""
        table = self.table
        c, at = table.raw, table.at(row)
        held = int(c["held"][at])
        if not held:
            return ()
        split = table.splits.get(table.keys[row])
        if split is not None:
            return [(kind, count) for kind, count in enumerate(split) if count]
        return ((int(c["kind"][at]), held),)

    def lose(self, node: int) -> None:
        """A node (without jobs, by now) goes down."""
        self.down.add(node)
        self._set_up(node, False)

    def regain(self, node: int) -> None:
        """A node is back."""
        self.down.discard(node)
        self._set_up(node, True)

    def _set_up(self, node: int, up: bool) -> None:
        where = self.cluster.nodes[node]
        kind = self.cluster.types.index(where.device_type)
        self.table.capacity[kind] += where.slots if up else -where.slots
        if self.placer is not None:
            self.placer.set_up(node, up)

    def observe(self) -> Snapshot:
        """The same as rows: what a live backend would hand to a round."""
        return Snapshot(
            now=self.table.now,
            cluster=self.cluster,
            jobs=tuple(self._view(row) for row in range(len(self.table))),
            down=frozenset(self.cluster.nodes[node].id for node in self.down),
        )

    def _view(self, row: int) -> JobView:
        table = self.table
        held = bool(table.held[row])
        return JobView(
            spec=table.specs[row],
            phase=JobPhase.RUNNING if held else JobPhase.WAITING,
            workers=tuple((table.types[kind], count) for kind, count in self.workers_of(row)),
            placement=name_nodes(self.cluster, self.spots.get(table.keys[row], ())),
            work_done=float(table.done()[row]),
            service_s=float(table.service()[row]),
            executed_s=float(table.executed()[row]),
            waiting_since_s=None if held else float(table.waiting_since[row]),
            level=int(table.level[row]),
            stamp=float(table.stamp[row]),
            reserved=table.reserved.get(table.specs[row].id, ()),
        )
