"""First in, first out, gang by gang: the job at the head blocks all behind it. Nothing is preempted.

The static baseline of Elan VI-C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import choose_type
from concertina.policies.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoPolicy:
    """Start waiting jobs in order of submission until one does not fit."""

    name: str = "fifo"
    paper: str = "Elan (ICDCS 2020), VI-C: static baseline"
    admission: str = "fits"

    def allocate(self, table: Table) -> Shares:
        """Start from the head of the queue."""
        free = table.free()
        if max(free, default=0) <= 0:
            return Shares(workers=table.held)
        starts, _ = start_from_head(table, free)
        return Shares(workers=table.held, starts=starts)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Head of the queue, or behind it."""
        if after > before:
            return f"first in the queue and {after} devices are free"
        return f"needs {int(table.gpus[row])} devices; {sum(table.free())} are free, or an earlier job waits"


def waiting_rows(table: Table, stretch: int = 128) -> Iterator[int]:
    """Rows of jobs that wait, in order, found as far as somebody looks."""
    held = table.held
    at = 0
    while at < len(held):
        yield from (np.flatnonzero(held[at : at + stretch] == 0) + at).tolist()
        at, stretch = at + stretch, 4 * stretch


def start_from_head(table: Table, free: list[int]) -> tuple[dict[int, int], int | None]:
    """Waiting rows that can start in order, with their type, and the first that can not. Lowers `free`."""
    starts: dict[int, int] = {}
    for row in waiting_rows(table):
        kind = choose_type(table, row, free)
        if kind < 0:
            return starts, row
        starts[row] = kind
        free[kind] -= int(table.gpus[row])
    return starts, None
