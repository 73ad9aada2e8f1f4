"""Huawei's earlier rules: leave no node idle, halve the longest-running job when somebody waits.

Hu et al., "An optimal resource allocator of elastic training for deep learning jobs on cloud", section 3:
what the optimal allocator (`milp`) is measured against. Idle nodes go to the head of the queue, as many as it
can use; with nobody waiting, to the job that has trained for the shortest time. With no node idle and
somebody waiting, the job that has trained longest gives half of its nodes to the head of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.rolling import Sizing, is_moment, next_moment, stamped
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyPolicy:
    """The four scenarios of the paper."""

    name: str = "greedy"
    paper: str = "Hu et al. (2021), section 3"
    admission: str = "fits-elastic"
    period_s: float = 300.0
    """Time between two resizings."""
    most: int = 16
    """Devices a job may grow to, if it did not ask for more."""
    halvings: int | None = 1
    """How many jobs may be halved at one moment. The paper speaks of one. None: until nobody waits."""

    def allocate(self, table: Table) -> Shares:
        """The queue always, the other rules at their moments."""
        sizing, moment = Sizing(table, self.most), is_moment(table, self.period_s)
        sizing.repair()
        sizing.start_waiting()
        if moment:
            self._halve(sizing)
            if not sizing.waiting():
                _grow(sizing)
        return Shares(
            workers=sizing.workers,
            kind=sizing.kind,
            stamp=stamped(table, moment),
            wake_s=next_moment(table, self.period_s, sizing.workers),
        )

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Which rule."""
        if after > before:
            return f"{after} devices, as many idle ones as it can use"
        if after < before:
            return f"trained longest: {before - after} of its devices go to the first in the queue"
        return "no device is idle; half of the longest-running job's are given away at the next moment"

    def _halve(self, sizing: Sizing) -> None:
        """Scenario 3."""
        order = [row for row in np.argsort(-sizing.table.executed(), kind="stable").tolist() if sizing.table.held[row]]
        for _ in range(int(sizing.workers.sum()) if self.halvings is None else self.halvings):
            row = next((row for row in order if _half(sizing, row)), None)
            if row is None or not sizing.waiting():
                return
            sizing.resize(row, int(sizing.kind[row]), _half(sizing, row))
            sizing.start_waiting()


def _half(sizing: Sizing, row: int) -> int:
    """Half of what the job has, or the next size below; 0: it can not give any away."""
    had = int(sizing.workers[row])
    return sizing.largest(row, int(sizing.kind[row]), had // 2) if had else 0


def _grow(sizing: Sizing) -> None:
    """Scenario 2."""
    for row in np.argsort(sizing.table.executed(), kind="stable").tolist():
        if max(sizing.free) <= 0:
            return
        had, kind = int(sizing.workers[row]), int(sizing.kind[row])
        more = sizing.largest(row, kind, had + sizing.free[kind]) if had else 0
        if more > had:
            sizing.resize(row, kind, more)
