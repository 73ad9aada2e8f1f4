"""Other people's simulators, retold: their rules as they are programmed, oddities included.

None of this is used by concertina. It is here to show, job by job, that a difference between our figures
and theirs comes from a named rule of theirs: with the rule retold the difference vanishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from concertina.core.job import JobSpec
from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Table
from concertina.policies.tiresias import TiresiasPolicy, next_places, queue_order


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTiresias(TiresiasPolicy):
    """2D-LAS as in the Tiresias authors' simulator: the time at which a job sinks is computed wrongly.

    The next sinking is expected after (limit - seconds run) / devices; it should be limit / devices - seconds
    run. So a job with several devices sinks late, unless some other event comes first.
    """

    def allocate(self, table: Table) -> Shares:
        """As the right one, one queue at a time and woken late."""
        limits = np.asarray((*self.limits, np.inf))
        sinks = (table.service() >= limits[table.level] - 1e-3) & (table.held > 0)
        level = table.level + sinks
        order = queue_order(table, level)
        shares = gangs(table, order)
        rows = np.flatnonzero((shares.workers > 0) & (level < len(self.limits)))
        wake = None
        if rows.size:
            late = np.ceil((limits[level[rows]] - table.executed()[rows]) / table.gpus[rows])
            wake = float(table.now + max(late.min(), 1.0))
        return Shares(
            workers=shares.workers,
            kind=shares.kind,
            level=level,
            stamp=next_places(order, level, shares.workers > 0),
            wake_s=wake,
        )


@dataclass(slots=True, kw_only=True)
class RetoldJob:
    """A job in ElasticFlow's Gandiva loop."""

    spec: JobSpec
    executed: float = 0.0
    overhead: float = 0.0
    end_s: float = 0.0
    charged: float = 0.0
    """Seconds of overhead it was charged in all."""
    beside_idle: float = 0.0
    """Seconds it waited while as many devices as it needs were idle."""


@dataclass(slots=True, kw_only=True)
class RetoldSet:
    """Nodes for jobs of one size."""

    nodes: int
    capacity: int
    util: int = 0
    jobs: list[RetoldJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GandivaRules:
    """Which of the oddities apply. All true: the authors' program."""

    never_lowers_util: bool = True
    """A set's load counter is not lowered when a job ends, so its free places are not given to newcomers."""
    strict_capacity: bool = True
    """A set takes a newcomer only while load + 1 < capacity: one place stays empty."""
    charges_everyone: bool = True
    """Each arrival costs every running job a full rescale."""
    deaf_to_ends: bool = True
    """Nothing is scheduled when a job ends, only when one arrives (every slot after the last arrival)."""
    shared_counter: bool = True
    """Two nested loops share a counter, so new sets for jobs that fit on one node mostly stay empty."""
    rotates_by_chance: bool = True
    """Turns change only at an event whose time is divisible by 60."""


class RetoldGandiva:
    """ElasticFlow's loop for its Gandiva baseline."""

    SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 88, 128, 256)

    def __init__(self, nodes: int, slots: int, rules: GandivaRules, slot_s: int = 60) -> None:
        self.free, self.slots, self.rules, self.slot_s = nodes, slots, rules, slot_s
        self.devices = nodes * slots
        self.sets: dict[int, list[RetoldSet]] = {size: [] for size in self.SIZES}
        self.pending: list[RetoldJob] = []
        self.running: list[RetoldJob] = []
        self.done: list[RetoldJob] = []

    def run(self, jobs: Sequence[JobSpec]) -> dict[str, RetoldJob]:
        """Until all are done."""
        events = _arrivals(jobs)
        now, step, rounds = events[0][0], 0.0, 0
        while events or self.pending or self.running:
            self._adjust()
            self._count_idle(step)
            released = self._execute(now, step)
            arrived = bool(events) and events[0][0] == now
            if arrived:
                for job in events.pop(0)[1]:
                    if self._place(job):
                        self.running.append(job)
                    else:
                        self.pending.append(job)
            if released:
                self._start_pending()
            ahead = self._next_end(now) if not self.rules.deaf_to_ends else math.inf
            if not events:
                step = min(self.slot_s, ahead)
            else:
                if arrived:
                    self._charge(rounds)
                    rounds += 1
                _merge(events, now, self.slot_s)
                step = min(events[0][0] - now, ahead)
                if not self.rules.rotates_by_chance:
                    step = min(step, self.slot_s - now % self.slot_s)
            now += step
        return {job.spec.id: job for job in self.done}

    def _count_idle(self, step: float) -> None:
        groups = [(size, group) for size, sets in self.sets.items() for group in sets]
        idle = self.devices - sum(size * min(len(group.jobs), group.capacity) for size, group in groups)
        waiting = [job for _, group in groups for job in group.jobs[group.capacity :]]
        for job in waiting + self.pending:
            if job.spec.gpus <= idle:
                job.beside_idle += step

    def _start_pending(self) -> None:
        at = 0
        while at < len(self.pending):  # the one behind a job that starts is passed over
            if self._place(self.pending[at]):
                self.running.append(self.pending.pop(at))
            at += 1

    def _next_end(self, now: float) -> float:
        left = [
            job.spec.duration_s + job.overhead - job.executed
            for sets in self.sets.values()
            for group in sets
            for job in group.jobs[: group.capacity]
            if job.spec.duration_s is not None
        ]
        return max(min(left, default=math.inf), 1.0)

    def _charge(self, rounds: int) -> None:
        if not self.rules.charges_everyone:
            return
        restart = rounds > 0 and rounds % self.slot_s == 0
        large = self.devices >= 256
        for job in self.running:
            job.overhead = 7.0 if large else 2.0
            job.overhead += (47.0 if large else 27.0) if restart else 0.0
            job.overhead += 2 * (math.log2(job.spec.gpus) + 1)

    def _place(self, job: RetoldJob) -> bool:
        size = job.spec.gpus
        sets = self.sets[size]
        if sets:
            first = sets.pop(0)
            sets.append(first)
            room = first.capacity - (1 if self.rules.strict_capacity else 0)
            if first.util < room:
                self._join(sets, first, job)
                return True
        nodes = math.ceil(size / self.slots)
        if nodes <= self.free:
            self.free -= nodes
            new = RetoldSet(nodes=nodes, capacity=nodes * self.slots // size)
            sets.append(new)
            self._join(sets, new, job)
            return True
        if sets:
            first = sets.pop(0)
            sets.append(first)
            self._join(sets, first, job)
            return True
        return False

    @staticmethod
    def _join(sets: list[RetoldSet], group: RetoldSet, job: RetoldJob) -> None:
        group.util += 1
        group.jobs.append(job)
        sets.sort(key=lambda g: g.util)

    def _adjust(self) -> None:
        demand = {size: size * sum(len(g.jobs) for g in sets) for size, sets in self.sets.items()}
        held = {size: self.slots * sum(g.nodes for g in sets) for size, sets in self.sets.items()}
        total = sum(demand.values())
        for size, sets in self.sets.items():
            if not demand[size]:
                continue
            target = min(math.floor(demand[size] / total * self.devices), demand[size])
            if target > held[size]:
                self._expand(size, sets, math.ceil((target - held[size]) / size))
            elif target < held[size]:
                self._shrink(sets, math.ceil((held[size] - target) / size))

    def _expand(self, size: int, sets: list[RetoldSet], wanted: int) -> None:
        nodes = math.ceil(size / self.slots)
        counter = 0
        for turn in range(1, wanted + 1):
            counter = turn
            if nodes <= self.free:
                self.free -= nodes
                sets.append(RetoldSet(nodes=nodes, capacity=nodes * self.slots // size))
                if self.rules.shared_counter:
                    counter = nodes - 1
        if counter > 0:
            jobs = [job for group in sets for job in group.jobs]
            for group in sets:
                if group.jobs:
                    group.jobs, group.util = [], 0
            for job in jobs:
                self._join(sets, sets[0], job)

    def _shrink(self, sets: list[RetoldSet], wanted: int) -> None:
        wanted = min(wanted, len(sets) - 1)
        closed = [sets.pop(0) for _ in range(wanted)]
        self.free += sum(group.nodes for group in closed)
        for job in [job for group in closed for job in group.jobs]:
            self._join(sets, sets[0], job)

    def _execute(self, now: float, step: float) -> bool:
        released = False
        turn = now % 60 == 0
        for sets in self.sets.values():
            for group in list(sets):
                self._run_set(group, now, step)
                at_once = min(len(group.jobs), group.capacity)
                ended = [job for job in group.jobs if job.end_s]
                if turn and len(group.jobs) > at_once:
                    group.jobs = group.jobs[at_once:] + group.jobs[:at_once]
                group.jobs = [job for job in group.jobs if not job.end_s]
                for job in ended:
                    self.running.remove(job)
                    self.done.append(job)
                    if not self.rules.never_lowers_util:
                        group.util -= 1
                if not group.jobs:
                    self.free += group.nodes
                    sets.remove(group)
                    released = True
        return released

    @staticmethod
    def _run_set(group: RetoldSet, now: float, step: float) -> None:
        for job in group.jobs[: group.capacity]:
            duration = job.spec.duration_s or 0.0
            job.charged += min(job.overhead, step)
            job.executed += max(step - job.overhead, 0.0)
            job.overhead = 0.0
            if job.executed >= duration:
                job.end_s = now - (job.executed - duration)


def _arrivals(jobs: Sequence[JobSpec]) -> list[tuple[float, list[RetoldJob]]]:
    found: dict[float, list[RetoldJob]] = {}
    for job in sorted(jobs, key=lambda j: j.submit_s):
        found.setdefault(job.submit_s, []).append(RetoldJob(spec=job))
    return list(found.items())


def _merge(events: list[tuple[float, list[RetoldJob]]], now: float, slot_s: int) -> None:
    """Arrivals within a slot of `now` become one event at its end (the very last arrival is left as it
    is)."""
    ahead = events[0][0]
    while ahead - now <= slot_s and len(events) > 1:
        events[0] = (now + slot_s, events[0][1])
        if events[1][0] - now > slot_s:
            break
        ahead = events[1][0]
        events[0][1].extend(events.pop(1)[1])
