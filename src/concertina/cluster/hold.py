"""Whoever was started only just now is not stopped for others without a promise, whatever the policy. Pure.

A start costs seconds in which a slot does nothing. A policy that changes its mind every few seconds would spend them
again and again and bring nobody forward. So a job keeps its slots for a while after it was given some: those who would
have them instead wait, or grow later. Promises are another matter: a job with one gets what the plan gives it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from concertina.cluster.grants import Nodes
from concertina.cluster.slots import by_node, node_of

STARTS = 2.0  # a job is held for so many times what a start costs: half of its time it trains
LEAST_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A job as far as this goes."""

    id: str
    slots: tuple[str, ...]  # it has
    fewest: int
    promised: bool
    held_s: float | None = None  # until when it should stay; None: it may be stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The plan, with jobs that stay although it would stop them, and those who wait for it."""

    targets: dict[str, Nodes]
    stay: dict[str, float]  # job -> until when
    wait: dict[str, str]  # job that gets less than planned -> for whom


def held_until(started_s: float, start_s: float) -> float:
    return started_s + max(STARTS * start_s, LEAST_SECONDS)


def steady(targets: Mapping[str, Nodes], seats: Iterable[Seat], usable: Iterable[str], now: float) -> Steady:
    """`seats`: all jobs that are planned for or have slots, in order of submission."""
    seats = list(seats)
    found = Steady(targets=dict(targets), stay={}, wait={})
    held = [seat for seat in seats if seat.slots and not targets.get(seat.id) and (seat.held_s or 0.0) > now]
    if not held:
        return found
    room: dict[str, int] = {}
    for slot in usable:
        room[node_of(slot)] = room.get(node_of(slot), 0) + 1
    for nodes in targets.values():
        for node, count in nodes:
            room[node] = room.get(node, 0) - count
    givers = [seat for seat in reversed(seats) if not seat.promised and targets.get(seat.id)]
    givers.sort(key=lambda seat: bool(seat.slots))  # who would only start, before who would grow
    for seat in held:
        _hold(found, seat, room, givers)
    return found


def _hold(found: Steady, seat: Seat, room: dict[str, int], givers: list[Seat]) -> None:
    """Let a job keep what it has, or what of it can be had from the givers."""
    trial, left, waiting = dict(found.targets), dict(room), dict(found.wait)
    mine: dict[str, int] = {}
    for node, count in by_node(seat.slots):
        for giver in givers:
            if left.get(node, 0) < count and _give(trial, left, giver, node, count - left.get(node, 0)):
                waiting[giver.id] = seat.id
        mine[node] = min(count, max(left.get(node, 0), 0))
        left[node] = left.get(node, 0) - mine[node]
    if sum(mine.values()) < max(seat.fewest, 1):
        return
    trial[seat.id] = tuple((node, count) for node, count in sorted(mine.items()) if count)
    found.targets.clear()
    found.targets.update(trial)
    found.wait.update(waiting)
    found.stay[seat.id] = seat.held_s or 0.0
    room.update(left)


def _give(targets: dict[str, Nodes], room: dict[str, int], giver: Seat, node: str, wanted: int) -> bool:
    """Take up to `wanted` slots of a node from what a job was to get beyond what it has; a start as a whole."""
    has, planned = dict(by_node(giver.slots)), dict(targets.get(giver.id, ()))
    gain = min(planned.get(node, 0) - has.get(node, 0), wanted)
    if gain <= 0:
        return False
    if not giver.slots:
        for other, count in planned.items():
            room[other] = room.get(other, 0) + count
        targets.pop(giver.id)
        return True
    planned[node] -= gain
    if sum(planned.values()) < max(giver.fewest, 1):
        return False
    room[node] = room.get(node, 0) + gain
    targets[giver.id] = tuple((name, count) for name, count in sorted(planned.items()) if count)
    return True
