"""Minimum satisfactory shares by progressive filling (ElasticFlow 4.1, algorithm 1).

Free capacity is a piecewise-constant function of time, one for each device type. A job takes at most a
*level* of devices wherever so many are free, less where not, from now until its work is done; its minimum
satisfactory share is the lowest level that is done by its deadline. Levels are powers of two, so that buddy
placement finds compact devices for whatever fits by number; only a job that none of them can serve has levels of its
own. What a change of devices costs counts as time without progress. Nothing here knows policies or admission.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCost:
    """Seconds without progress when a job starts or changes its devices: flat, and more for each doubling.

    The defaults are the sum in ElasticFlow's simulator on large clusters (6.6).
    """

    flat_s: float = 9.0
    doubling_s: float = 2.0
    start_s: float = 0.0
    """More, where it held nothing before."""

    def of(self, devices: int) -> float:
        """For a change to so many devices."""
        return self.flat_s + self.doubling_s * math.log2(devices) if devices else 0.0

    def at_least(self, flat_s: float, doubling_s: float) -> ChangeCost:
        """This, or more where a change is known to cost more."""
        flat, doubling = max(self.flat_s, flat_s), max(self.doubling_s, doubling_s)
        return ChangeCost(flat_s=flat, doubling_s=doubling, start_s=max(self.flat_s + self.start_s - flat, 0.0))


Scale: TypeAlias = tuple[int, ...]
"""Devices by rank, the same for all jobs on one device type: 0, 1, 2, 4, ... (see `scale_of`)."""


def scale_of(devices: int, fewest: Iterable[int] = ()) -> Scale:
    """Nothing, and powers of two up to so many devices.

    Where a job needs more than the last of these (`fewest` of all jobs), what it needs and all devices come behind
    them: else it could run nowhere although there is room.
    """
    powers = (0, *(1 << exponent for exponent in range(max(devices, 0).bit_length())))
    odd = {count for count in fewest if powers[-1] < count <= devices}
    return (*powers, *sorted({*odd, devices})) if odd else powers


@lru_cache(maxsize=64)
def ranks_up_to(free: int, scale: Scale) -> Ints:
    """The rank of each number of free devices: the largest that fits in. To look up many at once."""
    counts = np.arange(max(free, 0) + 1)
    ranks: Ints = np.searchsorted(np.array(scale), counts, side="right").astype(np.int64) - 1
    return ranks


class Ladder:
    """The sizes a job can have on one device type, by rank (see `Scale`).

    A rank that brings no speed over a lower one stands for the lower one. So does one that is no power of two, for a
    job that some power of two can serve.
    """

    __slots__ = (
        "_by_count", "above", "by_level", "counts", "devices", "levels",
        "pause_at", "pauses", "ranks", "speed_at", "speeds", "start_s", "top",
    )  # fmt: skip

    def __init__(self, curve: ScalingCurve, kind: str, sizes: tuple[int, int], scale: Scale, cost: ChangeCost):
        low, high = sizes
        counts, speeds, use = [0], [0.0], [0]
        for rank, size in enumerate(scale[1:], start=1):
            count = min(size, high)
            meant = not size & (size - 1) or low > 1 << (size.bit_length() - 1)
            speed = curve.speed(kind, count) if meant and count >= low else 0.0
            better = speed > speeds[-1]
            counts.append(count if better else counts[-1])
            speeds.append(speed if better else speeds[-1])
            use.append(rank if better else use[-1])
        self.ranks: Ints = np.array(use, dtype=np.int64)
        """Rank -> the lowest rank that is as fast."""
        self.counts = counts
        self.devices: Ints = np.array(counts, dtype=np.int64)
        self.speeds, self.pauses = speeds, [cost.of(count) for count in counts]
        self.speed_at: Floats = np.array(speeds)
        self.pause_at: Floats = np.array(self.pauses)
        """Both again, to look up many ranks at once."""
        self.start_s = cost.start_s
        """More, where it held nothing before."""
        self.levels = sorted(set(use) - {0})
        self.top = self.levels[-1] if self.levels else 0
        self.above = [[level for level in self.levels if level > rank] for rank in range(len(scale))]
        """Rank -> the ranks that are faster."""
        grid = np.minimum(np.array(self.levels, dtype=np.int64)[:, None], np.arange(len(scale))[None, :])
        self.by_level: Floats = self.speed_at[grid]
        """Speed by level and by rank of what is free."""
        self._by_count = {counts[level]: level for level in self.levels}

    def pause_of(self, level: int, held: int, busy_s: float) -> float:
        """For a change to this level from another rank that is held.

        Where starts have a price of their own, as on a live cluster, it does not end before the one that is under way.
        In the simulator it takes that one's place.
        """
        if not self.start_s:
            return self.pauses[level]
        return max(busy_s, self.pauses[level] if held else self.pauses[level] + self.start_s)

    def rank_holding(self, count: int) -> int:
        """The rank that stands for exactly so many devices; 0: none does."""
        return self._by_count.get(count, 0)

    def next_above(self, rank: int) -> int:
        """The next rank that is faster; 0: none."""
        above = self.above[rank]
        return above[0] if above else 0


class Ladders:
    """Ladders by curve, type and sizes, each made once for all jobs of one decision."""

    def __init__(
        self, types: Sequence[str], capacity: Sequence[int], cost: ChangeCost, fewest: Iterable[int] = ()
    ) -> None:
        """`fewest`: workers that jobs need at least."""
        self.types = types
        fewest = set(fewest)
        self.scales = [scale_of(count, fewest) for count in capacity]
        self.cost = cost
        self._known: dict[tuple[int, int, int, int], Ladder] = {}
        self._steps: dict[tuple[int, int, tuple[int, int]], list[Ladder | None]] = {}

    def by_type(self, curve: ScalingCurve, allowed: int, sizes: tuple[int, int]) -> Sequence[Ladder | None]:
        """The ladders of jobs with this curve; None for a type whose bit in `allowed` is not set."""
        key = (id(curve), allowed, sizes)
        found = self._steps.get(key)
        if found is None:
            kinds = range(len(self.types))
            found = [self.of(curve, kind, sizes) if allowed >> kind & 1 else None for kind in kinds]
            self._steps[key] = found
        return found

    def of(self, curve: ScalingCurve, kind: int, sizes: tuple[int, int]) -> Ladder:
        """The ladder of jobs with this curve on this type; `sizes` are the fewest and most workers."""
        key = (id(curve), kind, *sizes)
        found = self._known.get(key)
        if found is None:
            found = Ladder(curve, self.types[kind], sizes, self.scales[kind], self.cost)
            self._known[key] = found
        return found


def sizes_of(spec: JobSpec, *, elastic: bool) -> tuple[int, int]:
    """Fewest and most workers of a job; without elasticity what it asked for."""
    if not elastic:
        return spec.gpus, spec.gpus
    return spec.min_workers or 1, spec.max_workers or 1 << 30


@dataclass(slots=True)
class Claim:
    """A job that wants to be filled in."""

    left: float
    """Work to do."""
    ladders: Sequence[Ladder | None]
    """By device type; None where it may not run."""
    kind: int = -1
    """Type held; -1: none."""
    rank: int = 0
    """Rank of what it holds."""
    pace: float = 1.0
    """Its speed as observed, in units of its curve's."""
    busy_s: float = 0.0
    """How long it still pauses on what it holds."""
    floor: int = 0
    """Levels below this one are not tried."""


Run: TypeAlias = tuple[float, int]
"""(from when, rank): a stretch of a plan, until the next one begins."""


@dataclass(slots=True)
class Share:
    """What a job was given: its level, what that means right now, and when it will be done."""

    kind: int
    level: int
    rank: int
    """What it holds at first: `level` or, where less is free, a lower rank; 0: it waits."""
    finish_s: float
    runs: tuple[Run, ...]
    """What it holds until it is done."""

    @property
    def grows_s(self) -> float:
        """When it first takes more than at first; infinite: never."""
        return next((begin for begin, rank in self.runs if rank > self.rank), math.inf)


_TICK = 1e-5
"""Seconds that do not matter."""
_EVER = 1e12
"""Seconds: longer than anything takes."""
_FEW = 6
"""Takings that are written one by one: for fewer, sorting them is not worth it."""


class Profile:
    """Free devices of one type over time: `edges[i]` begins stretch i, the last one never ends.

    Most jobs take one level from the first moment at which anything is free until they are done. As long as never fewer
    devices are free than at that moment, what they find and what they leave is told by two numbers; such takings are
    written into the stretches together, once somebody has to look at these (`_write`).
    """

    __slots__ = (
        "_edges", "_first", "_free", "_low", "_now", "_rank_of", "_ranks", "_rises", "_size", "_start", "_takings",
    )  # fmt: skip

    def __init__(self, now: float, free: int, room: int, scale: Scale) -> None:
        self._now = self._start = now
        self._first = 0
        """The first stretch in which anything is free, which begins at `start`."""
        self._low = free
        """Devices free in it, takings counted."""
        self._rises = True
        """Whether never fewer are free later."""
        self._takings: list[tuple[float, int]] = []
        """(end, devices) of what is taken from `start` on and not yet written into the stretches."""
        self._rank_of = ranks_up_to(free, scale)
        self._edges: Floats = np.empty(room + 2)
        self._free: Ints = np.empty(room + 2, dtype=np.int64)
        self._ranks: Ints = np.empty(room + 2, dtype=np.int64)
        self._edges[0], self._free[0], self._ranks[0] = now, free, self._rank_of[-1]
        self._size = 1

    def copy(self) -> Profile:
        """One to try things on."""
        self._write()
        other = Profile.__new__(Profile)
        other._edges, other._free = self._edges.copy(), self._free.copy()
        other._ranks, other._size, other._rank_of = self._ranks.copy(), self._size, self._rank_of
        other._now, other._start, other._first = self._now, self._start, self._first
        other._low, other._rises, other._takings = self._low, self._rises, []
        return other

    def pieces(self) -> list[tuple[float, int]]:
        """(begin, free devices) of each stretch."""
        self._write()
        n = self._size
        return list(zip(self._edges[:n].tolist(), self._free[:n].tolist(), strict=True))

    def fill(self, claim: Claim, kind: int, until: float) -> Share | None:
        """Take the lowest level that is done by `until`; None (and nothing taken) if none is."""
        ladder = claim.ladders[kind]
        if ladder is None or not ladder.top or until <= self._now:
            return None
        if self._rises:
            lowest = int(self._rank_of[max(self._low, 0)])
        else:
            k = int(self._edges[: self._size].searchsorted(until))
            lowest = int(np.minimum.reduce(self._ranks[self._first : k], initial=len(ladder.ranks)))
        share = self._fill_flat(claim, kind, ladder, until, lowest)
        if share is not None or ladder.top <= lowest or until <= self._start:
            return share
        return self._fill_higher(claim, kind, ladder, until, lowest)

    def _fill_flat(self, claim: Claim, kind: int, ladder: Ladder, until: float, lowest: int) -> Share | None:
        """The lowest level in time of those that are free all along, once anything is."""
        start, need, floor, waits = self._start, claim.left / claim.pace, claim.floor, self._first > 0
        held, busy = (claim.rank, claim.busy_s) if claim.kind == kind and not waits else (0, 0.0)
        for level in ladder.levels:
            if level > lowest:
                return None
            if level < floor and level < ladder.top:
                continue
            speed = ladder.speeds[level]
            pause = busy if held == level else ladder.pause_of(level, held, busy)
            finish = start + pause + need / speed
            if finish <= until and (not waits or (until - start - pause) * speed >= need):
                self._take_flat(finish, ladder.counts[level])
                if waits:
                    return Share(kind, level, 0, finish, ((self._now, 0), (start, level)))
                return Share(kind, level, level, finish, ((start, level),))
        return None

    def _fill_higher(self, claim: Claim, kind: int, ladder: Ladder, until: float, lowest: int) -> Share | None:
        """The lowest level in time of the others, where there is less for a while."""
        self._write()
        first, k = self._first, int(self._edges[: self._size].searchsorted(until))
        edges = self._edges[first:k]
        lengths = np.empty(k - first)
        np.subtract(edges[1:], edges[:-1], out=lengths[:-1])
        lengths[-1] = until - edges[-1]
        reach = ladder.by_level @ np.bincount(self._ranks[first:k], lengths, len(ladder.ranks))
        for index in np.flatnonzero(reach >= claim.left / claim.pace).tolist():
            level = ladder.levels[index]
            if level <= lowest or (level < claim.floor and level < ladder.top):
                continue
            share = self._fill_uneven(claim, kind, level, level, until, k)
            if share is not None:
                return share
        return None

    def rush(self, claim: Claim, kind: int, until: float = math.inf) -> Share | None:
        """Take the level that is done first, if that is by `until` (else None); without `until` the highest."""
        ladder = claim.ladders[kind]
        if ladder is None or not ladder.top:
            return None
        self._write()
        far = float(self._edges[self._size - 1]) + _EVER
        best: tuple[float, int] | None = None
        for level in reversed(ladder.levels) if until < math.inf else (ladder.top,):
            found = self._uneven(claim, kind, level, far, self._size)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], level
        if best is None or best[0] > until:
            return None
        return self._fill_uneven(claim, kind, best[1], best[1], far, self._size)

    def follow(self, claim: Claim, kind: int, runs: Sequence[Run], ends: float | None, until: float) -> Share | None:
        """Take what an earlier plan says, or what there is of it; its last stretch lasts until the job is done.

        Where another was to begin when this one `ends`, rounding must not make that an overlap, which would cost a
        change: within a tick it is done then. None (and nothing taken) if it is not done by `until`.
        """
        ladder = claim.ladders[kind]
        if ladder is None or not ladder.top or until <= self._now:
            return None
        self._write()
        begins, ranks = np.array([begin for begin, _ in runs]), np.array([rank for _, rank in runs])
        for begin in begins[begins > self._now].tolist():
            self._split(begin)
        k = int(self._edges[: self._size].searchsorted(until))
        at = np.maximum(begins.searchsorted(self._edges[:k], side="right") - 1, 0)
        return self._fill_uneven(claim, kind, int(ranks.max()), ranks[at][self._first :], until, k, ends=ends)

    def _fill_uneven(
        self,
        claim: Claim,
        kind: int,
        level: int,
        wanted: int | Ints,
        until: float,
        k: int,
        *,
        ends: float | None = None,
    ) -> Share | None:
        """Take `wanted` ranks or what there is in the first k stretches, with a pause at every change."""
        ladder = claim.ladders[kind]
        assert ladder is not None
        found = self._uneven(claim, kind, wanted, until, k, ends=ends)
        if found is None:
            return None
        finish, taken, runs = found
        first, end = self._first, self._split(finish)
        self._free[first:end] -= ladder.devices[taken[: end - first]]
        self._rank(end)
        self._look()
        return Share(kind, level, runs[0][1], finish, runs)

    def _uneven(
        self, claim: Claim, kind: int, wanted: int | Ints, until: float, k: int, *, ends: float | None = None
    ) -> tuple[float, Ints, tuple[Run, ...]] | None:
        """(end, rank by stretch from the first on in which anything is free, runs) of that; None: not by `until`."""
        ladder = claim.ladders[kind]
        assert ladder is not None
        need = claim.left / claim.pace
        first = self._first
        if k <= first:
            return None
        taken = ladder.ranks[np.minimum(self._ranks[first:k], wanted)]
        places = np.concatenate(((0,), (taken[1:] != taken[:-1]).nonzero()[0] + 1))
        runs, starts = taken[places], self._edges[first + places]
        if first and runs[0]:  # until then it waits
            runs, starts = np.concatenate(((0,), runs)), np.concatenate(((self._now,), starts))
        else:
            starts[0] = self._now
        pauses = ladder.pause_at[runs]
        held = claim.rank if claim.kind == kind else 0
        if ladder.start_s:
            pauses[(runs > 0) & (np.concatenate(((held,), runs[:-1])) == 0)] += ladder.start_s
        if runs[0] == held:
            pauses[0] = claim.busy_s
        elif runs[0] and ladder.start_s:
            pauses[0] = max(float(pauses[0]), claim.busy_s)
        lengths = np.empty(len(starts))
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1] = until - starts[-1]
        done = (np.maximum(lengths - pauses, 0.0) * ladder.speed_at[runs]).cumsum()
        enough = need if ends is None else max(need - _TICK * ladder.speeds[-1], need / 2)
        last = int(done.searchsorted(enough))
        if last == len(done):
            return None
        speed = ladder.speeds[runs[last]]
        before = float(done[last - 1]) if last else 0.0
        finish = float(starts[last] + pauses[last]) + (need - before) / speed
        if ends is not None:
            planned = abs(finish - ends) <= _TICK and ends > starts[last]
            finish = ends if planned else min(finish, float(starts[last] + lengths[last]))
        if finish > until:
            return None
        last += 1
        return finish, taken, tuple(zip(starts[:last].tolist(), runs[:last].tolist(), strict=True))

    def _take_flat(self, finish: float, count: int) -> None:
        self._low -= count
        self._takings.append((finish, count))
        if not self._rises or not self._low:
            self._write()
            self._look()

    def _look(self) -> None:
        """Find where anything is free first, and whether less is later."""
        self._first += int((self._free[self._first : self._size] > 0).argmax())
        self._start, self._low = float(self._edges[self._first]), int(self._free[self._first])
        self._rises = self._low <= int(np.minimum.reduce(self._free[self._first : self._size]))

    def _write(self) -> None:
        """Take out of the stretches what was taken."""
        if len(self._takings) < _FEW:
            for finish, count in self._takings:
                end = self._split(finish)
                self._free[self._first : end] -= count
                self._rank(end)
        else:
            self._write_many()
        self._takings = []

    def _write_many(self) -> None:
        """The same as one after the other, by columns."""
        first, n = self._first, self._size
        ends, counts = (np.array(column) for column in zip(*self._takings, strict=True))
        order = ends.argsort(kind="stable")
        given_back = np.concatenate(([0], np.cumsum(counts[order])))
        before, free = self._edges[first:n], self._free[first:n]
        edges = np.unique(np.concatenate((before, ends)))
        taken = given_back[-1] - given_back[ends[order].searchsorted(edges, side="right")]
        free = free[before.searchsorted(edges, side="right") - 1] - taken
        room = np.zeros(len(ends) + 2, dtype=np.int64)
        self._size = first + len(edges)
        self._edges = np.concatenate((self._edges[:first], edges, room))
        self._free = np.concatenate((self._free[:first], free, room))
        self._ranks = self._rank_of.take(self._free, mode="clip")

    def _rank(self, end: int) -> None:
        at = slice(self._first, end)
        self._rank_of.take(self._free[at], out=self._ranks[at], mode="clip")

    def _split(self, when: float) -> int:
        """Make `when` an edge; how many stretches end by then."""
        n = self._size
        at = int(self._edges[:n].searchsorted(when))
        if at < n and self._edges[at] == when:
            return at
        if n == len(self._edges):
            self._edges = np.concatenate((self._edges, self._edges))
            self._free, self._ranks = np.tile(self._free, 2), np.tile(self._ranks, 2)
        for column in (self._edges, self._free, self._ranks):
            column[at + 1 : n + 1] = column[at:n]
        self._edges[at] = when
        self._free[at], self._ranks[at] = self._free[at - 1], self._ranks[at - 1]
        self._size = n + 1
        if at <= self._first:
            self._first += 1
        return at


class Filling:
    """The profiles of all device types while jobs are filled in, one after the other."""

    def __init__(self, now: float, capacity: Sequence[int], room: int, scales: Sequence[Scale]) -> None:
        self.now = now
        self.profiles = [Profile(now, count, room, scale) for count, scale in zip(capacity, scales, strict=True)]

    def copy(self) -> Filling:
        """One to try things on."""
        other = Filling.__new__(Filling)
        other.now, other.profiles = self.now, [profile.copy() for profile in self.profiles]
        return other

    def fill(self, claim: Claim, until: float) -> Share | None:
        """Fill a job in on the type it holds or else on the fastest that is in time."""
        for kind in self._kinds(claim):
            share = self.profiles[kind].fill(claim, kind, until)
            if share is not None:
                return share
        return None

    def follow(self, claim: Claim, kind: int, runs: Sequence[Run], ends: float | None, until: float) -> Share | None:
        """Fill a job in as an earlier plan says, which ends then."""
        return self.profiles[kind].follow(claim, kind, runs, ends, until)

    def rush(self, claim: Claim, until: float = math.inf) -> Share | None:
        """Fill a job in so that it is done as early as it can be, if that is by `until`; else on its highest level."""
        best: Share | None = None
        for kind in self._kinds(claim):
            trial = self.profiles[kind].copy()
            share = trial.rush(claim, kind, until)
            if share is not None and (best is None or share.finish_s < best.finish_s):
                best, chosen = share, trial
        if best is not None:
            self.profiles[best.kind] = chosen
        return best

    def _kinds(self, claim: Claim) -> Sequence[int]:
        if len(claim.ladders) == 1:
            return (0,)
        kinds = [kind for kind, ladder in enumerate(claim.ladders) if ladder is not None and ladder.top]
        if len(kinds) > 1:
            speeds = [0.0 if ladder is None else ladder.speeds[-1] for ladder in claim.ladders]
            kinds.sort(key=lambda kind: (kind != claim.kind, -speeds[kind]))
        return kinds
