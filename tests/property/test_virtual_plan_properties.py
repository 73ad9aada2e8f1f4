"""The planner against all there is to choose from, on small cases."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.virtual_plan import DeviceGroup, VirtualPlan, deal, evaluate, plan, step_time

MANY = settings(max_examples=200, deadline=None)
SPEEDS = st.integers(1, 60).map(lambda tenths: tenths / 10)


def every_way(virtual: int, workers: int, least: int) -> list[tuple[int, ...]]:
    return [way for way in product(range(least, virtual + 1), repeat=workers) if sum(way) == virtual]


@MANY
@given(virtual=st.integers(1, 8), speeds=st.lists(SPEEDS, min_size=1, max_size=4))
def test_no_way_to_deal_has_a_shorter_step_or_is_more_even(virtual: int, speeds: list[float]) -> None:
    dealt = deal(virtual, speeds)
    ways = every_way(virtual, len(speeds), 1 if virtual >= len(speeds) else 0)
    assert dealt in ways
    best = min(step_time(way, speeds) for way in ways)
    assert step_time(dealt, speeds) == pytest.approx(best)
    equals = [way for way in ways if step_time(way, speeds) <= best * (1 + 1e-9)]
    assert sum(n * n for n in dealt) == min(sum(n * n for n in way) for way in equals)


@MANY
@given(virtual=st.integers(1, 64), speeds=st.lists(SPEEDS, min_size=2, max_size=9))
def test_who_is_faster_never_gets_less(virtual: int, speeds: list[float]) -> None:
    dealt = deal(virtual, speeds)
    assert deal(virtual, [7 * speed for speed in speeds]) == dealt  # only the relation matters
    for (a, fast), (b, slow) in product(zip(dealt, speeds, strict=True), repeat=2):
        assert fast <= slow or a >= b - 1


@st.composite
def groups(draw: st.DrawFn) -> list[DeviceGroup]:
    kinds = draw(st.integers(1, 3))
    return [
        DeviceGroup(draw(st.integers(0, 3)), tuple(draw(st.lists(SPEEDS, min_size=1, max_size=2))))
        for _ in range(kinds)
    ]


def all_plans(virtual: int, there: list[DeviceGroup]) -> list[VirtualPlan]:
    executors = [range(1, len(group.speeds) + 1) for group in there]
    threads = [range(virtual + 1) for _ in there]
    found = [evaluate(virtual, there, m, a) for m in product(*executors) for a in product(*threads)]
    return [one for one in found if one is not None]


@MANY
@given(virtual=st.integers(1, 6), there=groups())
def test_no_plan_is_faster_than_the_plan(virtual: int, there: list[DeviceGroup]) -> None:
    found = plan(virtual, there)
    others = all_plans(virtual, there)
    assert (found is None) == (not others)
    if found is not None:
        assert found.perf == pytest.approx(max(one.perf for one in others))
        assert found.waste >= -1e-9
        placed = found.by_device()
        assert tuple(map(len, placed)) == found.nums
        assert sum(map(sum, placed)) == virtual


@MANY
@given(virtual=st.integers(1, 64), there=groups())
def test_one_more_device_never_slows_a_plan_down(virtual: int, there: list[DeviceGroup]) -> None:
    before = plan(virtual, there)
    for i, group in enumerate(there):
        more = plan(virtual, [*there[:i], DeviceGroup(group.count + 1, group.speeds), *there[i + 1 :]])
        assert more is not None
        assert before is None or more.perf >= before.perf * (1 - 1e-9)


@MANY
@given(virtual=st.integers(1, 64), counts=st.lists(st.integers(0, 4), min_size=1, max_size=3), data=st.data())
def test_types_and_single_workers_agree(virtual: int, counts: list[int], data: st.DataObject) -> None:
    """With one executor each, dealing to single devices is as fast as planning by type."""
    there = [DeviceGroup(n, (data.draw(SPEEDS),)) for n in counts]
    speeds = [group.speeds[0] for group in there for _ in range(group.count)]
    found = plan(virtual, there)
    if found is None or virtual < len(speeds):
        return
    # `deal` leaves nobody without a virtual worker; where that costs nothing, both are equal
    slowest = max(virtual / found.perf, *(1 / speed for speed in speeds))
    assert step_time(deal(virtual, speeds), speeds) == pytest.approx(slowest)
