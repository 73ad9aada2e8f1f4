"""Earliest deadline first: the job due soonest takes as many devices as speed it up, then the next one.

ElasticFlow 6, baseline: it knows deadlines and scaling curves, but admits everything and wastes devices
on the flat part of the curve. Jobs without a deadline come last, in order of submission.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class EdfPolicy:
    """All a job can use, in order of deadlines."""

    name: str = "edf"
    paper: str = "Liu and Layland (1973); ElasticFlow (ASPLOS 2023), 6: baseline"
    admission: str = "fits-elastic"
    largest: bool = False
    """Take the largest count that was measured, faster or not (as the authors' simulator does)."""

    def allocate(self, table: Table) -> Shares:
        """By deadline, each as much as it can use of what is left."""
        free = list(table.capacity)
        workers = np.zeros(len(table), dtype=np.int64)
        kinds = np.full(len(table), -1, dtype=np.int64)
        for row in np.argsort(table.deadline, kind="stable").tolist():
            if max(free) <= 0:
                break
            kind, count = self._choose(table, row, free)
            if count:
                workers[row], kinds[row] = count, kind
                free[kind] -= count
        return Shares(workers=workers, kind=kinds)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its place in the order of deadlines."""
        earlier = int(np.count_nonzero(table.deadline < table.deadline[row]))
        if after > before:
            return f"{earlier} jobs are due before it and leave it {after} devices"
        return f"{earlier} jobs are due before it and leave it {after} devices, not {max(before, 1)}"

    def _choose(self, table: Table, row: int, free: list[int]) -> tuple[int, int]:
        """The type and number of devices on which the job is fastest now."""
        best, best_speed = (-1, 0), 0.0
        for kind, name in enumerate(table.types):
            if table.allowed[row] >> kind & 1 and free[kind] > 0:
                count = self._most(table, row, name, free[kind])
                speed = table.curves[row].speed(name, count) if count else 0.0
                if speed > best_speed:
                    best, best_speed = (kind, count), speed
        return best

    def _most(self, table: Table, row: int, name: str, free: int) -> int:
        spec, curve = table.specs[row], table.curves[row]
        limit = min(free, spec.max_workers or free)
        if self.largest:
            counts = curve.counts(name)
            at = bisect_right(counts, limit)
            return counts[at - 1] if at else 0
        count = curve.fastest(name, limit)
        return count if count >= (spec.min_workers or 1) else 0
