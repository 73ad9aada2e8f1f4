"""Themis: devices go to the jobs that are treated worst, by finish-time fairness, for a lease at a time.

Mahajan et al., "Themis: Fair and efficient GPU cluster scheduling" (NSDI 2020). rho is the time a job
needs in the shared cluster over the time it would need with its fair share of it alone. Every lease,
gangs go to the largest rho first; the paper's auction among them decides about placement, which is left
to `placement.py` here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Floats, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ThemisPolicy:
    """Largest finish-time fairness first."""

    name: str = "themis"
    paper: str = "Mahajan et al. (NSDI 2020)"
    admission: str = "fits"
    lease_s: float = 600.0
    """How long a choice holds."""

    def allocate(self, table: Table) -> Shares:
        """By rho, worst first."""
        shares = gangs(table, np.argsort(-finish_time_fairness(table), kind="stable"))
        anybody_waits = bool(np.any(shares.workers == 0))
        wake = table.now + self.lease_s if anybody_waits else None
        return Shares(workers=shares.workers, kind=shares.kind, wake_s=wake)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its rho."""
        rho = float(finish_time_fairness(table)[row])
        if after > before:
            return f"finish-time fairness {rho:.2f}, among the worst"
        return f"finish-time fairness {rho:.2f}; jobs that are treated worse come first"


def finish_time_fairness(table: Table) -> Floats:
    """Expected time from submission to end if it runs from now on, over the time with a fair share alone."""
    fair = sum(table.capacity) / max(len(table), 1)
    left = table.time_left()
    alone = (table.done() + table.left()) / table.asked_speed * np.maximum(table.gpus / max(fair, 1e-9), 1.0)
    rho: Floats = (table.now - table.submit + left) / np.maximum(alone, 1e-9)
    return rho
