"""Our own policy: promises first, then the shortest jobs first as far as devices speed them up, nobody starves.

Jobs with a strict deadline get their minimum satisfactory share (`promise.py`, as `elasticflow`); where those have
time, others with less than their fair share are planned in beside them (`fair_promise.py`). A job that is on its
way to twice its fair time comes next (`fairness.py`). What is left goes step by step, to the next power of two, where
it brings most (`climb.py`). Why it is so: docs/adr/0102-our-own-policy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.climb import Climber, climb, lift, move
from concertina.policies.elasticflow import ElasticFlowPolicy
from concertina.policies.fair_promise import loose_rows, wished
from concertina.policies.fairness import FLOOR, fairness_of, notes
from concertina.policies.filling import Claim, Ladder, Share
from concertina.policies.promise import Claims, Entry, Outlook, Terms, arrange_within, claims_of, entry_of, look_ahead
from concertina.policies.table import Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcertinaPolicy:
    """Promises, the floor, then marginal gain weighed by who would wait for it."""

    name: str = "concertina"
    paper: str = "this project; ElasticFlow, heSRPT (Berg et al. 2020) and Themis in one"
    admission: str = "promise-fair"
    terms: Terms = field(default_factory=Terms)
    horizon_s: float = 600.0
    """How long a job is expected to keep devices: a change has to pay off in that time."""
    loyalty: float = 1.2
    """How much more a step is worth that only keeps what a job holds."""
    bias: float = 0.7
    """How much shorter jobs go first: 0 not at all, 1 as if devices sped up every job in proportion."""
    promised: float = 0.3
    """What device time saved on a promised job is worth, in units of the longest job's."""
    floor: float = FLOOR
    """Finish-time fairness from which a job without a promise comes before the shorter ones."""
    relief: float = 0.2
    """How far below that a job that runs must be to step back again."""
    limit: float = 2.2
    """Finish-time fairness that no job shall exceed."""
    wishes: int = 100
    """Jobs without a promise that a plan looks at: more would take too long."""
    lease_s: float = 300.0
    """How long a choice holds among jobs below the floor."""
    pause_s: float = 15.0
    """How soon a round may follow another that nothing but the floor asks for."""

    def allocate(self, table: Table) -> Shares:
        """Minimum shares, the floor, then steps by gain."""
        rows = loose_rows(table)
        if not rows.size:
            return self._alone().allocate(table)
        claims = claims_of(table, self.terms)
        outlook = look_ahead(claims, self.terms)
        crowd = self._crowd(claims, rows)
        climbers = self._settle(crowd, outlook)
        if outlook.shares and self._behind(crowd, climbers):
            better = self._with_wishes(crowd, outlook)
            if better is not None:
                better.tried = outlook.tried
                outlook, climbers = better, self._settle(crowd, better)
        return self._shares(crowd, outlook, climbers)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its promise; or how it fares beside its fair share, and who goes first."""
        return self.explainer(table)(row, before, after)

    def explainer(self, table: Table) -> Callable[[int, int, int], str]:
        """The same for many rows of this table."""
        rows = loose_rows(table)
        promised, loose = self._alone().explainer(table), set(rows.tolist())
        crowd = self._crowd(claims_of(table, self.terms), rows) if loose else None

        def explain(row: int, before: int, after: int) -> str:
            if crowd is None or row not in loose:
                return promised(row, before, after)
            return self._fare(crowd, row, before, after)

        return explain

    def _fare(self, crowd: Crowd, row: int, before: int, after: int) -> str:
        """How a job without a promise fares."""
        place = crowd.place[row]
        rho, shorter = float(crowd.fair.rho[place]), int(np.sum(crowd.size < crowd.size[place]))
        expected = f"expected to take {rho:.1f} times its fair time"
        if rho >= self.floor:
            expected += f" (the floor is {self.floor:g})"
        promises = len(crowd.rows) < len(crowd.table)
        alone = len(crowd.table) == 1
        if alone and not after:
            return expected
        if after > before or alone:
            devices = "1 device" if after == 1 else f"{after} devices"
            use = "is" if after == 1 else "are"
            return f"{f'promises leave it {devices}' if promises else f'{devices} {use} of most use here'}; {expected}"
        others = "1 job" if shorter == 1 else f"{shorter} jobs"
        first = f"{others} with less to do" if shorter else "jobs behind their fair share"
        comes = "come first" if promises or shorter != 1 else "comes first"
        return f"{f'promises and {first}' if promises else first} {comes}; {expected}"

    def _crowd(self, claims: Claims, rows: Ints) -> Crowd:
        return Crowd(claims, rows, self.bias, self.loyalty)

    def _alone(self) -> ElasticFlowPolicy:
        """The rule for promised jobs among themselves."""
        return ElasticFlowPolicy(terms=self.terms, horizon_s=self.horizon_s, loyalty=self.loyalty)

    def _promised(self, table: Table, row: int, deadline: float, share: Share, claim: Claim) -> Climber:
        ladder = claim.ladders[share.kind]
        assert ladder is not None
        slack = self.terms.due(table.now, deadline, self.terms.defended) - share.finish_s
        return Climber(
            row=row,
            ladders=claim.ladders,
            left=claim.left,
            held_kind=claim.kind,
            held_rank=claim.rank,
            weight=self.promised,
            unit=ladder.speeds[share.level] / ladder.counts[share.level],
            tie=deadline,
            bold=slack > 2.0 * ladder.pauses[-1],
            kind=share.kind,
            rank=share.rank,
        )

    def _settle(self, crowd: Crowd, outlook: Outlook) -> list[Climber]:
        """Who gets what, given what the promises (and the wishes that were granted) take."""
        table, free = crowd.table, list(crowd.table.capacity)
        granted = {row: share for row, share in outlook.shares.items() if row not in crowd.place}
        climbers = [
            self._promised(table, row, crowd.deadlines[row], share, outlook.claims[row])
            for row, share in granted.items()
        ]
        for climber in climbers:
            free[climber.kind] -= climber.count
        needy = self._needy(crowd)
        loose = self._loose(crowd, needy, free)
        for row, share in outlook.shares.items():
            place = crowd.place.get(row)
            if place in loose and share.rank and row not in outlook.late:
                loose[place].kind, loose[place].rank = share.kind, share.rank
                free[share.kind] -= loose[place].count
        self._lift(crowd, needy, loose, free)
        climbers += loose.values()
        climb(climbers, free, horizon_s=self.horizon_s, loyalty=self.loyalty)
        if len(free) > 1 and move(climbers, free, horizon_s=self.horizon_s):
            climb(climbers, free, horizon_s=self.horizon_s, loyalty=self.loyalty)
        return climbers

    @staticmethod
    def _behind(crowd: Crowd, climbers: list[Climber]) -> bool:
        """Whether some job without a promise gets less than its fair share."""
        fast = {c.row for c in climbers if c.rank and c.ladder.speeds[c.rank] >= crowd.fair_speed(c.row)}
        return any(row not in fast for row in crowd.rows.tolist())

    def _with_wishes(self, crowd: Crowd, outlook: Outlook) -> Outlook | None:
        """A plan in which jobs without a promise get their fair share too, and no promise suffers.

        Those below the floor come first, ahead of all that could be done later; then the shortest. If that is
        too much, with fewer of both.
        """
        bounds = self._bounds(crowd, outlook)
        terms = replace(self.terms, attempts=0)
        needy, short = self._needy(crowd)[: self.wishes], crowd.order[: self.wishes].tolist()
        wishes = self._wishes(crowd, needy, short, terms)
        while needy or short:
            some = [wishes[place] for place in dict.fromkeys([*needy, *short]) if place in wishes]
            first = {wishes[place].row for place in needy if place in wishes}
            order = sorted(
                [*outlook.entries, *some], key=lambda entry: (entry.row not in first, entry.deadline, entry.row)
            )
            plan = arrange_within(crowd.claims, order, terms, bounds, outlook.late)
            if plan is not None:
                return plan
            needy, short = needy[: len(needy) // 4], short[: len(short) // 4]
        return None

    def _wishes(self, crowd: Crowd, needy: list[int], short: list[int], terms: Terms) -> dict[int, Entry]:
        """What these jobs without a promise are wished, by their place: their fair share, from now on for the needy."""
        table, fair, rows = crowd.table, crowd.fair, crowd.rows
        deadlines = wished(table, rows, fair.fair_s, fair.rest_s, terms)
        at_once = fair.rest_s[needy] / fair.crowd
        deadlines[needy] = wished(table, rows[needy], at_once, at_once, terms)
        found = {}
        for place in dict.fromkeys([*needy, *short]):
            row, deadline = int(rows[place]), float(deadlines[place])
            if not table.specs[row].soft:
                found[place] = entry_of(crowd.claims.of(row), row, deadline, 0, table.now, terms)
        return found

    def _bounds(self, crowd: Crowd, outlook: Outlook) -> dict[int, float]:
        """When promised jobs have to be done: with all their spare left, or no later than they are without wishes.

        So with those that are late: a promise that was lost, with nodes or slots, comes before all wishes.
        """
        return {
            row: max(self.terms.due(crowd.table.now, crowd.deadlines[row]), share.finish_s)
            for row, share in outlook.shares.items()
        }

    def _loose(self, crowd: Crowd, needy: Sequence[int], free: Sequence[int]) -> dict[int, Climber]:
        """The jobs without a promise that can come into question, by their place among these."""
        room = max(sum(free), 0)
        chosen = {*crowd.order[:room].tolist(), *np.flatnonzero(crowd.held).tolist(), *needy[:room]}
        rows, weights, sizes, asked = crowd.columns
        found = {}
        for place in sorted(chosen):
            row = rows[place]
            claim = crowd.claims.of(row)
            unit = crowd.unit(row)
            if unit > 0:
                found[place] = Climber(
                    row=row,
                    ladders=claim.ladders,
                    left=claim.left,
                    held_kind=claim.kind,
                    held_rank=claim.rank,
                    weight=weights[place],
                    unit=unit,
                    tie=1e15 + sizes[place],
                    asked=asked[row],
                    moves=True,
                )
        return found

    def _needy(self, crowd: Crowd) -> list[int]:
        """Places of the jobs below the floor: those at the limit, the worst first, then the shortest."""
        rho = crowd.fair.rho
        needy = np.flatnonzero(rho >= np.where(crowd.held > 0, self.floor - self.relief, self.floor))
        worst = np.maximum(rho[needy], self.limit)
        order: list[int] = needy[np.lexsort((crowd.size[needy], -worst))].tolist()
        return order

    def _lift(self, crowd: Crowd, needy: Sequence[int], loose: dict[int, Climber], free: list[int]) -> None:
        """Give the jobs below the floor what brings them home in time, as far as there is."""
        for place in needy:
            if max(free) <= 0:
                return
            climber = loose.get(place)
            if climber is None or climber.rank:
                continue
            row = climber.row
            goal = float(crowd.table.submit[row] + self.limit * crowd.fair.fair_s[place] - crowd.table.now)
            lift(climber, max(crowd.fair_speed(row), climber.left / max(goal, 1.0)), free)

    def _shares(self, crowd: Crowd, outlook: Outlook, climbers: list[Climber]) -> Shares:
        table, n = crowd.table, len(crowd.table)
        workers, kinds = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        levels, speed = np.zeros(n, dtype=np.int64), np.zeros(n)
        wake = math.inf
        for climber in climbers:
            if climber.rank:
                workers[climber.row], kinds[climber.row] = climber.count, climber.kind
                speed[climber.row] = climber.ladder.speeds[climber.rank]
            planned = outlook.shares.get(climber.row)
            if planned is not None:
                levels[climber.row] = planned.level
                if climber.rank < planned.level:
                    wake = min(wake, max(planned.grows_s, table.now + 1.0))
        wake = min(wake, self._next_needy(crowd, speed[crowd.rows]))
        levels, stamps = notes(table, crowd.rows, crowd.fair, levels)
        return Shares(
            workers=workers,
            kind=kinds,
            level=levels,
            stamp=stamps,
            reserved=outlook.reserved(table),
            tried=outlook.tried,
            wake_s=None if wake == math.inf else wake,
        )

    def _next_needy(self, crowd: Crowd, speed: Floats) -> float:
        """When the next job falls below the floor if nothing else happens, or a lease of those below it ends."""
        fair, now = crowd.fair, crowd.table.now
        falls = 1.0 - speed * fair.crowd / crowd.table.asked_speed[crowd.rows]
        slow, below = falls > 1e-6, fair.rho >= self.floor
        wake = now + self.lease_s if bool(np.any(below & slow)) else math.inf
        above = slow & ~below
        if above.any():
            after = (self.floor - fair.rho[above]) * fair.fair_s[above] / falls[above]
            wake = min(wake, now + max(float(after.min()), self.pause_s))
        return wake


class Crowd:
    """The jobs without a promise, by columns."""

    def __init__(self, claims: Claims, rows: Ints, bias: float, loyalty: float) -> None:
        table = claims.table
        self.table, self.rows = table, rows
        self.claims = claims if claims.elastic else Claims(table, claims.ladders, elastic=True)
        self.place = {row: place for place, row in enumerate(rows.tolist())}
        self.held: Ints = table.held[rows]
        self.size: Floats = table.time_left()[rows] * table.gpus[rows]
        """Device-seconds to go on the devices asked for."""
        eager: Floats = np.where(self.held > 0, self.size / loyalty, self.size)
        """So that nobody is stopped for a job that is hardly shorter."""
        self.order: Ints = np.argsort(eager, kind="stable")
        self.weights = weights_by_rank(eager, bias)
        self.fair = fairness_of(table, rows)
        self.columns: tuple[list[int], list[float], list[float], list[int]] = (
            rows.tolist(), self.weights.tolist(), self.size.tolist(), table.gpus.tolist(),
        )  # fmt: skip
        """Rows, weights and sizes by place, devices asked for by row: to be read one by one."""
        self.deadlines: list[float] = table.deadline.tolist()
        self._fair_speeds: list[float] = (table.asked_speed / self.fair.crowd).tolist()
        self._units: dict[int, float] = {}

    def fair_speed(self, row: int) -> float:
        """The speed of its fair share."""
        return self._fair_speeds[row]

    def unit(self, row: int) -> float:
        """Speed per device at a job's first step."""
        ladders = self.claims.of(row).ladders
        found = self._units.get(id(ladders))
        if found is None:
            found = self._units[id(ladders)] = best_unit(ladders)
        return found


def weights_by_rank(size: Floats, bias: float) -> Floats:
    """What a job's work is worth: the more jobs are longer, the more wait for it to be done."""
    order = np.argsort(-size, kind="stable")
    weights = np.empty(len(size))
    weights[order] = np.arange(1, len(size) + 1) ** bias
    return weights


def best_unit(ladders: Sequence[Ladder | None]) -> float:
    """Speed per device at the first step, on the type where that is best; 0: it can run nowhere."""
    found = 0.0
    for ladder in ladders:
        if ladder is not None and ladder.levels:
            first = ladder.levels[0]
            found = max(found, ladder.speeds[first] / ladder.counts[first])
    return found
