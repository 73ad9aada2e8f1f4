"""YARN's capacity scheduler as Philly used it: first in, first out, whole gangs of one type, close together.

A job waits until its devices are on one node, or on whole nodes and one rest; the head of the queue
blocks those behind it. The baseline of EasyScale 5.2; Jeon et al., "Analysis of large-scale multi-tenant
GPU clusters for DNN training workloads" (ATC 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from concertina.policies.base import Shares
from concertina.policies.fifo import FifoPolicy, waiting_rows
from concertina.policies.placement import Placer, Spot
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnCsPolicy:
    """Gangs in order of submission, each placed compactly or not at all."""

    name: str = "yarn-cs"
    paper: str = "YARN capacity scheduler; EasyScale (SC 2023), 5.2"
    admission: str = "fits"
    first_fit: bool = False
    """Take the first node with room instead of the fullest (as the Tiresias authors' simulator does)."""

    def allocate(self, table: Table) -> Shares:
        """Start from the head of the queue while a compact place is found."""
        if table.rooms is None:
            return FifoPolicy().allocate(table)
        if max(table.free(), default=0) <= 0:
            return Shares(workers=table.held)
        found = self._start(table, table.rooms)
        return Shares(
            workers=table.held,
            starts={row: kind for row, (kind, _) in found.items()},
            spots={row: spots for row, (_, spots) in found.items()},
        )

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Head of the queue, or no compact place."""
        if after > before:
            return f"first in the queue and {after} devices are free close together"
        need = int(table.gpus[row])
        return f"needs {need} devices of one type close together, or an earlier job waits"

    def _start(self, table: Table, rooms: Placer) -> dict[int, tuple[int, tuple[Spot, ...]]]:
        tried: Placer | None = None
        started: dict[int, tuple[int, tuple[Spot, ...]]] = {}
        for row in waiting_rows(table):
            found = self._find(table, row, tried or rooms)
            if found is None:
                break
            tried = tried or rooms.copy()
            tried.take(row, found[1])
            started[row] = found
        return started

    def _find(self, table: Table, row: int, rooms: Placer) -> tuple[int, tuple[Spot, ...]] | None:
        """The fastest allowed type with a compact place."""
        need, best, best_speed = int(table.gpus[row]), None, 0.0
        for kind, name in enumerate(table.types):
            if table.allowed[row] >> kind & 1:
                speed = table.curves[row].speed(name, need)
                spots = rooms.compact(kind, need, first_fit=self.first_fit) if speed > best_speed else None
                if spots is not None:
                    best, best_speed = (kind, spots), speed
        return best
