"""Where promises are made: whether a newcomer's deadline can be kept beside all others, and the earliest that can.

ElasticFlow 4.1 and 4.4. `promise.py` says which jobs can all be in time; here one more asks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from concertina.core.job import JobSpec
from concertina.core.plan import Admitted, Rejected
from concertina.policies.filling import Claim, Filling, sizes_of
from concertina.policies.promise import Effort, Entry, Outlook, arrange, claims_of, entries_of, promised_rows
from concertina.policies.scaling_curve import LawCurve, ScalingCurve
from concertina.policies.table import Table, allowed_types
from concertina.policies.terms import Terms


class Counter:
    """Where promises are made: the jobs of a table in order, and the place of a newcomer among them."""

    def __init__(self, job: JobSpec, curve: ScalingCurve, table: Table, terms: Terms) -> None:
        self.table, self.terms = table, terms
        self.claims = claims_of(table, terms, job)
        self.entries = entries_of(self.claims, terms)
        sizes = sizes_of(job, elastic=terms.elastic)
        self.claim = Claim(
            work_of(job, curve), self.claims.ladders.by_type(curve, allowed_types(job, table.types), sizes)
        )
        self.effort = Effort(terms.effort)
        self._known: Outlook | None = None
        self.plan: Outlook | None = None
        """How all can be in time, once a deadline was found that can be promised."""
        if any(entry.lost for entry in self.entries):
            self.entries = [self._no_later(entry) for entry in self.entries]

    def refusal(self, deadline: float) -> str:
        """Why this deadline can not be promised to the newcomer; empty if it can."""
        if self._fastest_s() > self.terms.due(self.table.now, deadline) - self.table.now:
            return "it can not be done by then on any number of devices"
        why = self._refusal(deadline, self.entries, replace(self.terms, attempts=0))
        if why and not self._hopeless():
            why = self._refusal(deadline, self.entries, self.terms)
        if why and self._strained():
            why = self._refusal(deadline, self._eased(), self.terms)
        return why

    def earliest(self, refused: float) -> float | None:
        """A deadline that can be promised, near the earliest: last in line is sure, halving does the rest."""
        now, terms = self.table.now, replace(self.terms, attempts=0)
        entries = self._eased()
        share = self._today().filling.copy().rush(self.claim)
        if share is None:
            return None
        fastest = terms.deadline(now, now + self._fastest_s())
        refused = max(refused, fastest)
        line = Line(self, entries)
        if line.takes(refused, now):
            return refused
        sure = max(terms.deadline(now, share.finish_s), refused) + 1.0
        if not line.takes(sure, refused):
            sure = max(sure, *(entry.deadline for entry in self.entries))
        for _ in range(terms.halvings):
            middle = (refused + sure) / 2
            if line.takes(middle, refused):
                sure = middle
            else:
                refused = middle
        return sure

    def _fastest_s(self) -> float:
        """Seconds the newcomer takes if it gets all it can use and turns out slow."""
        tops = [ladder for ladder in self.claim.ladders if ladder is not None and ladder.top]
        runs = [self.claim.left / top.speeds[-1] * (1.0 + self.terms.headroom) for top in tops]
        return min((run + top.pauses[-1] + top.start_s for run, top in zip(runs, tops, strict=True)), default=math.inf)

    def _refusal(self, deadline: float, entries: list[Entry], terms: Terms) -> str:
        newcomer = Entry(self.claim, -1, deadline, (terms.due(self.table.now, deadline),), 0)
        firm = [replace(entry, dues=entry.dues[:1]) for entry in entries]
        order = sorted([*firm, newcomer], key=lambda entry: entry.deadline)
        outlook = arrange(self.claims, order, terms, self.effort, rush=False)
        lost = {entry.row for entry in entries if entry.lost}
        late = [row for row in outlook.late if row not in lost]
        if not late:
            self.plan = outlook
        if -1 in late:
            return "it can not be done by then beside the jobs that are promised"
        return f"the promise to {self.table.specs[min(late)].id} could not be kept" if late else ""

    def _today(self) -> Outlook:
        """How the promised jobs fare without the newcomer."""
        if self._known is None:
            self._known = arrange(self.claims, self.entries, self.terms, self.effort)
        return self._known

    def _hopeless(self) -> bool:
        """Whether not even those who are there can all be in time: then they can not beside a newcomer."""
        return bool(self._today().loss[0])

    def _strained(self) -> bool:
        """Whether some job has not even today the spare it should have."""
        return any(entry.dues[0] < self._finish(entry) for entry in self.entries if not entry.lost)

    def _eased(self) -> list[Entry]:
        """The promises, where jobs that are strained today only must not fare worse."""
        return [
            replace(entry, dues=(self._finish(entry) + 0.001,)) if entry.dues[0] < self._finish(entry) else entry
            for entry in self.entries
        ]

    def _no_later(self, entry: Entry) -> Entry:
        """A promise that is lost already, as one that no newcomer may make later still."""
        finish = self._finish(entry)
        if not entry.lost or math.isinf(finish):
            return entry
        return replace(entry, deadline=finish, dues=(finish + 0.001,), lost=False)

    def _finish(self, entry: Entry) -> float:
        share = self._today().shares.get(entry.row)
        return math.inf if share is None else share.finish_s


class Line:
    """The promised jobs in order of their deadlines, to be asked again and again where a newcomer would fit in.

    Whoever stands before every place that is still in question is filled in once.
    """

    def __init__(self, counter: Counter, entries: list[Entry]) -> None:
        self.counter = counter
        self.entries = sorted((entry for entry in entries if not entry.lost), key=lambda entry: entry.deadline)
        for entry in self.entries:
            entry.claim.floor = 0
        self.filling = Filling(
            counter.table.now, counter.table.capacity, len(entries) + 1, counter.claims.ladders.scales
        )
        self.filled = 0
        """Jobs filled in for good; -1: one of them does not fit, whoever comes."""

    def takes(self, deadline: float, beyond: float) -> bool:
        """Whether all are in time with a newcomer of this deadline; no earlier one than `beyond` is asked for again."""
        while 0 <= self.filled < len(self.entries) and self.entries[self.filled].deadline <= beyond:
            self.filled = self.filled + 1 if self._fits(self.filling, self.entries[self.filled]) else -1
        if self.filled < 0:
            return False
        counter, filling = self.counter, self.filling.copy()
        counter.effort.spend(len(self.entries) - self.filled)
        due = counter.terms.due(counter.table.now, deadline)
        newcomer = Entry(counter.claim, -1, deadline, (due,), 0)
        place = bisect_right(self.entries, deadline, lo=self.filled, key=lambda entry: entry.deadline)
        line = (*self.entries[self.filled : place], newcomer, *self.entries[place:])
        return all(self._fits(filling, entry) for entry in line)

    @staticmethod
    def _fits(filling: Filling, entry: Entry) -> bool:
        return filling.fill(entry.claim, entry.dues[0]) is not None


def work_of(job: JobSpec, curve: ScalingCurve) -> float:
    """The work of a job in its curve's unit."""
    work = job.duration_s if isinstance(curve, LawCurve) else job.work
    assert work is not None
    return work


def admit(job: JobSpec, curve: ScalingCurve, table: Table, terms: Terms) -> Admitted | Rejected:
    """Promise the job's strict deadline if no other promise breaks; take every job without one."""
    if job.deadline_s is None or job.soft:
        what = "no deadline" if job.deadline_s is None else "its deadline is soft"
        return Admitted(job_id=job.id, reason=f"{what}: it gets what promises leave")
    if why := over_quota(job, table, terms):
        return Rejected(job_id=job.id, reason=why)
    counter = Counter(job, curve, table, terms)
    why = counter.refusal(job.deadline_s)
    if not why:
        reason = "its deadline can be kept, and so can all others"
        assert counter.plan is not None
        reserved = counter.plan.reserved(table, job.id)
        return Admitted(
            job_id=job.id, reason=reason, promised_s=job.deadline_s, reserved=reserved, work=counter.effort.spent
        )
    earliest = counter.earliest(job.deadline_s)
    hint = "no deadline could be promised" if earliest is None else f"{earliest:.0f} s could be promised"
    return Rejected(
        job_id=job.id,
        reason=f"deadline {job.deadline_s:.0f} s: {why}; {hint}",
        earliest_s=earliest,
        work=counter.effort.spent,
    )


def over_quota(job: JobSpec, table: Table, terms: Terms) -> str:
    """Why the job's user may not be promised more; empty if that is no reason (ElasticFlow 4.4)."""
    quota = terms.quota(job.user)
    if quota is None:
        return ""
    taken = sum(table.specs[row].gpus for row in promised_rows(table) if table.specs[row].user == job.user)
    if taken + job.gpus <= quota:
        return ""
    who = job.user or "its user"
    return (
        f"promised jobs of {who} ask for {taken} of the {quota} devices of its quota and this one for {job.gpus};"
        " it could come later, or without a strict deadline"
    )


def sure(table: Table, slots: Sequence[int], terms: Terms) -> Table:
    """The table with the devices that a promise may rely on: without the reserve, as far as that is not lost yet."""
    if not terms.reserve:
        return table
    twin = copy(table)
    kept = zip(slots, terms.kept_back(table.types), strict=True)
    twin.capacity = [max(min(up, all_ - back), 0) for up, (all_, back) in zip(table.capacity, kept, strict=True)]
    return twin
