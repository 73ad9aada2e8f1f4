"""ElasticFlow: deadlines that are promised and kept, and what is left where a device more brings most.

Gu et al., "ElasticFlow: An elastic serverless training platform for distributed deep learning" (ASPLOS
2023). Promised jobs get their minimum satisfactory share (4.1, `promise.py`, `filling.py`). What is left
goes step by step, to the next power of two, where it brings most work per device, in units of the job's own
planned work per device (4.2, algorithm 2): that is the device time a step saves later for the device time
it takes now. Soft deadlines and best effort take part in that, from nothing (4.4).

`edf-admission` and `edf-elastic` are the same without the one or the other half (6.4).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.filling import Claim, Ladder, Share
from concertina.policies.promise import Claims, Outlook, Terms, claims_of, look_ahead
from concertina.policies.table import Table


@dataclass(slots=True)
class Climber:
    """A job on its way up from its share."""

    row: int
    kind: int
    ladder: Ladder
    rank: int
    """Rank it has by now."""
    held: int
    """Rank it holds; 0: none of this type."""
    worth: float
    """Devices per speed as planned: what a unit of its speed is worth."""
    tie: float
    """Of equal steps the smaller goes first."""
    left: float
    bold: bool
    """Whether it may lose a few seconds in order to gain more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFlowPolicy:
    """Promises first, marginal return for the rest."""

    name: str = "elasticflow"
    paper: str = "Gu et al. (ASPLOS 2023)"
    admission: str = "promise"
    terms: Terms = field(default_factory=Terms)
    horizon_s: float = 600.0
    """How long a job is expected to keep devices beyond its share: a change has to pay off in that time."""
    loyalty: float = 1.2
    """How much more a step is worth that only keeps what a job holds."""

    def allocate(self, table: Table) -> Shares:
        """Minimum shares, then steps by marginal return."""
        claims = claims_of(table, self.terms)
        outlook = look_ahead(claims, self.terms)
        free = list(table.capacity)
        climbers: list[Climber] = []
        for row, share in outlook.shares.items():
            climber = self._promised(table, row, share, outlook.claims[row])
            climbers.append(climber)
            free[share.kind] -= climber.ladder.counts[share.rank]
        climbers += self._others(claims, outlook, free)
        self._climb(climbers, free)
        workers, kinds = np.zeros(len(table), dtype=np.int64), np.full(len(table), -1, dtype=np.int64)
        levels = np.zeros(len(table), dtype=np.int64)
        wake = math.inf
        for climber in climbers:
            if climber.rank:
                workers[climber.row] = climber.ladder.counts[climber.rank]
                kinds[climber.row] = climber.kind
            planned = outlook.shares.get(climber.row)
            if planned is not None:
                levels[climber.row] = planned.level
                if climber.rank < planned.level:
                    wake = min(wake, planned.grows_s)
        wake_s = None if wake == math.inf else max(wake, table.now + 1.0)
        reserved = outlook.reserved(table)
        return Shares(workers=workers, kind=kinds, level=levels, wake_s=wake_s, reserved=reserved, tried=outlook.tried)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its promise, or what the promises leave."""
        return self.explainer(table)(row, before, after)

    def explainer(self, table: Table) -> Callable[[int, int, int], str]:
        """The same for many rows of this table."""
        known: list[Outlook] = []

        def explain(row: int, before: int, after: int) -> str:
            if math.isinf(table.deadline[row]) or table.specs[row].soft:
                what = "best effort" if math.isinf(table.deadline[row]) else "soft deadline"
                left = "1 device is" if after == 1 else f"{after} devices are"
                return f"{what}: {left} left by the promises and by steps that bring more"
            if not known:
                known.append(look_ahead(claims_of(table, self.terms), self.terms))
            return _promise_of(known[0], row, after)

        return explain

    def _promised(self, table: Table, row: int, share: Share, claim: Claim) -> Climber:
        ladder = claim.ladders[share.kind]
        assert ladder is not None
        held = claim.rank if claim.kind == share.kind else 0
        deadline = float(table.deadline[row])
        worth = ladder.counts[share.level] / ladder.speeds[share.level]
        slack = self.terms.due(table.now, deadline, self.terms.defended) - share.finish_s
        bold = slack > 2.0 * ladder.pauses[-1]
        return Climber(row, share.kind, ladder, share.rank, held, worth, deadline, claim.left, bold)

    def _others(self, claims: Claims, outlook: Outlook, free: Sequence[int]) -> list[Climber]:
        """Jobs without a promise: soft deadlines by deadline, then best effort, the shortest first."""
        table = claims.table
        rows = [row for row in range(len(table)) if row not in outlook.claims]
        if not rows:
            return []
        found = []
        time_left = table.time_left()
        for row in rows:
            claim = claims.of(row)
            kind = _roomiest(claim, free)
            ladder = claim.ladders[kind] if kind >= 0 else None
            if ladder is None:
                continue
            first = ladder.levels[0]
            worth = ladder.counts[first] / ladder.speeds[first]
            deadline = float(table.deadline[row])
            tie = deadline if math.isfinite(deadline) else 1e15 + float(time_left[row])
            held = claim.rank if claim.kind == kind else 0
            found.append(Climber(row, kind, ladder, 0, held, worth, tie, claim.left, True))
        return found

    def _climb(self, climbers: list[Climber], free: list[int]) -> None:
        """Give steps to the largest return until nothing is free or nothing gains."""
        steps = []
        for index, climber in enumerate(climbers):
            if free[climber.kind] > 0 and (step := self._step(climber)):
                steps.append((-step[0], climber.tie, index, step[1]))
        heapq.heapify(steps)
        while steps:
            _, tie, index, rank = heapq.heappop(steps)
            climber = climbers[index]
            extra = climber.ladder.counts[rank] - climber.ladder.counts[climber.rank]
            if extra > free[climber.kind]:
                continue
            free[climber.kind] -= extra
            climber.rank = rank
            if free[climber.kind] > 0 and (step := self._step(climber)):
                heapq.heappush(steps, (-step[0], tie, index, step[1]))

    def _step(self, climber: Climber) -> tuple[float, int] | None:
        """(return per device, rank) of the next step, or None where it brings nothing."""
        ladder, rank = climber.ladder, climber.rank
        above = ladder.next_above(rank)
        if not above:
            return None
        speed, faster = ladder.speeds[rank], ladder.speeds[above]
        gain = (faster - speed) / (ladder.counts[above] - ladder.counts[rank]) * climber.worth
        if above <= climber.held:
            return gain * self.loyalty, above
        if rank == climber.held:
            if not climber.bold:
                return None
            lasts = min(self.horizon_s, climber.left / faster)
            if rank and (faster - speed) * lasts <= faster * ladder.pauses[above]:
                return None
        return gain, above


def _promise_of(outlook: Outlook, row: int, after: int) -> str:
    share = outlook.shares.get(row)
    if share is None or row in outlook.late:
        return "its deadline can not be met with the devices there are; only promises that can be kept come first"
    count = outlook.claims[row].ladders[share.kind].counts[share.rank]  # type: ignore[union-attr]
    least = f"{'1 device is' if count == 1 else f'{count} devices are'} enough now for its deadline"
    return least if after <= count else f"{least}; further ones bring most here"


def _roomiest(claim: Claim, free: Sequence[int]) -> int:
    """The type held, else the one with most free devices among those the job can use; -1: none."""
    kinds = [kind for kind, ladder in enumerate(claim.ladders) if ladder is not None and ladder.top]
    if claim.kind >= 0:
        return claim.kind
    return max(kinds, key=lambda kind: (free[kind], -kind), default=-1)
