"""EASY backfilling: first in, first out, but a later job may start now if that does not delay the head.

The head of the queue gets a reservation at the earliest time at which, by the estimates, enough devices
will be free. A later job may start if it ends before that time or uses only devices the head will not
need then. Lifka, "The ANL/IBM SP scheduling system" (1995); the static baseline of Elan VI-C and the
default of Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fifo import start_from_head
from concertina.policies.fill import choose_type
from concertina.policies.table import Table


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
        starts, head = start_from_head(table, free)
        if head is not None and max(free) > 0:
            fill_gaps(table, starts, free, head)
        return Shares(workers=table.held, starts=starts)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Head, gap or wait."""
        if after > before and not np.any(table.held[:row] == 0):
            return f"first in the queue and {after} devices are free"
        if after > before:
            return f"{after} devices are free and starting now does not delay the first in the queue"
        return f"needs {int(table.gpus[row])} devices without delaying the first in the queue"


def fill_gaps(table: Table, starts: dict[int, int], free: list[int], head: int) -> None:
    """Add to `starts` the jobs behind `head` that can start now without delaying it."""
    reserved = choose_type(table, head, table.capacity)
    for kind, there in enumerate(free):
        if there <= 0:
            continue
        gap = Gap(free=there, spare=there, window=np.inf)
        if kind == reserved:
            reserve(table, starts, kind, int(table.gpus[head]), gap)
        for row in gap_rows(table, kind, head + 1, gap):
            if row not in starts and gap.takes(int(table.gpus[row]), float(table.waiting_left[row])):
                starts[row] = kind


@dataclass(slots=True, kw_only=True)
class Gap:
    """Devices that are free until the first in the queue gets them."""

    free: int
    spare: int
    """Of those, the ones it will not need then."""
    window: float
    """Seconds until then, by the estimates."""

    def takes(self, gpus: int, seconds: float) -> bool:
        """Let a job of this size and length start, if it delays nobody."""
        short = seconds <= self.window
        if gpus > self.free or not (short or gpus <= self.spare):
            return False
        self.free -= gpus
        if not short:
            self.spare -= gpus
        return True


def gap_rows(table: Table, kind: int, at: int, gap: Gap) -> Iterator[int]:
    """Waiting rows from `at` on that fit into the gap as it is when they are reached, found stretch by
    stretch."""
    n, stretch = len(table), 256
    held, gpus, allowed, left = table.held, table.gpus, table.allowed, table.waiting_left
    while at < n and gap.free > 0:
        rows = slice(at, min(at + stretch, n))
        size = gpus[rows]
        fits = (left[rows] <= gap.window) & (size <= gap.free)
        if gap.spare > 0:
            fits |= size <= gap.spare
        fits &= held[rows] == 0
        if len(table.types) > 1:
            fits &= allowed[rows] >> kind & 1 == 1
        for row in (np.flatnonzero(fits) + at).tolist():
            yield row
            if gap.free <= 0:
                return
        at, stretch = at + stretch, 4 * stretch


def reserve(table: Table, starts: dict[int, int], kind: int, need: int, gap: Gap) -> None:
    """Find out how long until `need` devices are free by the estimates, and how many will be spare then."""
    rows = np.flatnonzero(table.kind == kind)
    size = table.held[rows]
    new = [row for row, its in starts.items() if its == kind]
    if new:
        rows, size = np.concatenate([rows, new]), np.concatenate([size, table.gpus[new]])
    left = table.time_left_of(rows)
    order = np.argsort(left, kind="stable")
    there = gap.free + np.cumsum(size[order])
    at = int(np.searchsorted(there, need))
    if at < len(there):  # else nodes are down: it can not start before they are back
        gap.window, gap.spare = float(left[order[at]]), int(there[at]) - need
