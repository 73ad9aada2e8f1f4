"""Our own policy: promises first, then the shortest jobs first as far as devices speed them up, nobody starves.

Jobs with a strict deadline get their minimum satisfactory share (`promise.py`, as `elasticflow`). What is left
goes step by step, to the next power of two, where it brings most (`climb.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.climb import Climber, climb
from concertina.policies.elasticflow import ElasticFlowPolicy
from concertina.policies.filling import Claim, Share
from concertina.policies.promise import Outlook, Terms, claim_of, look_ahead
from concertina.policies.table import Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcertinaPolicy:
    """Promises, then marginal gain weighed by who would wait for it."""

    name: str = "concertina"
    paper: str = "this project; ElasticFlow, heSRPT (Berg et al. 2020) and Themis in one"
    admission: str = "promise"
    terms: Terms = field(default_factory=Terms)
    horizon_s: float = 600.0
    """How long a job is expected to keep devices: a change has to pay off in that time."""
    loyalty: float = 1.2
    """How much more a step is worth that only keeps what a job holds."""
    bias: float = 0.7
    """How much shorter jobs go first: 0 not at all, 1 as if devices sped up every job in proportion."""
    promised: float = 1.0
    """What device time saved on a promised job is worth, in units of the longest job's."""

    def allocate(self, table: Table) -> Shares:
        """Minimum shares, the floor, then steps by gain."""
        loose = loose_rows(table)
        if not loose.size:
            return self._alone().allocate(table)
        outlook = look_ahead(table, self.terms)
        free = list(table.capacity)
        climbers = [self._promised(table, row, share, outlook.claims[row]) for row, share in outlook.shares.items()]
        for climber in climbers:
            free[climber.kind] -= climber.count
        climbers += self._loose(table, outlook, loose, free)
        climb(climbers, free, horizon_s=self.horizon_s, loyalty=self.loyalty)
        return self._shares(table, outlook, climbers)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its promise, or what the promises leave."""
        if math.isfinite(table.deadline[row]) and not table.specs[row].soft:
            return self._alone().explain(table, row, before, after)
        return "best effort"

    def _alone(self) -> ElasticFlowPolicy:
        """The rule for promised jobs among themselves."""
        return ElasticFlowPolicy(terms=self.terms, horizon_s=self.horizon_s, loyalty=self.loyalty)

    def _promised(self, table: Table, row: int, share: Share, claim: Claim) -> Climber:
        ladder = claim.ladders[share.kind]
        assert ladder is not None
        slack = self.terms.due(table.now, float(table.deadline[row]), self.terms.defended) - share.finish_s
        return Climber(
            row=row,
            ladders=claim.ladders,
            left=claim.left,
            held_kind=claim.kind,
            held_rank=claim.rank,
            weight=self.promised,
            unit=float(ladder.speeds[share.level]) / ladder.counts[share.level],
            tie=float(table.deadline[row]),
            bold=slack > 2.0 * float(ladder.pauses[-1]),
            kind=share.kind,
            rank=share.rank,
        )

    def _loose(self, table: Table, outlook: Outlook, rows: Ints, free: Sequence[int]) -> list[Climber]:
        """The jobs without a promise that can come into question."""
        left = table.left()
        size = table.time_left()[rows] * table.gpus[rows]
        weights = weights_by_rank(size, self.bias)
        order = np.argsort(size, kind="stable")
        room = max(sum(free), 0)
        chosen = order[(np.arange(len(order)) < room) | (table.held[rows[order]] > 0)]
        found = []
        for index in chosen.tolist():
            row = int(rows[index])
            claim = claim_of(table, row, float(left[row]), outlook.ladders, elastic=True)
            found.append(
                Climber(
                    row=row,
                    ladders=claim.ladders,
                    left=claim.left,
                    held_kind=claim.kind,
                    held_rank=claim.rank,
                    weight=float(weights[index]),
                    unit=best_unit(claim),
                    tie=1e15 + float(size[index]),
                )
            )
        return [climber for climber in found if climber.unit > 0]

    @staticmethod
    def _shares(table: Table, outlook: Outlook, climbers: list[Climber]) -> Shares:
        workers, kinds = np.zeros(len(table), dtype=np.int64), np.full(len(table), -1, dtype=np.int64)
        levels = np.zeros(len(table), dtype=np.int64)
        wake = math.inf
        for climber in climbers:
            if climber.rank:
                workers[climber.row], kinds[climber.row] = climber.count, climber.kind
            planned = outlook.shares.get(climber.row)
            if planned is not None:
                levels[climber.row] = planned.level
                if climber.rank < planned.level:
                    wake = min(wake, planned.grows_s)
        wake_s = None if wake == math.inf else max(wake, table.now + 1.0)
        return Shares(workers=workers, kind=kinds, level=levels, wake_s=wake_s)


def loose_rows(table: Table) -> Ints:
    """Rows without a promise: no deadline, or a soft one."""
    strict = np.isfinite(table.deadline)
    for row in np.flatnonzero(strict).tolist():
        if table.specs[row].soft:
            strict[row] = False
    return np.flatnonzero(~strict)


def weights_by_rank(size: Floats, bias: float) -> Floats:
    """What a job's work is worth: the more jobs are longer, the more wait for it to be done."""
    order = np.argsort(-size, kind="stable")
    weights = np.empty(len(size))
    weights[order] = np.arange(1, len(size) + 1) ** bias
    return weights


def best_unit(claim: Claim) -> float:
    """Speed per device at the first step, on the type where that is best; 0: it can run nowhere."""
    found = 0.0
    for ladder in claim.ladders:
        if ladder is not None and ladder.levels:
            first = ladder.levels[0]
            found = max(found, float(ladder.speeds[first]) / ladder.counts[first])
    return found
