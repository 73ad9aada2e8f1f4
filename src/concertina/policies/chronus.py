"""Chronus: as many deadlines as possible for gangs of fixed size, short jobs first for the rest.

Gao et al., "Chronus: A novel deadline-aware scheduler for deep learning training jobs" (SoCC 2021). The
paper picks the jobs with deadlines by an integer program over leases. Here the same goal, most jobs in
time, is served by Moore and Hodgson's rule on device-seconds: go through the deadlines in order, and
whenever the work so far does not fit before one, give the largest job up. Jobs given up and best-effort
jobs share the rest, shortest first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Bools, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ChronusPolicy:
    """Deadlines that can be met in order, then the shortest."""

    name: str = "chronus"
    paper: str = "Gao et al. (SoCC 2021)"
    admission: str = "fits"
    lease_s: float = 600.0
    """How long a choice holds while anybody waits."""

    def allocate(self, table: Table) -> Shares:
        """Jobs that will be in time by deadline, the others by remaining time."""
        chosen = jobs_in_time(table)
        left = table.time_left()
        key = np.where(chosen, table.deadline, left)
        shares = gangs(table, np.lexsort((key, ~chosen)))
        anybody_waits = bool(np.any(shares.workers == 0))
        wake = table.now + self.lease_s if anybody_waits else None
        return Shares(workers=shares.workers, kind=shares.kind, wake_s=wake)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """In time, given up or best effort."""
        if np.isinf(table.deadline[row]):
            return "best effort: shortest first on what the deadlines leave"
        if jobs_in_time(table)[row]:
            return "its deadline can be met" if after > before else "jobs due earlier come first"
        return "its deadline can not be met without giving up more jobs; it gets what is left"


def jobs_in_time(table: Table) -> Bools:
    """A largest set of jobs that can all meet their deadlines, counted in device-seconds."""
    left = table.time_left()
    chosen: Bools = np.zeros(len(table), dtype=np.bool_)
    hopeful = np.flatnonzero(np.isfinite(table.deadline) & (table.now + left <= table.deadline))
    rate = float(sum(table.capacity))
    taken: list[tuple[float, int]] = []
    used = 0.0
    for row in hopeful[np.argsort(table.deadline[hopeful], kind="stable")].tolist():
        need = float(left[row] * table.gpus[row])
        heapq.heappush(taken, (-need, row))
        used += need
        if used > rate * (float(table.deadline[row]) - table.now):
            negative, _ = heapq.heappop(taken)
            used += negative
    chosen[[row for _, row in taken]] = True
    return chosen
