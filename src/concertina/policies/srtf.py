"""Shortest remaining time first, preemptive; the remaining time is what the estimates say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SrtfPolicy:
    """Give gangs to the jobs that will be done soonest."""

    name: str = "srtf"
    paper: str = "Schrage (1968); baseline of Gu et al. (NSDI 2019)"
    admission: str = "fits"
    two_dimensional: bool = False
    """Whether remaining time is weighed with the devices asked for (2D-SRTF of Tiresias)."""

    def allocate(self, table: Table) -> Shares:
        """By remaining time."""
        key = table.time_left()
        if self.two_dimensional:
            key = key * table.gpus
        return gangs(table, np.argsort(key, kind="stable"))

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its remaining time."""
        left = float(table.time_left()[row])
        if after > before:
            return f"about {left:.0f} s left, few enough to run now"
        return f"about {left:.0f} s left; jobs with less to do come first"
