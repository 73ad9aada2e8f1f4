"""Tiresias: least attained service in discrete queues, or the Gittins index, both in two dimensions.

Gu et al., "Tiresias: A GPU cluster manager for distributed deep learning" (NSDI 2019). A job's service is
devices times time. It starts in the first queue and sinks when its service passes a queue's limit; within a
queue those that run come first, then the order in which they came to it. With `samples` of how much service
jobs need in the end, the Gittins index orders each queue instead. The paper's promotion of starving jobs is
left out: it is off in the authors' own experiments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import gangs
from concertina.policies.table import Bools, Floats, Ints, Table

_CLOSE = 1e-3
"""Device-seconds by which a limit counts as reached: above the rounding error of a long simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiresiasPolicy:
    """Discretised two-dimensional least attained service (2D-LAS)."""

    name: str = "tiresias"
    paper: str = "Gu et al. (NSDI 2019), 2D-LAS"
    admission: str = "fits"
    limits: tuple[float, ...] = (3250.0, 7200.0)
    """Device-seconds at which a job sinks from queue i to queue i + 1."""
    running_first: bool = True
    """Whether those that run go before those that wait in the same queue (the authors' program)."""
    samples: tuple[float, ...] = ()
    """Device-seconds that past jobs took, rising. Empty: order by place (2D-LAS)."""
    delta: float = 3250.0
    """Device-seconds ahead that the Gittins index looks."""

    def allocate(self, table: Table) -> Shares:
        """Queue by queue, each in its own order."""
        service = table.service()
        level = queue_of(service, self.limits)
        order = self._order(table, service, level)
        shares = gangs(table, order)
        return Shares(
            workers=shares.workers,
            kind=shares.kind,
            level=level,
            stamp=self._places(table, order, level, shares.workers),
            wake_s=next_sinking(table, shares.workers, service, level, self.limits),
        )

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """The queue it is in."""
        queue = int(queue_of(table.service()[row : row + 1], self.limits)[0])
        if after > before:
            return f"in queue {queue} and {after} devices are left for it"
        if after < before:
            return f"in queue {queue}; its devices go to jobs with less attained service"
        return f"in queue {queue}; jobs before it take the devices"

    def _places(self, table: Table, order: Ints, level: Ints, workers: Ints) -> Floats | None:
        """Everyone's place in its queue for the next round; None where nobody came, sank, started or
        stopped."""
        runs = workers > 0
        settled = np.array_equal(runs, table.held > 0) and np.array_equal(level, table.level)
        if settled and bool(np.all(table.stamp > 0)):
            return None
        return next_places(order, level, runs & self.running_first)

    def _order(self, table: Table, service: Floats, level: Ints) -> Ints:
        if not self.samples:
            return queue_order(table, level)
        order: Ints = np.lexsort((-gittins_index(service, self.samples, self.delta), level))
        return order


def log_normal_samples(median: float, sigma: float, count: int = 200) -> tuple[float, ...]:
    """Quantiles of a log-normal distribution: what is known about service where nothing was learned yet."""
    normal = NormalDist(math.log(median), sigma)
    return tuple(math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count))


def gittins_index(service: Floats, samples: tuple[float, ...], delta: float) -> Floats:
    """How likely a job ends within `delta` more device-seconds, over what that is expected to take."""
    index: Floats = _gittins_table(samples, delta)[np.searchsorted(np.asarray(samples), service, side="right")]
    return index


@lru_cache(maxsize=8)
def _gittins_table(samples: tuple[float, ...], delta: float) -> Floats:
    """The index of a job that has outlived the first i samples, for every i."""
    data = np.asarray(samples)
    table = np.zeros(len(data) + 1)
    reached = np.concatenate([[0.0], data])
    for i in range(len(data)):
        more = data[data > reached[i]] - reached[i]
        if more.size:
            table[i] = np.count_nonzero(more <= delta) / np.sum(np.minimum(more, delta))
    return table


def queue_of(service: Floats, limits: tuple[float, ...]) -> Ints:
    """The queue for each attained service."""
    level: Ints = np.zeros(len(service), dtype=np.int64)
    for limit in limits:
        level += service >= limit - _CLOSE
    return level


def queue_order(table: Table, level: Ints) -> Ints:
    """Rows by queue; within one by the place they had, then those that are new in it."""
    n = len(table)
    rows = np.arange(n, dtype=np.float64)
    is_new = (table.stamp == 0) | (level != table.level)
    place = np.where(is_new, n + 1 + rows, table.stamp)
    order: Ints = np.argsort(level * (4.0 * n + 4) + place, kind="stable")
    return order


def next_places(order: Ints, level: Ints, runs: Bools) -> Floats:
    """Places in the queues after this round: those that run first, otherwise in the same order."""
    rank = (2 * level[order] + ~runs[order]).astype(np.int8)
    places = np.empty(len(order), dtype=np.float64)
    places[order[np.argsort(rank, kind="stable")]] = np.arange(1, len(order) + 1)
    return places


def next_sinking(table: Table, workers: Ints, service: Floats, level: Ints, limits: tuple[float, ...]) -> float | None:
    """When the first job that will run passes the limit of its queue."""
    rows = np.flatnonzero((workers > 0) & (level < len(limits)))
    if not rows.size:
        return None
    goal = np.asarray(limits)[level[rows]]
    return float(table.now + np.min((goal - service[rows]) / workers[rows]))
