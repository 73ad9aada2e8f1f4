"""Elastic-Backfill: Elastic-FIFO in which later jobs may start before a head of the queue that can not.

Elan, VI-C. As under EASY, they must not delay it: each ends by the estimates before enough devices come free
for the head, or needs none of those. Only the fewest devices of each job count, since everything beyond them
can be taken back at any moment. Where every job can run on one device, a head that does not fit leaves no room
for anybody else, and this is Elastic-FIFO.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from concertina.policies.backfill import Gap
from concertina.policies.elastic_fifo import Crew, ElasticFifoPolicy
from concertina.policies.fifo import waiting_rows

_LOOK_AHEAD = 256
"""Waiting jobs that are looked at behind the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBackfillPolicy(ElasticFifoPolicy):
    """Elastic-FIFO with EASY's reservation for the head."""

    name: str = "elastic-backfill"
    paper: str = "Elan (ICDCS 2020), VI-C"

    def start(self, crew: Crew) -> None:
        """The queue from its head; then gaps that the head leaves."""
        rows = waiting_rows(crew.table)
        for head in rows:
            if crew.full:
                return
            if not crew.try_start(head):
                gaps = reserve(crew, head)
                for row in islice(rows, _LOOK_AHEAD):
                    if not crew.full:
                        _fill_gap(crew, row, gaps)
                return


def reserve(crew: Crew, head: int) -> list[Gap]:
    """For each type, what may be used without delaying the head, who takes the type it can start on first."""
    gaps = [Gap(free=room, spare=room, window=np.inf) for room in crew.room]
    best: tuple[float, int, int] | None = None
    for kind, room in enumerate(crew.room):
        sizes = crew.ladder(head, kind).sizes
        if not sizes or not int(crew.table.allowed[head]) >> kind & 1:
            continue
        rows = crew.rows[kind]
        ends = crew.left[rows] / crew.filled(kind).speeds
        order = np.argsort(ends, kind="stable")
        there = room + np.cumsum(np.asarray([one.sizes[0] for one in crew.ladders[kind]], dtype=np.int64)[order])
        at = int(np.searchsorted(there, sizes[0]))
        if sizes[0] <= room:  # it fits and was not worth it: later ones leave it that room
            found = (0.0, kind, room - sizes[0])
        elif at < len(there):
            found = (float(ends[order[at]]), kind, int(there[at]) - sizes[0])
        else:
            continue
        best = found if best is None else min(best, found)
    if best is not None:
        window, kind, spare = best
        gaps[kind] = Gap(free=crew.room[kind], spare=min(spare, crew.room[kind]), window=window)
    return gaps


def _fill_gap(crew: Crew, row: int, gaps: list[Gap]) -> None:
    """Start a job behind the head if that delays nobody before it."""
    for speed, kind, rungs in crew.types_for(row):
        gap = gaps[kind]
        seconds = float(crew.left[row]) / speed
        saved = gap.free, gap.spare
        if gap.takes(rungs.sizes[0], seconds):
            if crew.try_start(row):
                return
            gap.free, gap.spare = saved
