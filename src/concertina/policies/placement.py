"""Which devices: best fit in the tree of racks and nodes, buddy blocks, and moves that undo fragmentation.

ElasticFlow 4.3. Jobs and nodes that are powers of two pack without gaps, so a job that fits by count also
fits compactly once others have moved aside; `Placer` with `migrate=True` does that and lists the moves. A
job that can not be compact (or where moving is not wanted) is spread over the nodes with most room.

A `Placer` is a value kept by whoever observes the cluster; it knows nothing about time or policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from concertina.core.cluster import Cluster
from concertina.core.errors import SimulationError

Spot: TypeAlias = tuple[int, int]
"""(index of a node, devices on it)"""
Shift: TypeAlias = tuple[int, tuple[Spot, ...], tuple[Spot, ...]]
"""(job key, spots before, spots after)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a job went, and which jobs have to move for it."""

    spots: tuple[Spot, ...]
    moves: tuple[Shift, ...] = ()


class Placer:
    """Free devices by node, in buckets by number; all choices are by lowest index, so equal states agree."""

    def __init__(self, cluster: Cluster, *, migrate: bool = False, roomiest: bool = False) -> None:
        self.migrate = migrate
        self.roomiest = roomiest
        """Take from the nodes with most room instead of packing (what simple schedulers do)."""
        self.slots = [node.slots for node in cluster.nodes]
        self.free = list(self.slots)
        self.kind = [cluster.types.index(node.device_type) for node in cluster.nodes]
        self.on_node: list[dict[int, int]] = [{} for _ in self.slots]
        """Per node: job key -> devices."""
        racks = {name: i for i, name in enumerate(dict.fromkeys(n.rack for n in cluster.nodes))}
        self.rack = [racks[node.rack] for node in cluster.nodes]
        self._largest = max(self.slots)
        self._buckets = [[0] * (self._largest + 1) for _ in cluster.types]
        for index, count in enumerate(self.slots):
            self._buckets[self.kind[index]][count] |= 1 << index
        self._up = [True] * len(self.slots)

    def copy(self) -> Placer:
        """A placer to try things on, without the jobs (so it moves nobody)."""
        other = Placer.__new__(Placer)
        other.migrate, other.roomiest = False, self.roomiest
        other.slots, other.kind, other.rack = self.slots, self.kind, self.rack
        other.free, other.on_node = list(self.free), [{} for _ in self.slots]
        other._largest, other._up = self._largest, list(self._up)
        other._buckets = [list(buckets) for buckets in self._buckets]
        return other

    # -- what happened ---------------------------------------------------------------------------------------

    def take(self, key: int, spots: Iterable[Spot]) -> None:
        """Job `key` holds these devices from now on."""
        for node, count in spots:
            self._set_free(node, self.free[node] - count)
            on_node = self.on_node[node]
            on_node[key] = on_node.get(key, 0) + count

    def release(self, key: int, spots: Iterable[Spot]) -> None:
        """Job `key` gives these devices back."""
        for node, count in spots:
            self._set_free(node, self.free[node] + count)
            left = self.on_node[node][key] - count
            if left:
                self.on_node[node][key] = left
            else:
                del self.on_node[node][key]

    def set_up(self, node: int, up: bool) -> None:
        """A node is lost or back. Whoever is on it has to be released first."""
        if self.on_node[node]:
            raise SimulationError(f"node {node} changes while jobs {sorted(self.on_node[node])} are on it")
        self._up[node] = up
        self._set_free(node, self.slots[node] if up else 0)

    # -- decisions -------------------------------------------------------------------------------------------

    def place(self, key: int, kind: int, count: int) -> Placed:
        """Find and take `count` devices of one type for job `key`."""
        spots = None if self.roomiest else self.compact(kind, count)
        moves: tuple[Shift, ...] = ()
        if spots is None and self.migrate:
            spots, moves = self._make_room(kind, count)
        if spots is None:
            spots = self.spread(kind, count)
        self.take(key, spots)
        return Placed(spots=spots, moves=moves)

    def compact(self, kind: int, count: int, *, first_fit: bool = False) -> tuple[Spot, ...] | None:
        """The best fit on as few nodes as possible, or None: one node, else whole nodes and one rest.

        With `first_fit` a single node is the first that has room, not the fullest.
        """
        buckets = self._buckets[kind]
        if first_fit and count <= self._largest:
            roomy = 0
            for room in range(count, self._largest + 1):
                roomy |= buckets[room]
            return ((_lowest(roomy), count),) if roomy else None
        for room in range(count, self._largest + 1):
            if buckets[room]:
                return ((_lowest(buckets[room]), count),)
        if count <= self._largest:
            return None
        whole, rest = divmod(count, self._largest)
        nodes = self._whole_nodes(kind, whole)
        if nodes is None:
            return None
        spots = [(node, self._largest) for node in nodes]
        if rest:
            mask = ~sum(1 << node for node in nodes)
            for room in range(rest, self._largest + 1):
                if buckets[room] & mask:
                    spots.append((_lowest(buckets[room] & mask), rest))
                    return tuple(spots)
            return None
        return tuple(spots)

    def _whole_nodes(self, kind: int, wanted: int) -> list[int] | None:
        """Empty nodes, all in one rack if one has enough (the one with fewest), else from the fullest
        racks."""
        empty = _indices(self._buckets[kind][self._largest])
        if len(empty) < wanted:
            return None
        by_rack: dict[int, list[int]] = {}
        for node in empty:
            by_rack.setdefault(self.rack[node], []).append(node)
        enough = [nodes for nodes in by_rack.values() if len(nodes) >= wanted]
        if enough:
            return min(enough, key=len)[:wanted]
        largest_first = sorted(by_rack.values(), key=len, reverse=True)
        return [node for nodes in largest_first for node in nodes][:wanted]

    def spread(self, kind: int, count: int) -> tuple[Spot, ...]:
        """Take from the nodes with most room first."""
        spots: list[Spot] = []
        for room in range(self._largest, 0, -1):
            for node in _indices(self._buckets[kind][room]):
                spots.append((node, min(room, count)))
                count -= spots[-1][1]
                if not count:
                    return tuple(spots)
        raise SimulationError(f"{count} devices too many were asked of type {kind}")

    def _make_room(self, kind: int, count: int) -> tuple[tuple[Spot, ...] | None, tuple[Shift, ...]]:
        """Move jobs so that `count` devices become compact: clear one node if that works, else pack anew."""
        nodes = [n for n, k in enumerate(self.kind) if k == kind and self._up[n]]
        if sum(self.free[n] for n in nodes) < count:
            return None, ()
        held = self._held(nodes)
        found = self._clear_one(nodes, held, count) if count <= self._largest else None
        if found is None:
            found = _pack(nodes, [self.slots[n] for n in nodes], held, count)
        if found is None:
            return None, ()
        spots, after = found
        moves = tuple((key, held[key], after[key]) for key in held if sorted(held[key]) != sorted(after[key]))
        for key, before, _ in moves:
            self.release(key, before)
        for key, _, now in moves:
            self.take(key, now)
        return spots, moves

    def _held(self, nodes: Sequence[int]) -> dict[int, tuple[Spot, ...]]:
        held: dict[int, list[Spot]] = {}
        for node in nodes:
            for key, count in self.on_node[node].items():
                held.setdefault(key, []).append((node, count))
        return {key: tuple(spots) for key, spots in held.items()}

    def _clear_one(
        self, nodes: Sequence[int], held: dict[int, tuple[Spot, ...]], count: int
    ) -> tuple[tuple[Spot, ...], dict[int, tuple[Spot, ...]]] | None:
        """Send small jobs of the roomiest node to holes elsewhere until `count` devices are free there."""
        for target in sorted(nodes, key=lambda n: (-self.free[n], n)):
            missing = count - self.free[target]
            if missing > self.slots[target] or self.slots[target] < count:
                continue
            room = {n: self.free[n] for n in nodes if n != target}
            after = dict(held)
            alone = [key for key in self.on_node[target] if len(held[key]) == 1]
            for key in sorted(alone, key=lambda k: (-self.on_node[target][k], k)):
                size = self.on_node[target][key]
                if missing <= 0 or size > missing:
                    continue
                goal = min((n for n in room if room[n] >= size), key=lambda n: (room[n], n), default=None)
                if goal is not None:
                    room[goal] -= size
                    missing -= size
                    after[key] = ((goal, size),)
            if missing <= 0:
                return ((target, count),), after
        return None

    def _set_free(self, node: int, count: int) -> None:
        before = self.free[node]
        if not 0 <= count <= self.slots[node]:
            raise SimulationError(f"node {node} would have {count} of {self.slots[node]} devices free")
        buckets, bit = self._buckets[self.kind[node]], 1 << node
        buckets[before] &= ~bit
        buckets[count] |= bit
        self.free[node] = count


def _pack(
    nodes: Sequence[int], slots: Sequence[int], held: dict[int, tuple[Spot, ...]], count: int
) -> tuple[tuple[Spot, ...], dict[int, tuple[Spot, ...]]] | None:
    """Place the newcomer and everyone else anew, largest first: without gaps if all are powers of two.

    Of one size, those that can stay where they are come first.
    """
    newcomer, largest = -1, max(slots)
    size_of = {key: sum(c for _, c in spots) for key, spots in held.items()}
    size_of[newcomer] = count
    room = dict(zip(nodes, slots, strict=True))
    after: dict[int, tuple[Spot, ...]] = {}
    for size in sorted(set(size_of.values()), reverse=True):
        keys = [key for key in sorted(size_of) if size_of[key] == size]
        if size == count:
            _settle(room, after, newcomer, _fit(room, size, largest))
        for key in keys:
            if key != newcomer and _stays(room, held[key], size, largest):
                _settle(room, after, key, held[key])
        for key in keys:
            if key not in after:
                _settle(room, after, key, _fit(room, size, largest))
        if any(not after[key] for key in keys):
            return None
    return after.pop(newcomer), after


def _settle(room: dict[int, int], after: dict[int, tuple[Spot, ...]], key: int, spots: tuple[Spot, ...]) -> None:
    for node, taken in spots:
        room[node] -= taken
    after[key] = spots


def _stays(room: dict[int, int], spots: tuple[Spot, ...], size: int, largest: int) -> bool:
    """Whether a job is compact where it is and nobody has taken its place."""
    return len(spots) == -(-size // largest) and all(room[node] >= taken for node, taken in spots)


def _fit(room: dict[int, int], size: int, largest: int) -> tuple[Spot, ...]:
    """Best fit in whole nodes and one rest; empty: none."""
    spots: list[Spot] = []
    while size > 0:
        part = min(size, largest)
        taken = {node for node, _ in spots}
        goals = (n for n in room if room[n] >= part and n not in taken)
        goal = min(goals, key=lambda n: (room[n], n), default=None)
        if goal is None:
            return ()
        spots.append((goal, part))
        size -= part
    return tuple(spots)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _indices(mask: int) -> list[int]:
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
