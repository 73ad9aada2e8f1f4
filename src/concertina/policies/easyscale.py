"""EasyScale's scheduler: jobs with a fixed number of virtual workers stretch over whatever devices are free.

Li et al., "EasyScale" (SC 2023), 3.4.2. A job asks for as many virtual workers as devices (maxP) and runs on
one device or more, in order of submission. Each job proposes configurations with more devices, estimated by
the planner of 3.4.1; the cluster grants those with the highest speedup per device first (algorithm 1). A job
that became slower than before goes back to what it had and proposes nothing more. Devices beyond the first
are borrowed: when a job waits and nothing is free, whoever loses least by it gives one back.

`easyscale-homo` keeps each job on one device type, `easyscale-heter` may mix them. A configuration is the
devices of each type; a faster type that makes a slower one superfluous therefore releases it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fifo import waiting_rows
from concertina.policies.mixed_speed import virtual_plan
from concertina.policies.table import Floats, Ints, Table

Counts = tuple[int, ...]
"""Devices of each type."""

_BITS = 10
_STUCK = 1 << 62
"""Flag in a job's note: it was slower with more at the time in `stamp`, and proposes nothing for a while."""
_FASTER = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EasyScalePolicy:
    """Proposals by speedup per device, first devices in order of submission."""

    name: str = "easyscale-homo"
    paper: str = "EasyScale (SC 2023), 3.4.2: one device type per job"
    admission: str = "fits-elastic"
    mixes: bool = False
    """Whether a job may hold several device types at once."""
    most_waste: float = 0.3
    """Part of the devices' speed that a configuration may waste (the paper's 30 %)."""
    watch_s: float = 60.0
    """When to look whether a job that grew has become slower."""
    patience_s: float = 3600.0
    """How long a job that became slower by growing proposes nothing. Other devices may suit it better later."""

    def allocate(self, table: Table) -> Shares:
        """Fall back, start who waits, then grant proposals while devices are free."""
        deal = _Deal(table, self)
        deal.repair()
        deal.fall_back()
        deal.start_waiting()
        deal.grant()
        return deal.shares()

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """First device, proposal granted, given back, or fallen back."""
        asked = int(table.gpus[row])
        if after and not before:
            return f"next in the queue; {asked} virtual workers start on {after} of up to {asked} devices"
        if after > before:
            return f"its speedup per device on {after} instead of {before} is the highest proposed"
        if after < before and _slower(table, row):
            return f"was slower on {before} devices than before: falls back to {after}"
        if after < before:
            return f"gives borrowed devices back to jobs that wait and keeps {after}"
        if not after:
            return "every device is the only one of its job, and earlier jobs wait"
        return f"no other free devices serve its {asked} virtual workers better than {after} of the type it gets"


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A configuration a job could have instead of its present one."""

    row: int
    counts: Counts
    taken: int
    """Devices it takes that it does not hold."""
    per_device: float
    """Relative speedup for each of them."""
    speed: float

    def before(self, other: _Proposal | None) -> bool:
        """Algorithm 1's order: speedup, then devices; then order of submission."""
        if other is None:
            return True
        mine, theirs = (self.per_device, self.taken, -self.row), (other.per_device, other.taken, -other.row)
        return mine > theirs


class _Deal:
    """One round: the configurations as they are to be."""

    def __init__(self, table: Table, policy: EasyScalePolicy) -> None:
        self.table = table
        self.policy = policy
        self.free = table.free()
        self.now: dict[int, Counts] = _held(table)
        """Configuration of each job with devices."""
        self.before = dict(self.now)
        self.stuck = {row for row in self.now if _stuck(table, row, policy.patience_s)}
        self.newly: list[int] = []
        """Jobs found slower in this round."""
        self.speeds: dict[tuple[int, Counts], float] = {}

    # -- what a configuration gives --------------------------------------------------------------------------

    def speed(self, row: int, counts: Counts) -> float:
        """Estimated iterations/s; 0 where the job can not run or too much would be wasted."""
        key = (row, counts)
        if key not in self.speeds:
            self.speeds[key] = self._estimate(row, counts)
        return self.speeds[key]

    def _estimate(self, row: int, counts: Counts) -> float:
        virtual = int(self.table.gpus[row])
        found = virtual_plan(self.table.curves[row], virtual, self.table.types, counts)
        if found is None:
            return 0.0
        # A job that holds a wasteful configuration (a node was lost) is slow, but it runs.
        if found.waste_norm > self.policy.most_waste and counts != self.before.get(row):
            return 0.0
        return found.perf / virtual

    def most(self, row: int) -> int:
        """Devices it can use: one for each virtual worker."""
        return min(int(self.table.gpus[row]), self.table.specs[row].max_workers or 1 << 30)

    def kinds(self, row: int) -> list[int]:
        """Types it may use."""
        allowed = int(self.table.allowed[row])
        return [kind for kind in range(len(self.free)) if allowed >> kind & 1]

    def take(self, row: int, counts: Counts) -> None:
        """Give a job this configuration."""
        for kind, (old, new) in enumerate(zip(self.now.get(row, self.none), counts, strict=True)):
            self.free[kind] += old - new
        if any(counts):
            self.now[row] = counts
        else:
            self.now.pop(row, None)

    @property
    def none(self) -> Counts:
        """No device at all."""
        return (0,) * len(self.free)

    # -- the round -------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Where nodes were lost, the last submitted give their devices of that type back."""
        for kind in range(len(self.free)):
            for row in sorted(self.now, reverse=True):
                if self.free[kind] >= 0:
                    break
                if self.now[row][kind]:
                    self.take(row, self.none)

    def fall_back(self) -> None:
        """Whoever is slower than before its last growth goes back to what it had, if it still has it."""
        for row in np.flatnonzero((self.table.held > 0) & (self.table.stamp > 0)).tolist():
            if row in self.now and _slower(self.table, row):
                self.newly.append(row)
                self.stuck.add(row)
                old = _unpack(int(self.table.level[row]), len(self.free))
                if any(old) and all(a <= b for a, b in zip(old, self.now[row], strict=True)):
                    self.take(row, old)

    def start_waiting(self) -> None:
        """One device (or as few as it runs on) for each job that waits, in order; borrowed ones come back."""
        for row in waiting_rows(self.table):
            if row not in self.now and not self._start(row):
                return

    def _start(self, row: int) -> bool:
        """Whether the next in the queue may have its turn."""
        saved = dict(self.now), list(self.free)
        while True:
            options = [(self.speed(row, counts), -i, counts) for i, counts in enumerate(self._least(row))]
            fits = [one for one in options if all(n <= free for n, free in zip(one[2], self.free, strict=True))]
            if fits:
                self.take(row, max(fits)[2])
                return True
            if not options:
                return True  # it can not run here at all: nobody has to wait for it
            worth = {
                kind: math.log(speed) for speed, _, counts in options if speed > 0 for kind, n in enumerate(counts) if n
            }
            if not self._give_back(worth):
                self.now, self.free = saved
                return False

    def _least(self, row: int) -> Iterator[Counts]:
        """The smallest configuration of each type."""
        spec, curve = self.table.specs[row], self.table.curves[row]
        for kind in self.kinds(row):
            measured = curve.counts(self.table.types[kind])
            count = max(spec.min_workers or 1, measured[0]) if measured else 0
            if measured and count <= min(measured[-1], spec.max_workers or measured[-1]):
                yield self._only(kind, count)

    def _only(self, kind: int, count: int) -> Counts:
        return tuple(count if k == kind else 0 for k in range(len(self.free)))

    def _give_back(self, worth: dict[int, float]) -> bool:
        """Let a job return devices of one of these types: where it loses least of its speed per device, set
        against what the type is worth (logarithm of speed) to the one who waits."""
        best: tuple[float, int, Counts] | None = None
        for row, counts in self.now.items():
            whole = self.speed(row, counts)
            if sum(counts) < 2 or row not in self.before or whole <= 0:
                continue
            for kind, value in worth.items():
                for fewer in range(counts[kind]):
                    rest = (*counts[:kind], fewer, *counts[kind + 1 :])
                    left = self.speed(row, rest) if sum(rest) >= (self.table.specs[row].min_workers or 1) else 0.0
                    if left > 0:
                        cost = (1 - left / whole) / (counts[kind] - fewer) - value
                        if best is None or (cost, -row) < best[:2]:
                            best = cost, -row, rest
        if best is None:
            return False
        self.take(-best[1], best[2])
        return True

    def grant(self) -> None:
        """Algorithm 1: the best proposal that can be satisfied, until there is none."""
        known: dict[int, _Proposal | None] = {}
        while max(self.free, default=0) > 0:
            best: _Proposal | None = None
            for row in self.now:
                if row not in known or not self._satisfies(known[row]):
                    known[row] = self._propose(row)
                found = known[row]
                if found is not None and found.before(best):
                    best = found
            if best is None:
                return
            more = any(a > b for a, b in zip(self.now[best.row], best.counts, strict=True))
            self.take(best.row, best.counts)
            if more:  # it released some: others may have better proposals now
                known.clear()
            known.pop(best.row, None)

    def _satisfies(self, proposal: _Proposal | None) -> bool:
        """Whether what it takes is still free. (With less free, nobody's best proposal gets better.)"""
        if proposal is None:
            return True
        held = self.now[proposal.row]
        return all(n - old <= free for n, old, free in zip(proposal.counts, held, self.free, strict=True))

    def _propose(self, row: int) -> _Proposal | None:
        if row in self.stuck:
            return None
        held = self.now[row]
        now = self.speed(row, held)
        best: _Proposal | None = None
        for counts in self._larger(row, held):
            speed = self.speed(row, counts)
            if speed > now * _FASTER:
                taken = sum(max(n - old, 0) for n, old in zip(counts, held, strict=True))
                gain = (speed / now - 1) / taken if now > 0 else math.inf
                proposal = _Proposal(row, counts, taken, gain, speed)
                best = proposal if proposal.before(best) else best
        return best

    def _larger(self, row: int, held: Counts) -> Iterator[Counts]:
        """Configurations with more devices of one type, within what is free and what it can use."""
        most, total = self.most(row), sum(held)
        for kind in self.kinds(row):
            room = min(self.free[kind], most - held[kind])
            if self.policy.mixes:
                for more in range(1, room + 1):
                    yield self._without_slowest(row, held, kind, more, total + more - most)
            else:
                own = held[kind]  # 0 for another type than its own: it would move there as a whole
                for more in range(1, room + 1):
                    yield self._only(kind, own + more)

    def _without_slowest(self, row: int, held: Counts, kind: int, more: int, surplus: int) -> Counts:
        """`more` devices of one type, less the slowest of the others where there would be too many."""
        counts = list(held)
        curve, types = self.table.curves[row], self.table.types
        if surplus > 0:
            for other in sorted(range(len(counts)), key=lambda k: curve.speed(types[k], 1)):
                if other != kind:
                    drop = min(surplus, counts[other])
                    counts[other] -= drop
                    surplus -= drop
        counts[kind] += more
        return tuple(counts)

    # -- the answer ------------------------------------------------------------------------------------------

    def shares(self) -> Shares:
        """Columns, with a note of what each job that grew had before."""
        table = self.table
        level, stamp = self._notes()
        wake = self._wake(level)
        if self.now == self.before:
            return Shares(workers=table.held, level=level, stamp=stamp, wake_s=wake)
        n = len(table)
        workers, kind = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        splits: dict[int, Counts] = {}
        for row, counts in self.now.items():
            workers[row] = sum(counts)
            kind[row] = next(k for k, count in enumerate(counts) if count)
            if workers[row] != counts[kind[row]]:
                splits[row] = counts
        return Shares(workers=workers, kind=kind, splits=splits, level=level, stamp=stamp, wake_s=wake)

    def _wake(self, level: Ints | None) -> float | None:
        """When to look again at those that grew, and to ask those again that were slower for it."""
        now, times = self.table.now, []
        if level is not None and any(
            0 < int(level[row]) < _STUCK for row in self.now if level[row] != self.table.level[row]
        ):
            times.append(now + self.policy.watch_s)
        newly = set(self.newly)
        for row in self.stuck:
            since = now if row in newly else float(self.table.stamp[row])
            times.append(since + self.policy.patience_s)
        return min((time for time in times if time > now), default=None)

    def _notes(self) -> tuple[Ints, Floats] | tuple[None, None]:
        """For the next round: the configuration before a growth (`level`) and the speed there (`stamp`)."""
        changed = [row for row in {*self.before, *self.now} if self.before.get(row) != self.now.get(row)]
        if not changed and not self.newly:
            return None, None
        level, stamp = self.table.level.copy(), self.table.stamp.copy()
        for row in changed:
            old, new = self.before.get(row, self.none), self.now.get(row, self.none)
            grew = any(old) and self.speed(row, new) > self.speed(row, old)
            level[row] = _pack(old) if grew else 0
            stamp[row] = float(self.table.speed[row]) if grew else 0.0
        for row in self.newly:
            level[row], stamp[row] = _STUCK, self.table.now
        return level, stamp


def _held(table: Table) -> dict[int, Counts]:
    """Devices by type of every job that has some."""
    none = [0] * len(table.types)
    found: dict[int, Counts] = {}
    for row in np.flatnonzero(table.held > 0).tolist():
        split = table.splits.get(table.keys[row])
        if split is None:
            counts = list(none)
            counts[int(table.kind[row])] = int(table.held[row])
            split = tuple(counts)
        found[row] = split
    return found


def _slower(table: Table, row: int) -> bool:
    """Whether it runs slower now than before its last growth."""
    before = float(table.stamp[row])
    return 0 < int(table.level[row]) < _STUCK and float(table.speed[row]) < before / _FASTER


def _stuck(table: Table, row: int, patience_s: float) -> bool:
    """Whether it found out not long ago that more devices made it slower."""
    return int(table.level[row]) >= _STUCK and table.now - float(table.stamp[row]) < patience_s


def _pack(counts: Counts) -> int:
    """A configuration as one number; 0 (none) where it does not fit into a note."""
    if len(counts) * _BITS > 60 or max(counts) >= 1 << _BITS:
        return 0
    return sum(count << _BITS * kind for kind, count in enumerate(counts))


def _unpack(note: int, types: int) -> Counts:
    return tuple((note & ~_STUCK) >> _BITS * kind & (1 << _BITS) - 1 for kind in range(types))
