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
from itertools import combinations

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.easyscale_notes import FASTER, STUCK, Counts, held, pack, slower, stuck, unpack
from concertina.policies.easyscale_speeds import Speeds
from concertina.policies.fifo import waiting_rows
from concertina.policies.table import Floats, Ints, Table


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
    least_gain: float = 1.1
    """Product of two jobs' speedups that is worth letting them change places."""
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
        if self.mixes:
            deal.exchange()
        return deal.shares()

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """First device, proposal granted, given back, or fallen back."""
        asked = int(table.gpus[row])
        if after and not before:
            return f"next in the queue; {asked} virtual workers start on {after} of up to {asked} devices"
        if after > before:
            return f"its speedup per device on {after} instead of {before} is the highest proposed"
        if after < before and slower(table, row):
            return f"was slower on {before} devices than before: falls back to {after}"
        if 0 < after < before and table.held.all():  # nobody waits for what it gives back
            return f"is faster on {after} devices close together than on {before} far apart"
        if after < before:
            return f"gives borrowed devices back to jobs that wait and keeps {after}"
        if not after:
            return "every device is the only one of its job, and earlier jobs wait"
        return f"no other devices that it could have serve its {asked} virtual workers better than these {after}"


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A configuration a job could have instead of its present one."""

    row: int
    counts: Counts
    taken: int
    """Devices it takes that it does not hold."""
    per_device: float
    """Relative speedup for each of them; infinite if it takes none."""
    left_s: float
    """Time the job has left."""

    def before(self, other: _Proposal | None) -> bool:
        """Algorithm 1's order: speedup; of equals, who has least left; then devices, then order of submission."""
        return other is None or self._rank() > other._rank()

    def _rank(self) -> tuple[float, float, int, int]:
        return round(self.per_device, 9), -self.left_s, self.taken, -self.row


class _Deal:
    """One round: the configurations as they are to be."""

    def __init__(self, table: Table, policy: EasyScalePolicy) -> None:
        self.table = table
        self.policy = policy
        self.free = table.free()
        self.now: dict[int, Counts] = held(table)
        """Configuration of each job with devices."""
        self.before = dict(self.now)
        self.stuck = {row for row in self.now if stuck(table, row, policy.patience_s)}
        self.newly: list[int] = []
        """Jobs found slower in this round."""
        self.speeds = Speeds(table, policy.most_waste, self.before)
        self.left_s = table.time_left().tolist()

    # -- what a configuration gives --------------------------------------------------------------------------

    def speed(self, row: int, counts: Counts) -> float:
        """Estimated iterations/s; 0 where the job can not run or too much would be wasted."""
        return self.speeds.planned(row, counts)

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
        self.speeds.take(row, counts)
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
            if row in self.now and slower(self.table, row):
                self.newly.append(row)
                self.stuck.add(row)
                old = unpack(int(self.table.level[row]), len(self.free))
                if any(old) and all(a <= b for a, b in zip(old, self.now[row], strict=True)):
                    self.take(row, old)

    def start_waiting(self) -> None:
        """One device (or as few as it runs on) for each job that waits, in order; borrowed ones come back."""
        for row in waiting_rows(self.table):
            if row not in self.now and not self._start(row):
                return

    def _start(self, row: int) -> bool:
        """Whether the next in the queue may have its turn."""
        saved, nodes = (dict(self.now), list(self.free)), self.speeds.save()
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
                self.speeds.restore(nodes)
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
        while max(self.free, default=0) > 0 or self.speeds.by_nodes:
            best: _Proposal | None = None
            for row in self.now:
                if row not in known or not self._satisfies(known[row]):
                    known[row] = self._propose(row)
                found = known[row]
                if found is not None and found.before(best):
                    best = found
            if best is None:
                return
            if not self._is_faster(best.row, best.counts):  # others have taken the place it would have had
                known.pop(best.row)
                continue
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
        now = self.speeds.placed(row, held, held)
        best: _Proposal | None = None
        for counts in self._others(row, held):
            speed = self.speeds.placed(row, counts, held)
            if speed > now * FASTER:
                taken = sum(max(n - old, 0) for n, old in zip(counts, held, strict=True))
                gain = (speed / now - 1) / taken if now > 0 and taken else math.inf
                proposal = _Proposal(row, counts, taken, gain, self.left_s[row])
                best = proposal if proposal.before(best) else best
        return best

    def _is_faster(self, row: int, counts: Counts) -> bool:
        held = self.now[row]
        return self.speeds.placed(row, counts, held) > self.speeds.placed(row, held, held) * FASTER

    def _others(self, row: int, held: Counts) -> Iterator[Counts]:
        """Configurations with more devices, within what is free and what it can use.

        Of one type: more of its own, or as a whole to another; fewer, too, if it is spread over too many nodes.
        """
        most, total = self.most(row), sum(held)
        for kind in self.kinds(row):
            own = held[kind]
            room = min(self.free[kind], most - own)
            alone = range(own + 1, own + room + 1)
            if max(held) == total and self.speeds.spread_out(row, held):
                alone = range(self.table.specs[row].min_workers or 1, own + room + 1)
            for count in alone:
                yield self._only(kind, count)
            if self.policy.mixes:
                for more in range(1, room + 1):
                    yield self._without_slowest(row, held, kind, more, total + more - most)
        if self.policy.mixes:
            yield from self._fastest_first(row, held, most)

    def _fastest_first(self, row: int, held: Counts, most: int) -> Iterator[Counts]:
        """For each number of devices the fastest there are, of whatever types."""
        curve, types = self.table.curves[row], self.table.types
        order = sorted(self.kinds(row), key=lambda k: -curve.speed(types[k], 1))
        for total in range(sum(held) + 1, most + 1):
            counts, rest = [0] * len(held), total
            for kind in order:
                counts[kind] = min(held[kind] + self.free[kind], rest)
                rest -= counts[kind]
            if rest:
                return
            yield tuple(counts)

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

    def exchange(self) -> None:
        """Let jobs on as many devices of one type each change places where that makes both together faster.

        A device goes to the job that gains most by it: one that runs 2.45 times as fast on it before one that runs
        1.55 times as fast.
        """
        alone: dict[int, dict[int, list[int]]] = {}
        for row, counts in self.now.items():
            if max(counts) == sum(counts):
                alone.setdefault(max(counts), {}).setdefault(counts.index(max(counts)), []).append(row)
        for count, by_kind in sorted(alone.items()):
            for one, other in combinations(sorted(by_kind), 2):
                self._swap(by_kind[one], by_kind[other], self._only(one, count), self._only(other, count))

    def _swap(self, ones: list[int], others: list[int], here: Counts, there: Counts) -> None:
        """Those that lose least by going there against those that gain most by coming here, or the other way round."""
        going = sorted(ones, key=lambda row: (-self._change(row, here, there), row))
        coming = sorted(others, key=lambda row: (-self._change(row, there, here), row))
        for a, b in zip(going, coming, strict=False):
            if self._change(a, here, there) * self._change(b, there, here) < self.policy.least_gain:
                return
            self.now[a], self.now[b] = there, here
            ones[ones.index(a)], others[others.index(b)] = b, a

    def _change(self, row: int, old: Counts, new: Counts) -> float:
        """New speed in units of the old; 0 where it may not or can not."""
        kind = new.index(max(new))
        before = self.speed(row, old)
        allowed = int(self.table.allowed[row]) >> kind & 1
        return self.speed(row, new) / before if before > 0 and allowed else 0.0

    # -- the answer ------------------------------------------------------------------------------------------

    def shares(self) -> Shares:
        """Columns, with a note of what each job that grew had before."""
        table = self.table
        level, stamp = self._notes()
        wake = self._wake(level)
        moves = frozenset(
            row for row, counts in self.now.items() if counts == self.before.get(row) and self.speeds.moved_closer(row)
        )
        if self.now == self.before and not moves:
            return Shares(workers=table.held, level=level, stamp=stamp, wake_s=wake)
        n = len(table)
        workers, kind = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        splits: dict[int, Counts] = {}
        for row, counts in self.now.items():
            workers[row] = sum(counts)
            kind[row] = next(k for k, count in enumerate(counts) if count)
            if workers[row] != counts[kind[row]]:
                splits[row] = counts
        return Shares(
            workers=workers, kind=kind, splits=splits, moves=moves, level=level, stamp=stamp, wake_s=wake
        )  # fmt: skip

    def _wake(self, level: Ints | None) -> float | None:
        """When to look again at those that grew, and to ask those again that were slower for it."""
        now, times = self.table.now, []
        if level is not None and any(
            0 < int(level[row]) < STUCK for row in self.now if level[row] != self.table.level[row]
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
            level[row] = pack(old) if grew else 0
            stamp[row] = float(self.table.speed[row]) if grew else 0.0
        for row in self.newly:
            level[row], stamp[row] = STUCK, self.table.now
        return level, stamp
