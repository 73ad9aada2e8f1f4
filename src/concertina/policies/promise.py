"""Deadlines that are promised: which jobs can all be in time, and whether one more can (ElasticFlow 4.1).

A promise is made with a margin for what nobody can foresee (step times that vary, workers that are started
anew), defended with part of it, and only then kept to the second. Pure arithmetic on a table of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from concertina.core.job import JobSpec, Reserved
from concertina.policies.filling import Claim, Filling, Ladders, Run, Share, sizes_of
from concertina.policies.table import Table
from concertina.policies.terms import Terms as Terms


@dataclass(slots=True)
class Entry:
    """A promise to be kept, or to be made."""

    claim: Claim
    row: int
    """-1: the newcomer."""
    deadline: float
    dues: tuple[float, ...]
    """When it has to be done, the wish before the need."""
    level: int
    """The level of an earlier round; 0: none yet."""
    kind: int = -1
    runs: tuple[Run, ...] = ()
    """What an earlier round has planned, and on which device type; empty: nothing."""
    finish_s: float = 0.0
    """When it would be done by that."""
    lost: bool = False
    """Whether it would be late even if it were alone."""


@dataclass(slots=True)
class Outlook:
    """Every promised job filled in, by row."""

    filling: Filling
    entries: list[Entry]
    """The jobs filled in, by deadline."""
    claims: dict[int, Claim]
    shares: dict[int, Share] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    """Rows that can not be in time."""
    lost: int = 0
    """How many of these could not even if they were alone: no other arrangement helps them."""
    tried: int = 0
    """Jobs filled in for other arrangements than the first."""
    short_s: float = 0.0
    """Seconds that jobs in time lack of the spare they should have, over all of them."""

    @property
    def loss(self) -> tuple[int, float]:
        """What is wrong with it: (0, 0) for nothing, less is better."""
        return len(self.late) - self.lost, self.short_s

    def reserved(self, table: Table, newcomer: str = "") -> dict[str, Reserved]:
        """What each job is to hold from when on, by job id; row -1 is the newcomer."""
        found = {}
        for row, share in self.shares.items():
            if row not in self.late:
                counts = self.claims[row].ladders[share.kind].counts  # type: ignore[union-attr]
                runs = tuple((begin, share.kind, counts[rank]) for begin, rank in share.runs)
                found[newcomer if row < 0 else table.specs[row].id] = (*runs, (share.finish_s, share.kind, 0))
        return found


def promised_rows(table: Table) -> list[int]:
    """Rows with a strict deadline, by deadline (then by submission)."""
    strict = [row for row in np.argsort(table.deadline, kind="stable").tolist() if not table.specs[row].soft]
    return [row for row in strict if math.isfinite(table.deadline[row])]


class Claims:
    """The jobs of a table, each with what it holds and how fast it was seen to be: made once for a whole decision."""

    def __init__(self, table: Table, ladders: Ladders, *, elastic: bool) -> None:
        self.table, self.ladders, self.elastic = table, ladders, elastic
        self._left: list[float] = table.left().tolist()
        self._allowed: list[int] = table.allowed.tolist()
        self._held: list[int] = table.held.tolist()
        self._known: dict[int, Claim] = {}

    def of(self, row: int) -> Claim:
        """The job in a row."""
        found = self._known.get(row)
        if found is None:
            found = self._known[row] = self._make(row)
        return found

    def _make(self, row: int) -> Claim:
        table, held = self.table, self._held[row]
        sizes = sizes_of(table.specs[row], elastic=self.elastic)
        steps = self.ladders.by_type(table.curves[row], self._allowed[row], sizes)
        claim = Claim(self._left[row], steps)
        if held:
            kind = int(table.kind[row])
            ladder = steps[kind]
            rank = 0 if ladder is None else ladder.rank_holding(held)
            if ladder is not None and rank:
                claim.kind, claim.rank = kind, rank
                claim.busy_s = max(float(table.resume[row]) - table.now, 0.0)
                claim.pace = min(float(table.speed[row]) / ladder.speeds[rank], 1.0) or 1.0
        return claim


def entries_of(claims: Claims, terms: Terms) -> list[Entry]:
    """The promises of a table, by deadline."""
    table = claims.table
    rows = promised_rows(table)
    deadlines, levels = table.deadline.tolist(), table.level.tolist()
    found = [entry_of(claims.of(row), row, deadlines[row], levels[row], table.now, terms) for row in rows]
    if table.reserved:
        for entry in found:
            _recall(entry, table.reserved.get(table.specs[entry.row].id, ()))
    return found


def entry_of(claim: Claim, row: int, deadline: float, level: int, now: float, terms: Terms) -> Entry:
    """A promise to a job; nothing was planned for it yet."""
    dues = (terms.due(now, deadline, terms.defended), deadline)
    return Entry(claim, row, deadline, dues, level, lost=now + _alone_s(claim) > deadline)


def _alone_s(claim: Claim) -> float:
    """Seconds a job takes on all devices it can use."""
    best = math.inf
    for kind, ladder in enumerate(claim.ladders):
        if ladder is not None and ladder.top:
            stays = claim.kind == kind and claim.rank == ladder.top
            pause = claim.busy_s if stays else 0.0
            best = min(best, pause + claim.left / claim.pace / ladder.speeds[-1])
    return best


def _recall(entry: Entry, reserved: Reserved) -> None:
    """Write down what was reserved for a job, unless it has no such ranks any more."""
    if len(reserved) < 2:
        return
    kind = reserved[0][1]
    ladder = entry.claim.ladders[kind] if kind < len(entry.claim.ladders) else None
    if ladder is not None and all(not count or ladder.rank_holding(count) for _, _, count in reserved):
        entry.kind, entry.finish_s = kind, reserved[-1][0]
        entry.runs = tuple((begin, ladder.rank_holding(count)) for begin, _, count in reserved[:-1])


def claims_of(table: Table, terms: Terms, newcomer: JobSpec | None = None) -> Claims:
    """The jobs of a table on these terms, with sizes for one that may come."""
    fewest: set[int] = set()
    if any(count & (count - 1) for count in table.capacity):  # else powers of two reach as far as there are devices
        specs = table.specs if newcomer is None else [*table.specs, newcomer]
        fewest = {sizes_of(spec, elastic=terms.elastic)[0] for spec in specs}
    return Claims(table, Ladders(table.types, table.capacity, terms.cost, fewest), elastic=terms.elastic)


class Effort:
    """What may still be spent on arrangements, and what was spent, in jobs filled in."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.spent = 0

    def spend(self, jobs: int) -> None:
        """What is done in any case."""
        self.left -= jobs
        self.spent += jobs

    def allows(self, jobs: int) -> bool:
        """Whether there is enough left for so many more, which are spent then."""
        enough = jobs <= self.left
        if enough:
            self.spend(jobs)
        return enough


def look_ahead(claims: Claims, terms: Terms) -> Outlook:
    """Fill in all promised jobs; those that can not be in time take what they can."""
    table, entries = claims.table, entries_of(claims, terms)
    jobs, back = len(entries), terms.kept_back(table.types)
    effort = Effort(terms.effort + jobs)
    best = arrange(claims, entries, terms, effort, less=back)
    if any(back) and best.loss > _NONE:  # the reserve is there for this
        best = _better(best, arrange(claims, entries, terms, effort))
    if best.loss[0] and terms.attempts:
        trials = [(0, True), *((fewer, asked) for fewer in terms.fewer for asked in (False, True))]
        for fewer, asked in trials:
            if (not asked and not best.loss[0]) or effort.left < jobs:
                break
            some = _as_promised(table, entries, terms) if asked else entries
            best = _better(best, arrange(claims, some, terms, effort, less=[fewer] * len(table.types)))
    best.entries, best.tried = entries, effort.spent - jobs
    return best


_NONE = (0, 0.0)
"""The loss of an outlook in which nothing is wrong."""


def _better(one: Outlook, other: Outlook) -> Outlook:
    return other if other.loss < one.loss else one


def _as_promised(table: Table, entries: list[Entry], terms: Terms) -> list[Entry]:
    """The promises as they were looked at when the newest of them was made."""
    newest = max(entries, key=lambda entry: entry.row)
    return [
        replace(entry, dues=(terms.due(table.now, entry.deadline),))
        if entry is newest
        else replace(entry, dues=entry.dues[:1])
        for entry in entries
    ]


def arrange(
    claims: Claims, entries: list[Entry], terms: Terms, effort: Effort, *, less: Sequence[int] = (), rush: bool = True
) -> Outlook:
    """The first arrangement in which nobody is late or short of spare, or the best, as far as the effort goes.

    Who is late keeps what it holds if that costs nobody else anything: it could be late because devices are away for a
    moment, and to stop it would only make it later. `less` are devices by type to leave out. Without `rush` nobody
    asks what those get who are late.
    """
    there = claims.table.capacity
    capacity = [max(count - fewer, 0) for count, fewer in zip(there, less or [0] * len(there), strict=True)]
    best = _arranged(claims, capacity, entries, terms, effort, rush=rush)
    stopped = _stopped(best, entries) if rush else []
    if not stopped:
        return best
    effort.spend(len(entries))
    kept = _fill_in(claims, capacity, entries, terms, keep=False, first=stopped)
    return kept if kept.loss <= best.loss else best


def _stopped(outlook: Outlook, entries: Sequence[Entry]) -> list[Entry]:
    """The late ones that have less than they hold."""
    late = set(outlook.late)
    return [entry for entry in entries if entry.row in late and _rank(outlook, entry) < entry.claim.rank]


def _rank(outlook: Outlook, entry: Entry) -> int:
    """What it has now; 0 where that is of another type than it holds."""
    share = outlook.shares.get(entry.row)
    return share.rank if share is not None and share.kind == entry.claim.kind else 0


def _arranged(
    claims: Claims, capacity: list[int], entries: list[Entry], terms: Terms, effort: Effort, *, rush: bool
) -> Outlook:
    """By deadline with levels as low as possible; exactly as the last round has planned, which is possible for as
    long as nothing came between; by deadline with the levels of the last round; with the late ones in front.
    """
    jobs = len(entries)
    effort.spend(jobs)
    best = _fill_in(claims, capacity, entries, terms, keep=False, rush=rush)
    if best.loss == _NONE or not terms.attempts:
        return best
    if any(entry.runs for entry in entries) and effort.allows(jobs):
        best = _better(best, _as_planned(claims, capacity, entries, rush=rush))
        if best.loss > _NONE and effort.allows(2 * jobs):
            delay = min(_delay(claims, capacity, entries), terms.spare_s)
            if delay > 0.0:
                best = _better(best, _as_planned(claims, capacity, entries, later=delay, rush=rush))
    order = entries
    for attempt in range(terms.attempts if best.loss[0] and terms.elastic else 0):
        if not effort.allows(jobs):
            break
        keep = attempt == 0
        if not keep:
            late = set(best.late)
            order = [e for e in order if e.row in late] + [e for e in order if e.row not in late]
        best = _better(best, _fill_in(claims, capacity, order, terms, keep=keep, rush=rush))
        if not best.loss[0]:
            break
    return best


def arrange_within(
    claims: Claims, entries: list[Entry], terms: Terms, bounds: Mapping[int, float], late: Collection[int] = ()
) -> Outlook | None:
    """In this order with levels as low as possible, if every row of `bounds` is done by then.

    None as soon as one is not: what comes after it would change nothing. Those of the rows `late` that still are keep
    what they hold, as in `arrange`.
    """
    back = terms.kept_back(claims.table.types)
    capacity = [max(count - fewer, 0) for count, fewer in zip(claims.table.capacity, back, strict=True)]
    plan = _fill_in(claims, capacity, entries, terms, keep=False, bounds=bounds)
    stopped = _stopped(plan, [entry for entry in entries if entry.row in late]) if late else []
    if stopped:
        kept = _fill_in(claims, capacity, entries, terms, keep=False, bounds=bounds, first=stopped)
        plan = kept if kept.loss <= plan.loss else plan
    in_time = all(row in plan.shares and plan.shares[row].finish_s <= end for row, end in bounds.items())
    return plan if in_time else None


def _fill_in(
    claims: Claims,
    capacity: list[int],
    entries: list[Entry],
    terms: Terms,
    *,
    keep: bool,
    rush: bool = True,
    bounds: Mapping[int, float] = MappingProxyType({}),
    first: Sequence[Entry] = (),
) -> Outlook:
    """One job after the other on its lowest level; as far as the first that is done later than its bound.

    Before them the `first`: late ones that stay on what they hold.
    """
    outlook = _empty(claims, capacity, entries)
    waiting: list[Entry] = []
    for entry in first:
        _give_up(outlook, entry)
        _stay(outlook, entry)
    for entry in entries:
        if entry.row in outlook.shares:
            continue
        entry.claim.floor = entry.level if keep else 0
        if _settle(outlook, entry):
            if bounds and outlook.shares[entry.row].finish_s > bounds.get(entry.row, math.inf):
                return outlook
            continue
        _give_up(outlook, entry)
        if terms.give_up:
            waiting.append(entry)
        else:
            _rush(outlook, entry)
    for entry in waiting if rush else ():
        _rush(outlook, entry)
    return outlook


def _as_planned(
    claims: Claims, capacity: list[int], entries: list[Entry], *, later: float = 0.0, rush: bool = True
) -> Outlook:
    """Every job as it was planned last, all so many seconds later; those without a plan in what is left.

    What was possible then is possible now; if it was held up, it still is so many seconds later.
    """
    outlook = _empty(claims, capacity, entries)
    others: list[Entry] = []
    for entry in entries:
        share = None
        if entry.runs and not entry.lost:
            runs = [(begin + later, rank) for begin, rank in entry.runs]
            share = outlook.filling.follow(entry.claim, entry.kind, runs, entry.finish_s + later, entry.dues[-1])
        if share is None:
            others.append(entry)
        else:
            _keep(outlook, entry, share)
    late = [entry for entry in others if not _settle(outlook, entry)]
    for entry in late:
        _give_up(outlook, entry)
        if rush:
            _rush(outlook, entry)
    return outlook


def _delay(claims: Claims, capacity: list[int], entries: list[Entry]) -> float:
    """How many seconds the plan is behind: those by which the slowest job misses its planned end by itself."""
    behind = 0.0
    for entry in entries:
        if entry.runs and not entry.lost:
            alone = _filling(claims, capacity, len(entry.runs)).follow(
                entry.claim, entry.kind, entry.runs, entry.finish_s, _FAR
            )
            if alone is not None:
                behind = max(behind, alone.finish_s - entry.finish_s)
    return behind


_FAR = 1e15


def _empty(claims: Claims, capacity: list[int], entries: list[Entry]) -> Outlook:
    return Outlook(_filling(claims, capacity, len(entries) + 1), entries, {entry.row: entry.claim for entry in entries})


def _filling(claims: Claims, capacity: Sequence[int], room: int) -> Filling:
    return Filling(claims.table.now, capacity, room, claims.ladders.scales)


def _settle(outlook: Outlook, entry: Entry) -> bool:
    """Fill a job in on its lowest level with its spare left; without, as early as it can be; False: it is late."""
    if entry.lost:
        return False
    share = outlook.filling.fill(entry.claim, entry.dues[0])
    if share is None and len(entry.dues) > 1:
        share = outlook.filling.rush(entry.claim, entry.dues[-1])
    if share is not None:
        _keep(outlook, entry, share)
    return share is not None


def _keep(outlook: Outlook, entry: Entry, share: Share) -> None:
    outlook.shares[entry.row] = share
    outlook.short_s += max(share.finish_s - entry.dues[0], 0.0)


def _give_up(outlook: Outlook, entry: Entry) -> None:
    outlook.late.append(entry.row)
    outlook.lost += entry.lost


def _stay(outlook: Outlook, entry: Entry) -> None:
    claim = entry.claim
    share = outlook.filling.follow(claim, claim.kind, [(outlook.filling.now, claim.rank)], None, _FAR)
    if share is not None:
        outlook.shares[entry.row] = share


def _rush(outlook: Outlook, entry: Entry) -> None:
    share = outlook.filling.rush(entry.claim)
    if share is not None:
        outlook.shares[entry.row] = share
