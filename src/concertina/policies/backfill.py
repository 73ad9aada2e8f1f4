"""EASY backfilling: first in, first out, but a later job may start now if that does not delay the head.

The head of the queue gets a reservation at the earliest time at which, by the estimates, enough devices
will be free. A later job may start if it ends before that time or uses only devices the head will not
need then. Lifka, "The ANL/IBM SP scheduling system" (1995); the static baseline of Elan VI-C and the
default of Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fifo import start_from_head, started_shares
from concertina.policies.fill import choose_type
from concertina.policies.table import Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPolicy:
    """FIFO with EASY backfilling."""

    name: str = "backfill"
    paper: str = "Lifka (JSSPP 1995), EASY; Elan (ICDCS 2020), VI-C"
    admission: str = "fits"

    def allocate(self, table: Table) -> Shares:
        """Start from the head, reserve for the first that does not fit, fill the gaps."""
        free = table.free()
        if max(free, default=0) <= 0:
            return Shares(workers=table.held)
        started, blocked = start_from_head(table, free)
        if blocked.size > 1 and max(free) > 0:
            started += fill_gaps(table, started, free, head=int(blocked[0]), rest=blocked[1:])
        return started_shares(table, started)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Head, gap or wait."""
        if after > before and not np.any(table.held[:row] == 0):
            return f"first in the queue and {after} devices are free"
        if after > before:
            return f"{after} devices are free and starting now does not delay the first in the queue"
        return f"needs {int(table.gpus[row])} devices without delaying the first in the queue"


def fill_gaps(
    table: Table, started: list[tuple[int, int]], free: list[int], *, head: int, rest: Ints
) -> list[tuple[int, int]]:
    """Those of `rest` that can start now without delaying `head`, with their type."""
    found: list[tuple[int, int]] = []
    time_left = table.time_left()
    best = choose_type(table, head, table.capacity)  # where the head's devices are reserved
    for kind in range(len(free)):
        if free[kind] <= 0:
            continue
        window, spare = np.inf, free[kind]
        if kind == best:
            window, spare = reserve(table, started, time_left, kind, free[kind], int(table.gpus[head]))
        may = table.allowed[rest] >> kind & 1 == 1
        open_ = rest[may] if len(free) > 1 else rest
        chosen = _gap_jobs(table.gpus, time_left, open_, free[kind], window, spare)
        found += [(row, kind) for row in chosen]
        rest = rest[~np.isin(rest, chosen)] if len(free) > 1 else rest
    return found


def reserve(
    table: Table, started: list[tuple[int, int]], time_left: Floats, kind: int, free: int, need: int
) -> tuple[float, int]:
    """How long until `need` devices are free by the estimates, and how many will be spare then."""
    running = np.flatnonzero(table.kind == kind)
    new = np.asarray([row for row, its in started if its == kind], dtype=np.int64)
    left = np.concatenate([time_left[running], time_left[new]])
    size = np.concatenate([table.held[running], table.gpus[new]])
    order = np.argsort(left, kind="stable")
    there = free + np.cumsum(size[order])
    at = int(np.searchsorted(there, need))
    if at == len(there):  # nodes are down: it can not start before they are back
        return np.inf, free
    return float(left[order[at]]), int(there[at]) - need


def _gap_jobs(gpus: Ints, time_left: Floats, rows: Ints, free: int, window: float, spare: int) -> list[int]:
    demand, short = gpus[rows], time_left[rows] <= window
    chosen: list[int] = []
    at = 0
    while free > 0:
        rest = demand[at:]
        ok = (rest <= free) & (short[at:] | (rest <= spare))
        step = int(np.argmax(ok)) if ok.size else 0
        if not ok.size or not ok[step]:
            break
        at += step
        free -= int(demand[at])
        if not short[at]:
            spare -= int(demand[at])
        chosen.append(int(rows[at]))
        at += 1
    return chosen
