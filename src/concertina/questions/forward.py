"""The simulator, begun in the middle: from a snapshot instead of an empty cluster.

Every event brings a round, as in any simulation, unless there are so many jobs that this takes too long. Then
rounds are held at a few moments only, closer together at first, because an hour matters more to what is near.
Devices that become free between two of them do not lie idle in truth. A stand-in gives them to those who wait,
in the order that explains best whom the policy chose in its last round; where nobody waits, the jobs that take
them in the next round are given the work they would have done since.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from concertina.core.cluster import Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.admission import on_terms, rule_of
from concertina.policies.base import Policy, Shares
from concertina.policies.placement import Spot
from concertina.policies.round import GANGS, Change, surviving
from concertina.policies.table import Floats, Table
from concertina.questions.stand_in import StandIn
from concertina.simulator.engine import Setting, Simulation
from concertina.simulator.recorder import JobNotes

LONGEST_S = 3.2e8
"""Ten years: what is not over by then is not in sight."""

MOST_IDLE = 100
"""Rounds in a row that leave all devices idle, with nobody to come, after which nobody ever starts: a policy may ask
to be woken every few minutes for those who wait, and would be, for ten years."""

PER_PROMISE = 5
"""Times that admission looks at all jobs before it promises or refuses a deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rounds at so many moments until all present work should be done; the n-th after n^2 / rounds^2 of it."""

    rounds: int
    span_s: float

    def following(self, elapsed: float) -> float:
        """The first of these moments after `elapsed`, both counted from the beginning."""
        whole, last = self.rounds**2, 2 * self.rounds - 1
        at = whole * max(elapsed, 0.0) / self.span_s * (1 + 1e-12)
        after = whole + last * (math.floor((at - whole) / last) + 1) if at >= whole else (math.isqrt(int(at)) + 1) ** 2
        return self.span_s / whole * after


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What became of each job in one run. Absolute seconds; a job that is not named did not come to that."""

    starts: dict[str, float]
    """When it next held devices."""
    ends: dict[str, float]
    refused: dict[str, str]
    rows: int
    """Jobs looked at, over all rounds: what the policy had to do."""
    changes: int
    """Starts, ends and resizings: what the engine had to do."""


@dataclass(slots=True)
class FirstRound:
    """What the policy decided at the very beginning: the same in every run from one snapshot, and dear."""

    shares: Shares | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A policy whose first decision is known, or is kept for the next run."""

    policy: Policy
    first: FirstRound
    begin_s: float

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.policy.name

    @property
    def paper(self) -> str:
        """Where it comes from."""
        return self.policy.paper

    @property
    def admission(self) -> str:
        """The admission rule it wants."""
        return self.policy.admission

    def allocate(self, table: Table) -> Shares:
        """What was decided then, if it is still then and about the same jobs."""
        known = self.first.shares
        if table.now == self.begin_s and known is not None and len(known.workers) == len(table):
            return known
        found = self.policy.allocate(table)
        if table.now == self.begin_s and known is None and found.workers.base is not table.held.base:
            self.first.shares = found
        return found

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """As it would."""
        return self.policy.explain(table, row, before, after)


class Forward(Simulation):
    """One run from a snapshot on, until those asked for have ended (or, without any, everybody)."""

    def __init__(
        self,
        snapshot: Snapshot,
        setting: Setting,
        *,
        arrivals: Sequence[JobSpec] = (),
        until: Collection[str] = (),
        pace: Pace | None = None,
        first: FirstRound | None = None,
        most: float = math.inf,
    ) -> None:
        new = [view.spec for view in snapshot.jobs if view.phase is JobPhase.SUBMITTED]
        super().__init__([*new, *arrivals], setting)
        self.begin_s = self.table.now = self.recorder.now = snapshot.now
        self.pace = pace
        if first is not None:
            self.policy = Begun(self.policy, first, snapshot.now)
        self.waited_for = set(until)
        self.stops = bool(until)
        self.starts: dict[str, float] = {}
        self.ends: dict[str, float] = {}
        self.rows = self.changes = 0
        self.most = most
        """Rows from which on promises in danger get no second look, each of which costs as much as many rounds."""
        self._used = 0
        self._idle_s = 0.0
        """Device-seconds given back and not taken again since the last round."""
        self._idle_since = snapshot.now
        self._idle_rounds = 0
        self._late: list[Change] = []
        self._stand_in = StandIn(gang=self.policy.admission in GANGS)
        self._index = {node.id: i for i, node in enumerate(snapshot.cluster.nodes)}
        self._lose_nodes(snapshot)
        for view in surviving(snapshot, self.policy, setting.curves).jobs:
            if view.phase is not JobPhase.SUBMITTED:
                self._continue(view)
        self._used = self.recorder.used
        self.due_s = snapshot.now

    def forward(self) -> Course:
        """Run to the end."""
        self._play(lambda: 0.0)
        refused = {note.spec.id: note.reason for note in self.notes if note.phase is JobPhase.REJECTED}
        return Course(starts=self.starts, ends=self.ends, refused=refused, rows=self.rows, changes=self.changes)

    # -- the beginning ---------------------------------------------------------------------------------------

    def _lose_nodes(self, snapshot: Snapshot) -> None:
        for index, node in enumerate(snapshot.cluster.nodes):
            if node.id in snapshot.down:
                self.cluster.lose(index)
                self.recorder.devices -= node.slots

    def _continue(self, view: JobView) -> None:
        """Put a job in that is under way, as it is."""
        spec, now = view.spec, self.table.now
        key = len(self.notes)
        curve, work = self.setting.curves.of(spec)
        note = JobNotes(spec, 0.0)
        note.since_s, note.phase = now, JobPhase.WAITING
        self.notes.append(note)
        self.work.append(work)
        self.stretch.append(0)
        user = self.users.setdefault(spec.user, len(self.users))
        row = self.table.add(key, spec, curve, estimate=work, user=user)
        at, c = self.table.at(row), self.table.raw
        c["done_0"][at], c["service_0"][at], c["executed_0"][at] = view.work_done, view.service_s, view.executed_s
        c["left_0"][at] = max(work - view.work_done, 1e-9) / c["asked_speed"][at]
        c["level"][at], c["stamp"][at] = view.level, view.stamp
        if view.waiting_since_s is not None:
            c["waiting_since"][at] = view.waiting_since_s
        if view.first_start_s is not None or view.executed_s > 0 or view.workers:
            note.start_s = now if view.first_start_s is None else view.first_start_s
        self.recorder.waiting += 1
        self.recorder.demand += spec.gpus
        if view.workers:
            self._hold(row, view)

    def _hold(self, row: int, view: JobView) -> None:
        table, cluster = self.table, self.cluster
        key = table.keys[row]
        spots: tuple[Spot, ...] = ()
        if cluster.placer is not None:
            spots = tuple((self._index[node], count) for node, count in view.placement)
            cluster.placer.take(key, spots)
        cluster.spots[key] = spots
        table.hold(row, view.workers, nodes=len(spots) or None)
        self.notes[key].phase = JobPhase.RUNNING
        self.starts[view.spec.id] = table.now
        self._go(row, 0.0)

    # -- the loop --------------------------------------------------------------------------------------------

    def _next_time(self) -> float | None:
        if (self.stops and not self.waited_for) or self._idle_rounds > MOST_IDLE:
            return None
        found = super()._next_time()
        return None if found is None or found > self.begin_s + LONGEST_S else found

    def _happen(self, now: float) -> bool:
        something = super()._happen(now)
        due = self.due_s if self.due_s is not None else self._due(now)
        if something and self.pace is not None and due > now:
            self._count_idle()
            for change in self._stand_in.starts(self.table, self.cluster.row):
                self._enter(change, "")
        return something

    def _due(self, now: float) -> float:
        due = super()._due(now)
        if self.pace is None:
            return due
        return max(due, self.begin_s + self.pace.following(self.last_round_s - self.begin_s))

    def _round(self, clock: Callable[[], float]) -> None:
        self.rows += len(self.table)
        if self.rows > self.most:
            self._look_once()
        if self.pace is None:
            super()._round(clock)
            self._count_idle_rounds()
            return
        self._count_idle()
        before: Floats = self.table.speed.copy()
        since = self.table.now - max(self.last_round_s, self.begin_s)
        self._late.clear()
        super()._round(clock)
        self._count_idle_rounds()
        self._make_up(before, since)
        self._stand_in.learn(self.table)
        self._idle_s, self._used = 0.0, self.recorder.used

    def _note(self, shares: Shares) -> None:
        super()._note(shares)
        self.rows += shares.tried

    def _look_once(self) -> None:
        """From now on admission and policy take the first arrangement there is."""
        self.most = math.inf
        self.policy = on_terms(self.setting.policy, effort=0)
        self.admit = rule_of(self.policy)

    def _close(self) -> None:
        """Nobody asks why those who are left do not go on."""

    def _efficiency(self, row: int) -> float:
        """Nor how well devices are used."""
        return 0.0

    # -- jobs ------------------------------------------------------------------------------------------------

    def _arrive(self, spec: JobSpec) -> None:
        super()._arrive(spec)
        if spec.deadline_s is not None and not spec.soft:
            self.rows += PER_PROMISE * len(self.table)
        if self.notes[-1].phase is JobPhase.REJECTED:
            self.waited_for.discard(spec.id)

    def _enter(self, change: Change, reason: str) -> None:
        super()._enter(change, reason)
        self.changes += 1
        if change.after > change.before:
            self.starts.setdefault(self.table.specs[change.row].id, self.table.now)
            if self.pace is not None:
                self._late.append(change)

    def _end(self, key: int, row: int, phase: JobPhase, reason: str) -> None:
        name = self.notes[key].spec.id
        self.ends.setdefault(name, self.table.now)
        self.waited_for.discard(name)
        self.changes += 1
        super()._end(key, row, phase, reason)

    def _leave(self, row: int) -> None:
        if self.pace is not None:
            self._count_idle()
        super()._leave(row)

    # -- rounds that come late -------------------------------------------------------------------------------

    def _count_idle_rounds(self) -> None:
        still = not self.finishes and self.next_job == len(self.jobs)
        self._idle_rounds = self._idle_rounds + 1 if still else 0

    def _count_idle(self) -> None:
        now = self.table.now
        self._idle_s += max(self._used - self.recorder.used, 0) * (now - self._idle_since)
        self._idle_since = now

    def _make_up(self, before: Floats, since: float) -> None:
        """Give those who took devices the work they would have done, had the round been in time."""
        taken = sum(change.after - change.before for change in self._late)
        if not taken or not self._idle_s:
            return
        late_s = min(self._idle_s / taken, since)
        table, now = self.table, self.table.now
        for change in self._late:
            row, key = change.row, table.keys[change.row]
            c, at = table.raw, table.at(row)
            name, speed = table.specs[row].id, float(c["speed"][at])
            slow = float(before[row])
            since_s = min(late_s, now - self.starts[name]) if change.before else late_s
            gained = (speed - slow) * since_s
            left = self.work[key] - float(c["done_0"][at])
            if not change.before and self.starts[name] == now:
                self.starts[name] = now - since_s
            if gained >= left > 0:
                self.ends.setdefault(name, now - since_s + (left + slow * since_s) / speed)
            c["done_0"][at] += max(min(gained, left), 0.0)
            stretch = self.stretch[key] = self.stretch[key] + 1
            left = max(self.work[key] - float(c["done_0"][at]), 0.0)
            heapq.heappush(self.finishes, (float(c["resume"][at]) + left / speed, key, stretch))
