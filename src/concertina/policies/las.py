"""Least attained service: every device-second goes to whoever has had the fewest, in rounds.

Max-min fairness over time for gangs of fixed size. Nuyens and Wierman, "The foreground-background queue:
a survey" (2008); Gavel's and Shockwave's `max_min_fairness` baseline; the undiscretised relative of
Tiresias' 2D-LAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class LasPolicy:
    """Gangs in order of attained service, looked at anew every quantum while anybody waits."""

    name: str = "las"
    paper: str = "Nuyens and Wierman (2008); max_min_fairness of Gavel (OSDI 2020)"
    admission: str = "fits"
    quantum_s: float = 360.0
    """How long a choice holds. Without it, two jobs would swap at every instant."""

    def allocate(self, table: Table) -> Shares:
        """By attained service; of equals those that run, then the order of submission."""
        service = table.service()
        waits = table.held == 0
        shares = gangs(table, np.lexsort((waits, service)))
        anybody_waits = bool(np.any(shares.workers == 0))
        wake = table.now + self.quantum_s if anybody_waits else None
        return Shares(workers=shares.workers, kind=shares.kind, wake_s=wake)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Its attained service."""
        service = float(table.service()[row])
        if after > before:
            return f"had {service:.0f} device-seconds, among the fewest"
        return f"had {service:.0f} device-seconds; jobs that had fewer come first"
