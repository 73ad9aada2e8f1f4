"""Optimus: one device for every job, then each further one where it shortens a completion time most.

Peng et al., "Optimus: An efficient dynamic resource scheduler for deep learning clusters" (EuroSys 2018),
section 4.1, for jobs that train with collectives (no parameter servers). The gain of a step is the
remaining time it saves per device it takes, by the job's scaling curve; steps go to the next measured
number of workers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.table import Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimusPolicy:
    """Greedy by marginal gain of remaining time."""

    name: str = "optimus"
    paper: str = "Peng et al. (EuroSys 2018)"
    admission: str = "fits-elastic"

    def allocate(self, table: Table) -> Shares:
        """First devices to the shortest jobs, further ones by gain."""
        n = len(table)
        left = table.left()
        free = list(table.capacity)
        workers, kinds = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
        for row in np.argsort(table.time_left(), kind="stable").tolist():
            if max(free) <= 0:
                break
            kind, count = _first(table, row, free)
            if count:
                workers[row], kinds[row] = count, kind
                free[kind] -= count
        self._grow(table, workers.tolist(), kinds.tolist(), free, left.tolist(), workers)
        return Shares(workers=workers, kind=kinds)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """The gain."""
        if after > before:
            return f"{after} devices shorten its remaining time more than they would another job's"
        return f"devices beyond {after} shorten other jobs' remaining time more"

    @staticmethod
    def _grow(table: Table, now: list[int], kinds: list[int], free: list[int], left: list[float], out: Ints) -> None:
        """Give steps to the largest gain until nothing is free or nothing gains."""
        steps = [
            step for row in range(len(now)) if now[row] and (step := _step(table, row, kinds[row], now[row], left))
        ]
        heapq.heapify(steps)
        while steps:
            _, row, count = heapq.heappop(steps)
            extra, kind = count - now[row], kinds[row]
            if extra > free[kind]:
                continue
            free[kind] -= extra
            now[row] = count
            out[row] = count
            step = _step(table, row, kind, count, left)
            if step:
                heapq.heappush(steps, step)


def _first(table: Table, row: int, free: list[int]) -> tuple[int, int]:
    """The type and least number of devices the job can start on now; (-1, 0): none."""
    least = table.specs[row].min_workers or 1
    best, best_speed = (-1, 0), 0.0
    for kind, name in enumerate(table.types):
        if not table.allowed[row] >> kind & 1:
            continue
        count = next((n for n in table.curves[row].counts(name) if n >= least), 0)
        if count and count <= free[kind]:
            speed = table.curves[row].speed(name, count)
            if speed > best_speed:
                best, best_speed = (kind, count), speed
    return best


def _step(table: Table, row: int, kind: int, count: int, left: list[float]) -> tuple[float, int, int] | None:
    """(-gain per device, row, next count) or None where more devices bring nothing."""
    curve, name = table.curves[row], table.types[kind]
    limit = table.specs[row].max_workers
    speed = curve.speed(name, count)
    for more in curve.counts(name):
        if more > count and (limit is None or more <= limit):
            faster = curve.speed(name, more)
            if faster > speed:
                return -(left[row] / speed - left[row] / faster) / (more - count), row, more
            return None
    return None
