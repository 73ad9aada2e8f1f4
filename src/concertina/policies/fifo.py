"""First in, first out, gang by gang: the job at the head blocks all behind it. Nothing is preempted.

The static baseline of Elan VI-C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import choose_type
from concertina.policies.table import Ints, Table


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
        started, _ = start_from_head(table, free)
        return started_shares(table, started)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Head of the queue, or behind it."""
        if after > before:
            return f"first in the queue and {after} devices are free"
        return f"needs {int(table.gpus[row])} devices; {sum(table.free())} are free, or an earlier job waits"


def start_from_head(table: Table, free: list[int]) -> tuple[list[tuple[int, int]], Ints]:
    """Waiting rows that can start in order, with their type, and those after the first that can not.

    Lowers `free`.
    """
    waiting = np.flatnonzero(table.held == 0)
    started: list[tuple[int, int]] = []
    for row in waiting:
        kind = choose_type(table, int(row), free)
        if kind < 0:
            break
        started.append((int(row), kind))
        free[kind] -= int(table.gpus[row])
    return started, waiting[len(started) :]


def started_shares(table: Table, started: list[tuple[int, int]]) -> Shares:
    """What is held, and the asked devices for those that start."""
    if not started:
        return Shares(workers=table.held)
    workers, kinds = table.held.copy(), table.kind.copy()
    for row, kind in started:
        workers[row], kinds[row] = table.gpus[row], kind
    return Shares(workers=workers, kind=kinds)
