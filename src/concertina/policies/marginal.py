"""Devices step by step to whoever saves most time by them: Optimus's marginal gain, on arrays.

A step takes a job from one size to the next: the measured numbers of devices and those half-way between two
of them. Its gain is the remaining time saved per device. (One device at a time, as Elan says it, would let jobs
change size with every little progress.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from concertina.policies.scaling_curve import ScalingCurve
from concertina.policies.table import Floats, Ints, Table


class CurveKey:
    """A curve as a key of a cache: itself and no other."""

    __slots__ = ("curve",)

    def __init__(self, curve: ScalingCurve) -> None:
        self.curve = curve

    def __hash__(self) -> int:
        return id(self.curve)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CurveKey) and other.curve is self.curve


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """Sizes a job can have on one device type, rising, each faster than the one before."""

    sizes: tuple[int, ...]
    speeds: tuple[float, ...]


@lru_cache(maxsize=4096)
def ladder(key: CurveKey, device_type: str, low: int, high: int) -> Ladder:
    """Sizes from `low` to `high` on which the job runs, without those that are no faster than less."""
    sizes: list[int] = []
    speeds: list[float] = []
    measured = key.curve.counts(device_type)
    for size in sorted({*measured, *((a + b) // 2 for a, b in pairwise(measured))}):
        speed = key.curve.speed(device_type, size)
        if low <= size <= high and speed > max(speeds, default=0.0):
            sizes.append(size)
            speeds.append(speed)
    return Ladder(tuple(sizes), tuple(speeds))


def ladder_of(table: Table, row: int, kind: int) -> Ladder:
    """What this job can have of that type."""
    spec = table.specs[row]
    high = min(spec.max_workers or 1 << 30, table.capacity[kind])
    return ladder(CurveKey(table.curves[row]), table.types[kind], spec.min_workers or 1, high)


@dataclass(frozen=True, slots=True)
class Filled:
    """Devices and speed of each of some jobs."""

    sizes: Ints
    speeds: Floats


def fill(ladders: Sequence[Ladder], left: Floats, capacity: int) -> Filled:
    """The first size to everyone (they must fit), then steps by gain while devices are left."""
    at = np.zeros(len(ladders), dtype=np.int64)
    distinct = list({id(one): one for one in ladders}.values())
    number = {id(one): i for i, one in enumerate(distinct)}
    which = np.asarray([number[id(one)] for one in ladders], dtype=np.int64)
    sizes, speeds = _padded([one.sizes for one in distinct]), _padded([one.speeds for one in distinct])
    free = capacity - int(sizes[which, 0].sum())
    assert free >= 0, "the first sizes do not fit"
    cost = np.diff(sizes, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        saved = np.where(cost > 0, -np.diff(1 / speeds, axis=1) / cost, 0.0)
    # A later step never before an earlier one of the same job, even where the curve has a dent.
    gains = np.minimum.accumulate(saved, axis=1)[which] * left[:, None]
    cost = cost[which].astype(np.int64)
    order = np.argsort(-gains, axis=None, kind="stable")
    order = order[gains.ravel()[order] > 0]
    rows, steps = np.divmod(order, max(gains.shape[1], 1))
    weights = cost[rows, steps]
    while order.size and free > 0:
        # As far as all fit; then without the jobs whose next step does not.
        total = np.cumsum(weights)
        fits = int(np.searchsorted(total, free, side="right"))
        np.add.at(at, rows[:fits], 1)
        free -= int(total[fits - 1]) if fits else 0
        rest = slice(fits, None)
        order, rows, steps, weights = order[rest], rows[rest], steps[rest], weights[rest]
        if order.size:
            blocked = np.zeros(len(ladders), dtype=np.bool_)
            blocked[rows[(weights > free) & (steps == at[rows])]] = True
            keep = ~blocked[rows]
            order, rows, steps, weights = order[keep], rows[keep], steps[keep], weights[keep]
    return Filled(sizes[which, at].astype(np.int64), speeds[which, at])


def _padded(ladders: Sequence[Sequence[float]]) -> Floats:
    """Ladders of different length as one array; the last value repeats."""
    width = max(map(len, ladders), default=1)
    return np.asarray([[*one, *[one[-1]] * (width - len(one))] for one in ladders], dtype=np.float64)
