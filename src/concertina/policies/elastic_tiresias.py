"""Elastic-Tiresias: the queues of Tiresias, with jobs that shrink when others wait and grow when none do.

EDL, 6.2. R1: while more than `pending` jobs would wait, every job that has left the first queue gets half of
what it asked for. R2: when nobody waits and devices are idle, they go one by one to the job whose speed they
raise most in proportion. The whole plan is made anew in every round, so a job that both rules touch changes
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.fill import choose_type, gangs, take_in_order
from concertina.policies.marginal import CurveKey
from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Floats, Ints, Table
from concertina.policies.tiresias import TiresiasPolicy, next_sinking, queue_of

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTiresiasPolicy(TiresiasPolicy):
    """2D-LAS with rules R1 and R2."""

    name: str = "elastic-tiresias"
    paper: str = "EDL / Amoeba, 6.2: rules R1 and R2"
    pending: int = 0
    """N: jobs that may wait before others are halved. The paper gives no figure."""

    def allocate(self, table: Table) -> Shares:
        """Queue by queue; then R1 or R2."""
        service = table.service()
        level = queue_of(service, self.limits)
        order = self._order(table, service, level)
        shares = gangs(table, order)
        workers, kind = shares.workers, shares.kind
        if np.count_nonzero(workers == 0) > self.pending:
            workers, kind = halved(table, order, level)
        if len(workers) and workers.all():
            workers = grown(table, workers, kind)
        return Shares(
            workers=workers,
            kind=kind,
            level=level,
            stamp=self._places(table, order, level, workers),
            wake_s=next_sinking(table, workers, service, level, self.limits),
        )

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """The queue it is in, and the rule."""
        queue, asked = int(queue_of(table.service()[row : row + 1], self.limits)[0]), int(table.gpus[row])
        if after > asked:
            return f"nobody waits and {after} instead of {asked} devices raise its speed most"
        if 0 < after < asked:
            return f"in queue {queue} and others wait: half of the {asked} devices it asked for"
        if after > before:
            return f"in queue {queue} and {after} devices are left for it"
        if after < before:
            return f"in queue {queue}; its devices go to jobs with less attained service"
        return f"in queue {queue}; jobs before it take the devices"


def halved(table: Table, order: Ints, level: Ints) -> tuple[Ints, Ints | None]:
    """R1: in this order, half for those below the first queue, where they can run on half."""
    demand = np.where(level > 0, np.maximum(table.gpus // 2, 1), table.gpus)
    while True:
        workers, kind = _take(table, order, demand)
        refused = [
            row
            for row in np.flatnonzero((workers > 0) & (demand < table.gpus)).tolist()
            if not _runs(table, row, workers, kind)
        ]
        if not refused:
            return workers, kind
        demand[refused] = table.gpus[refused]


def _runs(table: Table, row: int, workers: Ints, kind: Ints | None) -> bool:
    """Whether the job can run on what it would get."""
    count = int(workers[row])
    name = table.types[0 if kind is None else int(kind[row])]
    return count >= (table.specs[row].min_workers or 1) and table.curves[row].speed(name, count) > 0


def _take(table: Table, order: Ints, demand: Ints) -> tuple[Ints, Ints | None]:
    """Devices for each row, in this order where they are left."""
    workers = np.zeros(len(table), dtype=np.int64)
    if len(table.types) == 1:
        taken = order[take_in_order(demand[order], table.capacity[0])]
        workers[taken] = demand[taken]
        return workers, None
    kinds, free = np.full(len(table), -1, dtype=np.int64), list(table.capacity)
    for row in order.tolist():
        if not any(free):
            break
        for need in dict.fromkeys((int(demand[row]), int(table.gpus[row]))):  # all, if it does not run on half
            kind = choose_type(table, row, free, stay=int(table.kind[row]), need=need)
            if kind >= 0:
                break
        if kind >= 0:
            free[kind] -= need
            workers[row], kinds[row] = need, kind
    return workers, kinds


# -- R2 ------------------------------------------------------------------------------------------------------


def grown(table: Table, workers: Ints, kind: Ints | None) -> Ints:
    """R2: idle devices one by one to the largest (t(p + 1) - t(p)) / t(p), type by type."""
    result = workers.copy()
    for index, name in enumerate(table.types):
        rows = np.arange(len(workers)) if kind is None else np.flatnonzero(kind == index)
        free = table.capacity[index] - int(workers[rows].sum())
        if free > 0 and rows.size:
            curves = [table.curves[row] for row in rows.tolist()]
            limits = [table.specs[row].max_workers or _UNBOUNDED for row in rows.tolist()]
            result[rows] += extra_devices(curves, name, workers[rows], np.asarray(limits), free)
    return result


def extra_devices(curves: Sequence[ScalingCurve], name: str, now: Ints, limits: Ints, free: int) -> Ints:
    """How many more each job gets of `free` devices, given away one by one to the highest relative gain.

    Jobs with the same curve, size and limit gain alike, so whole groups are served at a time; within the last
    one the earlier jobs come first.
    """
    number = {id(curve): i for i, curve in enumerate(curves)}  # any of those that share it
    kinds = np.asarray([number[id(curve)] for curve in curves])
    limits = np.minimum(limits, now + free)
    _, first, group, size = np.unique(
        (kinds << 40) | (now << 20) | np.minimum(limits, (1 << 20) - 1),
        return_index=True, return_inverse=True, return_counts=True,
    )  # fmt: skip
    offers = [relative_gains(CurveKey(curves[i]), name)[now[i] : limits[i]] for i in first.tolist()]
    gains = np.concatenate([np.minimum.accumulate(offer) for offer in offers])
    owner = np.repeat(np.arange(len(offers)), [len(offer) for offer in offers])
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0]
    total = np.cumsum(size[owner[order]])
    whole = int(np.searchsorted(total, free, side="right"))
    steps = np.bincount(owner[order[:whole]], minlength=len(offers))
    extra: Ints = steps[group]
    if whole < len(order):
        rest = free - (int(total[whole - 1]) if whole else 0)
        extra[np.flatnonzero(group == owner[order[whole]])[:rest]] += 1
    return extra


@lru_cache(maxsize=1024)
def relative_gains(key: CurveKey, name: str) -> Floats:
    """What one device more adds to the speed on 0, 1, 2, ... devices, in proportion; 0 where nothing is known."""
    curve = key.curve
    top = max(curve.counts(name), default=0)
    speed = np.asarray([curve.speed(name, count) for count in range(top + 1)])
    gains = np.zeros(top + 1)
    there = speed[:-1] > 0
    gains[:-1][there] = speed[1:][there] / speed[:-1][there] - 1
    return gains
