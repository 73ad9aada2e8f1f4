"""Devices step by step to where they bring most: what is left over after promises and floors.

A step takes a job to the next power of two. Its gain is the speed it adds for each device, in units of the
job's own speed on its first device, times what the job's progress is worth. Pure arithmetic; nothing here
knows why a job is worth more than another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from concertina.policies.filling import Ladder


@dataclass(slots=True, kw_only=True)
class Climber:
    """A job on its way up from what it is sure to get."""

    row: int
    ladders: Sequence[Ladder | None]
    """By device type; None where it may not run."""
    left: float
    """Work to do."""
    held_kind: int
    held_rank: int
    """What it holds; -1 and 0: nothing."""
    weight: float
    """What its progress is worth."""
    unit: float
    """Speed per device that counts as 1."""
    tie: float
    """Of equal steps the smaller goes first."""
    bold: bool = True
    """Whether it may lose a few seconds in order to gain more."""
    kind: int = -1
    rank: int = 0
    """What it is to have."""
    asked: int = 0
    """Devices it asked for: to start on so many is never too many."""
    moves: bool = False
    """Whether it may go on on another device type than the one it holds."""

    @property
    def count(self) -> int:
        """Devices it is to have."""
        return self.ladder.counts[self.rank] if self.rank else 0

    @property
    def ladder(self) -> Ladder:
        """Its ladder on the type it is on."""
        ladder = self.ladders[self.kind]
        assert ladder is not None
        return ladder


def climb(climbers: list[Climber], free: list[int], *, horizon_s: float, loyalty: float) -> None:
    """Give steps to the largest gain until nothing is free or nothing gains; changes both arguments."""
    steps: list[tuple[float, float, int, int, int]] = []

    def look(index: int, kind: int) -> None:
        climber = climbers[index]
        found = _step(climber, kind, free[kind], horizon_s, loyalty) if free[kind] > 0 else None
        if found:
            heapq.heappush(steps, (-found[0], climber.tie, index, kind, found[1]))

    def give() -> None:
        while steps:
            _, _, index, kind, rank = heapq.heappop(steps)
            climber = climbers[index]
            if climber.rank and climber.kind != kind:
                continue  # it went to another type in the meantime
            ladder = climber.ladders[kind]
            assert ladder is not None
            extra = ladder.counts[rank] - climber.count
            if extra <= free[kind]:
                free[kind] -= extra
                climber.kind, climber.rank = kind, rank
            look(index, kind)

    for index, climber in enumerate(climbers):
        for kind in _kinds(climber):
            look(index, kind)
    give()
    for index, climber in enumerate(climbers):
        if climber.moves and not climber.rank and climber.held_rank and len(free) > 1:
            for kind in _all_kinds(climber):  # the type it held went to others
                look(index, kind)
    give()


def move(climbers: list[Climber], free: list[int], *, horizon_s: float) -> bool:
    """Let jobs go on on a faster device type that is free, where that pays; whether any does."""
    any_ = False
    movers = [c for c in climbers if c.moves and c.rank and c.kind == c.held_kind]
    for climber in sorted(movers, key=lambda c: (-c.weight, c.tie)):
        best = (climber.ladder.speeds[climber.rank], climber.kind, climber.rank)
        for kind, ladder in enumerate(climber.ladders):
            if ladder is None or kind == climber.kind:
                continue
            for rank in ladder.levels:
                faster = ladder.speeds[rank]
                lasts = min(horizon_s, climber.left / faster)
                gains = (faster - best[0]) * lasts > faster * ladder.pauses[rank]
                if gains and ladder.counts[rank] <= free[kind]:
                    best = (faster, kind, rank)
        if best[1] != climber.kind:
            free[climber.kind] += climber.count
            climber.kind, climber.rank = best[1:]
            free[climber.kind] -= climber.count
            any_ = True
    return any_


def lift(climber: Climber, need: float, free: list[int]) -> None:
    """Take a job at once to the lowest rank with this speed, or to the fastest there is room for."""
    best: tuple[bool, float, int, int] | None = None
    for kind in _kinds(climber):
        ladder = climber.ladders[kind]
        assert ladder is not None
        for rank in ladder.levels:
            if ladder.counts[rank] > free[kind]:
                break
            speed = ladder.speeds[rank]
            enough = speed >= need
            found = (enough, -float(ladder.counts[rank]) if enough else speed, kind, rank)
            best = found if best is None or found[:2] > best[:2] else best
            if enough:
                break
    if best is not None:
        climber.kind, climber.rank = best[2], best[3]
        free[climber.kind] -= climber.count


def _kinds(climber: Climber) -> list[int]:
    """Types it can take a first step on: the one it is on, else the one it holds, else all."""
    if climber.rank:
        return [climber.kind]
    if climber.held_rank:
        return [climber.held_kind]
    return _all_kinds(climber)


def _all_kinds(climber: Climber) -> list[int]:
    return [kind for kind, ladder in enumerate(climber.ladders) if ladder is not None and ladder.levels]


def _step(climber: Climber, kind: int, room: int, horizon_s: float, loyalty: float) -> tuple[float, int] | None:
    """(gain per device, rank) of the best step with at most `room` devices; None where none brings anything.

    A step may leave ranks out: where two devices bring little and four bring much, it goes to four at once. One beyond
    what the job holds has to bring more than its pause costs, as long as it may last. A job that starts pauses anyway:
    there only the longer pause counts, and none on the devices it asked for.
    """
    ladder, rank = climber.ladders[kind], climber.rank
    assert ladder is not None
    counts, speeds, pauses = ladder.counts, ladder.speeds, ladder.pauses
    held = climber.held_rank if climber.held_kind == kind else 0
    below = held or rank
    starts_on = 0 if held else climber.asked
    known_pause = 0.0 if held else pauses[below]
    has, speed, weight, unit = counts[rank], speeds[rank], climber.weight, climber.unit
    best, step = 0.0, 0
    for above in ladder.above[rank]:
        count, faster = counts[above], speeds[above]
        if count - has > room:
            break
        gain = weight * (faster - speed) / (count - has) / unit
        if above <= held:
            gain *= loyalty
        elif not climber.bold:
            break
        elif below and count > starts_on:
            lasts = min(horizon_s, climber.left / faster)
            if (faster - speeds[below]) * lasts <= faster * (pauses[above] - known_pause):
                break
        if not step or gain > best:
            best, step = gain, above
    return (best, step) if step else None
