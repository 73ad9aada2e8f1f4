"""How fast a job is on devices of several types at once, from a curve that knows one type at a time.

On n devices in all, each does what one of n of its own type does, so that the cost of talking to n - 1 others
is in it; adding up the curves of the parts would forget that. `mixed_speed` assumes the work is shared out in
exact proportion, as a curve does between its measured counts. `virtual_plan` says what is left of it when whole
virtual workers are dealt out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from concertina.core.virtual_plan import DeviceGroup, VirtualPlan, plan
from concertina.policies.scaling_curve import ScalingCurve


def virtual_plan(curve: ScalingCurve, virtual: int, types: Sequence[str], counts: Sequence[int]) -> VirtualPlan | None:
    """The planner's answer for `counts` devices of each of `types`; None where the curve does not reach.

    Its `perf` is in mini-batches/s: `virtual` of them are one iteration of the curve.
    """
    total = sum(counts)
    there = [(kind, count) for kind, count in zip(types, counts, strict=True) if count]
    rates = tuple(virtual * curve.speed(kind, total) / total for kind, _ in there)
    if not rates or min(rates) <= 0:
        return None
    return _planned(virtual, tuple(count for _, count in there), rates)


def mixed_speed(curve: ScalingCurve, workers: Sequence[tuple[str, int]]) -> float:
    """Iterations/s on (type, devices) pairs; 0 where the curve does not reach."""
    total = sum(count for _, count in workers)
    speeds = [(curve.speed(kind, total), count) for kind, count in workers]
    return sum(speed * count / total for speed, count in speeds) if all(speed for speed, _ in speeds) else 0.0


@lru_cache(maxsize=1 << 16)
def _planned(virtual: int, counts: tuple[int, ...], rates: tuple[float, ...]) -> VirtualPlan | None:
    """Jobs of a kind ask the same again and again."""
    return plan(virtual, [DeviceGroup(count, (rate,)) for count, rate in zip(counts, rates, strict=True)])
