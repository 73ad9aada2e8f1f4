"""Elastic-FIFO: first in, first out, but a job starts as soon as its fewest devices can be freed for it.

Elan, VI-C. A job at the head of the queue starts if its least number of devices is idle, or if starting it
now does not make the average completion time longer than letting it wait for the next job to end. All that run
hold their least number, and the rest goes step by step to whoever saves most remaining time by it. Batch and
learning rate follow hybrid scaling where the speeds of larger batches are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fifo import waiting_rows
from concertina.policies.marginal import Filled, Ladder, fill, ladder_of
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticFifoPolicy:
    """Least devices in order of submission, the rest by marginal gain."""

    name: str = "elastic-fifo"
    paper: str = "Elan (ICDCS 2020), VI-C"
    admission: str = "fits-elastic"
    scaling: str = "hybrid"
    """How the batch follows the devices: `hybrid` or `strong`."""

    def allocate(self, table: Table) -> Shares:
        """Who runs, then with how much."""
        crew = Crew(table)
        crew.keep_running()
        self.start(crew)
        return crew.shares()

    def start(self, crew: Crew) -> None:
        """Let the head of the queue start while it may."""
        for row in waiting_rows(crew.table):
            if not crew.full and crew.try_start(row):
                continue
            return

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Started, grown, shrunk or waiting."""
        if after and not before:
            return f"next in the queue; starts on {after} devices without making jobs wait longer on average"
        if after > before:
            return f"{after} devices shorten its remaining time more than they would another job's"
        if after < before and after:
            return f"devices beyond {after} shorten other jobs' remaining time more"
        return "its fewest devices are not to be had yet without delaying the others more, or an earlier job waits"


class Crew:
    """The jobs that shall run, by device type, and what they get."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.left = table.left()
        self.rows: list[list[int]] = [[] for _ in table.types]
        self.ladders: list[list[Ladder]] = [[] for _ in table.types]
        self.room = list(table.capacity)
        """Devices beyond everyone's fewest, by type."""
        self.idle = table.free()
        self._filled: list[Filled | None] = [None] * len(table.types)
        self._known: dict[tuple[int, int | None, int | None, int], Ladder] = {}

    @property
    def full(self) -> bool:
        """Whether everyone holds its fewest and nothing more is there."""
        return max(self.room, default=0) <= 0

    def keep_running(self) -> None:
        """Those that hold devices go on where they are; after a loss of nodes as far as their fewest fit."""
        rows = np.flatnonzero(self.table.held > 0)
        for row, kind in zip(rows.tolist(), self.table.kind[rows].tolist(), strict=True):
            rungs = self.ladder(row, kind)
            if rungs.sizes and rungs.sizes[0] <= self.room[kind]:
                self.add(row, kind, rungs)

    def ladder(self, row: int, kind: int) -> Ladder:
        """What a job can have of a type, looked up once for all jobs alike."""
        spec = self.table.specs[row]
        key = (id(self.table.curves[row]), spec.min_workers, spec.max_workers, kind)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = ladder_of(self.table, row, kind)
        return found

    def add(self, row: int, kind: int, rungs: Ladder) -> None:
        """One more that runs."""
        self.rows[kind].append(row)
        self.ladders[kind].append(rungs)
        self.room[kind] -= rungs.sizes[0]
        self._filled[kind] = None

    def types_for(self, row: int) -> Iterator[tuple[float, int, Ladder]]:
        """(speed on the fewest, type, sizes) where the fewest fit beside all others' fewest, fastest first."""
        allowed = int(self.table.allowed[row])
        found = []
        for kind, room in enumerate(self.room):
            rungs = self.ladder(row, kind)
            if allowed >> kind & 1 and rungs.sizes and rungs.sizes[0] <= room:
                found.append((self.idle[kind] >= rungs.sizes[0], rungs.speeds[0], -kind, rungs))
        for _, speed, minus, rungs in sorted(found, key=lambda one: one[:3], reverse=True):
            yield speed, -minus, rungs

    def try_start(self, row: int) -> bool:
        """Start a job that waits, by the admission rule; whether it did."""
        for _, kind, rungs in self.types_for(row):
            if rungs.sizes[0] <= self.idle[kind] or self.pays(row, kind, rungs):
                self.idle[kind] -= rungs.sizes[0]
                self.add(row, kind, rungs)
                return True
        return False

    def pays(self, row: int, kind: int, rungs: Ladder) -> bool:
        """Whether all completion times together get no longer if it starts now and not when the next job ends.

        Only the time until then differs: the others are slower in it, and this job has a part of its work behind
        it that it would else do later, at the speed it asked for.
        """
        rows = self.rows[kind]
        before = self.filled(kind).speeds
        after = fill([*self.ladders[kind], rungs], self.left[[*rows, row]], self.table.capacity[kind]).speeds
        wait = float(np.min(self.left[rows] / before, initial=np.inf))
        left, asked = float(self.left[row]), float(self.table.asked_speed[row])
        together = min(wait, left / float(after[-1]))
        begun = together * float(after[-1])
        gain = wait - together + begun / asked
        delay = together * float(np.sum(1 - after[:-1] / before))
        return delay <= gain

    def filled(self, kind: int) -> Filled:
        """What those that run get of one type."""
        known = self._filled[kind]
        if known is None:
            known = self._filled[kind] = fill(self.ladders[kind], self.left[self.rows[kind]], self.table.capacity[kind])
        return known

    def shares(self) -> Shares:
        """Columns."""
        n = len(self.table)
        workers, kinds = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        for kind, rows in enumerate(self.rows):
            if rows:
                workers[rows] = self.filled(kind).sizes
                kinds[rows] = kind
        return Shares(workers=workers, kind=kinds)
