"""Minimum satisfactory shares by progressive filling (ElasticFlow 4.1, algorithm 1).

Free capacity is a piecewise-constant function of time, one for each device type. A job takes at most a
*level* of devices wherever so many are free, less where not, from now until its work is done; its minimum
satisfactory share is the lowest level that is done by its deadline. Levels are powers of two, so that buddy
placement finds compact devices for whatever fits by number. What a change of devices costs counts as time
without progress. Nothing here knows policies or admission.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def rank_of(free: int) -> int:
    """0 for nothing free, else 1 + the exponent of the largest power of two in it."""
    return free.bit_length() if free > 0 else 0


@lru_cache(maxsize=64)
def ranks_up_to(free: int) -> Ints:
    """The rank of each number of devices, to look up many at once."""
    return np.array([rank_of(count) for count in range(max(free, 0) + 1)], dtype=np.int64)


class Ladder:
    """The sizes a job can have on one device type, by rank: rank r stands for 2^(r-1) devices.

    A rank that brings no speed over a lower one stands for the lower one.
    """

    __slots__ = ("_by_count", "by_level", "counts", "devices", "levels", "pauses", "ranks", "speeds", "start_s", "top")

    def __init__(self, curve: ScalingCurve, kind: str, sizes: tuple[int, int], ranks: int, cost: ChangeCost):
        low, high = sizes
        counts, speeds, use = [0], [0.0], [0]
        for rank in range(1, ranks):
            count = min(1 << (rank - 1), high)
            speed = curve.speed(kind, count) if count >= low else 0.0
            better = speed > speeds[-1]
            counts.append(count if better else counts[-1])
            speeds.append(speed if better else speeds[-1])
            use.append(rank if better else use[-1])
        self.ranks: Ints = np.array(use, dtype=np.int64)
        """Rank -> the lowest rank that is as fast."""
        self.counts = counts
        self.devices: Ints = np.array(counts, dtype=np.int64)
        self.speeds: Floats = np.array(speeds)
        self.pauses: Floats = np.array([cost.of(count) for count in counts])
        self.start_s = cost.start_s
        """More, where it held nothing before."""
        self.levels = sorted(set(use) - {0})
        self.top = self.levels[-1] if self.levels else 0
        grid = np.minimum(np.array(self.levels, dtype=np.int64)[:, None], np.arange(ranks)[None, :])
        self.by_level: Floats = self.speeds[grid]
        """Speed by level and by rank of what is free."""
        self._by_count = {counts[level]: level for level in self.levels}

    def rank_holding(self, count: int) -> int:
        """The rank that stands for exactly so many devices; 0: none does."""
        return self._by_count.get(count, 0)

    def next_above(self, rank: int) -> int:
        """The next rank that is faster; 0: none."""
        return next((level for level in self.levels if level > rank), 0)


class Ladders:
    """Ladders by curve, type and sizes, each made once for all jobs of one decision."""

    def __init__(self, types: Sequence[str], capacity: Sequence[int], cost: ChangeCost) -> None:
        self.types = types
        self.ranks = [rank_of(count) + 1 for count in capacity]
        self.cost = cost
        self._known: dict[tuple[int, int, int, int], Ladder] = {}

    def of(self, curve: ScalingCurve, kind: int, sizes: tuple[int, int]) -> Ladder:
        """The ladder of jobs with this curve on this type; `sizes` are the fewest and most workers."""
        key = (id(curve), kind, *sizes)
        found = self._known.get(key)
        if found is None:
            found = Ladder(curve, self.types[kind], sizes, self.ranks[kind], self.cost)
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


class Profile:
    """Free devices of one type over time: `edges[i]` begins stretch i, the last one never ends."""

    __slots__ = ("_edges", "_free", "_rank_of", "_ranks", "_size")

    def __init__(self, now: float, free: int, room: int) -> None:
        self._rank_of = ranks_up_to(free)
        self._edges: Floats = np.empty(room + 2)
        self._free: Ints = np.empty(room + 2, dtype=np.int64)
        self._ranks: Ints = np.empty(room + 2, dtype=np.int64)
        self._edges[0], self._free[0], self._ranks[0] = now, free, rank_of(free)
        self._size = 1

    def copy(self) -> Profile:
        """One to try things on."""
        other = Profile.__new__(Profile)
        other._edges, other._free = self._edges.copy(), self._free.copy()
        other._ranks, other._size, other._rank_of = self._ranks.copy(), self._size, self._rank_of
        return other

    def pieces(self) -> list[tuple[float, int]]:
        """(begin, free devices) of each stretch."""
        n = self._size
        return list(zip(self._edges[:n].tolist(), self._free[:n].tolist(), strict=True))

    def fill(self, claim: Claim, kind: int, until: float) -> Share | None:
        """Take the lowest level that is done by `until`; None (and nothing taken) if none is."""
        ladder = claim.ladders[kind]
        now = float(self._edges[0])
        if ladder is None or not ladder.top or until <= now:
            return None
        k = int(self._edges[: self._size].searchsorted(until))
        lowest = int(self._ranks[:k].min())
        return self._fill_flat(claim, kind, ladder, until, lowest) or self._fill_higher(
            claim, kind, ladder, until, lowest, k
        )

    def _fill_flat(self, claim: Claim, kind: int, ladder: Ladder, until: float, lowest: int) -> Share | None:
        """The lowest level in time of those that are free all along."""
        now, need = float(self._edges[0]), claim.left / claim.pace
        held = claim.rank if claim.kind == kind else 0
        for level in ladder.levels:
            if level > lowest:
                return None
            if level < claim.floor and level < ladder.top:
                continue
            pause = claim.busy_s
            if held != level:  # a change does not end before the one that is under way
                pause = max(pause, float(ladder.pauses[level]) + (0.0 if held else ladder.start_s))
            finish = now + pause + need / float(ladder.speeds[level])
            if finish <= until:
                self._take_flat(finish, ladder.counts[level])
                return Share(kind, level, level, finish, ((now, level),))
        return None

    def _fill_higher(self, claim: Claim, kind: int, ladder: Ladder, until: float, lowest: int, k: int) -> Share | None:
        """The lowest level in time of the others, where there is less for a while."""
        if ladder.top <= lowest:
            return None
        edges = self._edges[:k]
        lengths = np.empty(k)
        np.subtract(edges[1:], edges[:-1], out=lengths[:-1])
        lengths[-1] = until - edges[-1]
        reach = ladder.by_level @ np.bincount(self._ranks[:k], lengths, len(ladder.ranks))
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
        far = float(self._edges[self._size - 1]) + _EVER
        best: tuple[float, int] | None = None
        for level in reversed(ladder.levels) if until < math.inf else (ladder.top,):
            found = self._uneven(claim, kind, level, far, self._size)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], level
        if best is None or best[0] > until:
            return None
        return self._fill_uneven(claim, kind, best[1], best[1], far, self._size)

    def follow(self, claim: Claim, kind: int, runs: Sequence[Run], until: float) -> Share | None:
        """Take what an earlier plan says, or what there is of it; its last stretch lasts until the job is done.

        None (and nothing taken) if it is not done by `until`.
        """
        ladder = claim.ladders[kind]
        if ladder is None or not ladder.top or until <= self._edges[0]:
            return None
        begins, ranks = np.array([begin for begin, _ in runs]), np.array([rank for _, rank in runs])
        for begin in begins[begins > self._edges[0]].tolist():
            self._split(begin)
        k = int(self._edges[: self._size].searchsorted(until))
        # it ends where another begins: rounding must not make that an overlap, which would cost a change
        claim = replace(claim, left=max(claim.left - _TICK * float(ladder.speeds[-1]), claim.left / 2))
        at = np.maximum(begins.searchsorted(self._edges[:k], side="right") - 1, 0)
        return self._fill_uneven(claim, kind, int(ranks.max()), ranks[at], until, k)

    def _fill_uneven(
        self, claim: Claim, kind: int, level: int, wanted: int | Ints, until: float, k: int
    ) -> Share | None:
        """Take `wanted` ranks or what there is in the first k stretches, with a pause at every change."""
        ladder = claim.ladders[kind]
        assert ladder is not None
        found = self._uneven(claim, kind, wanted, until, k)
        if found is None:
            return None
        finish, taken, runs = found
        end = self._split(finish)
        self._free[:end] -= ladder.devices[taken[:end] if end <= k else taken]
        self._rank(end)
        return Share(kind, level, runs[0][1], finish, runs)

    def _uneven(
        self, claim: Claim, kind: int, wanted: int | Ints, until: float, k: int
    ) -> tuple[float, Ints, tuple[Run, ...]] | None:
        """(end, rank by stretch, runs) of that; None where it is not done by `until`."""
        ladder = claim.ladders[kind]
        assert ladder is not None
        need = claim.left / claim.pace
        taken = ladder.ranks[np.minimum(self._ranks[:k], wanted)]
        begins = np.flatnonzero(taken[1:] != taken[:-1]) + 1
        begins = np.concatenate(([0], begins))
        runs = taken[begins]
        starts = self._edges[begins]
        pauses = ladder.pauses[runs]
        held = claim.rank if claim.kind == kind else 0
        if ladder.start_s:
            pauses[(runs > 0) & (np.concatenate(([held], runs[:-1])) == 0)] += ladder.start_s
        pauses[0] = claim.busy_s if runs[0] == held else max(float(pauses[0]), claim.busy_s * (runs[0] > 0))
        lengths = np.empty(len(starts))
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1] = until - starts[-1]
        done = np.cumsum(np.maximum(lengths - pauses, 0.0) * ladder.speeds[runs])
        last = int(done.searchsorted(need))
        if last == len(done):
            return None
        speed = float(ladder.speeds[runs[last]])
        before = float(done[last - 1]) if last else 0.0
        finish = float(starts[last] + pauses[last]) + (need - before) / speed
        if finish > until:
            return None
        last += 1
        return finish, taken, tuple(zip(starts[:last].tolist(), runs[:last].tolist(), strict=True))

    def _take_flat(self, finish: float, count: int) -> None:
        end = self._split(finish)
        self._free[:end] -= count
        self._rank(end)

    def _rank(self, end: int) -> None:
        self._rank_of.take(self._free[:end], out=self._ranks[:end], mode="clip")

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
        return at


class Filling:
    """The profiles of all device types while jobs are filled in, one after the other."""

    def __init__(self, now: float, capacity: Sequence[int], room: int) -> None:
        self.now = now
        self.profiles = [Profile(now, count, room) for count in capacity]

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

    def follow(self, claim: Claim, kind: int, runs: Sequence[Run], until: float) -> Share | None:
        """Fill a job in as an earlier plan says."""
        return self.profiles[kind].follow(claim, kind, runs, until)

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

    def _kinds(self, claim: Claim) -> list[int]:
        kinds = [kind for kind, ladder in enumerate(claim.ladders) if ladder is not None and ladder.top]
        if len(kinds) > 1:
            speeds = [0.0 if ladder is None else float(ladder.speeds[-1]) for ladder in claim.ladders]
            kinds.sort(key=lambda kind: (kind != claim.kind, -speeds[kind]))
        return kinds
