"""The floor under jobs without a promise: finish-time fairness, kept from round to round.

rho (Mahajan et al., "Themis", NSDI 2020) is the time a job takes in the shared cluster over the time it would
take with its share of it alone: the time on the devices it asked for, times how crowded the cluster was while
it lived. Crowding is what all jobs together ask for over what there is, and at least 1. The sum of crowding
over a job's life is kept in its notes (`stamp`; `level` is when it was last added to, in milliseconds), so a
restart changes nothing. Pure arithmetic on columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from concertina.policies.table import Floats, Ints, Table

FLOOR = 2.0
"""The rho from which a job comes before others: far enough from 1 for short jobs to go first, near enough for a
promise of 2.5."""
_TICKS = 1000.0
"""Of the clock in a job's notes, per second."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """How some jobs fare, a column for each figure."""

    crowd: float
    """What is asked for over what there is, now; at least 1."""
    crowd_s: Floats
    """The sum of that over each job's life."""
    alone_s: Floats
    """How long it takes in all on the devices it asked for."""
    fair_s: Floats
    """How long it takes in all with its fair share of the cluster."""
    rest_s: Floats
    """How long what is left takes with its fair share."""
    rho: Floats
    """What its rho will be if it gets its fair share from now on."""


def fairness_of(table: Table, rows: Ints) -> Fairness:
    """How the jobs in these rows fare."""
    crowd = max(float(table.gpus.sum()) / max(sum(table.capacity), 1), 1.0)
    lived = table.now - table.submit[rows]
    known = table.stamp[rows] > 0
    since = np.where(known, table.level[rows] / _TICKS, table.submit[rows])
    crowd_s = table.stamp[rows] + crowd * np.maximum(table.now - since, 0.0)
    rest_s = table.time_left()[rows] * crowd
    alone_s = (table.done()[rows] + table.left()[rows]) / table.asked_speed[rows]
    mean = (crowd_s + crowd * rest_s) / np.maximum(lived + rest_s, 1e-9)
    fair_s = np.maximum(alone_s * mean, 1e-9)
    return Fairness(crowd, crowd_s, alone_s, fair_s, rest_s, (lived + rest_s) / fair_s)


def notes(table: Table, rows: Ints, found: Fairness, levels: Ints) -> tuple[Ints, Floats]:
    """Both columns of notes with what to remember about these rows."""
    stamps = table.stamp.copy()
    levels, stamps[rows] = levels.copy(), np.maximum(found.crowd_s, 1e-6)
    levels[rows] = int(table.now * _TICKS)
    return levels, stamps
