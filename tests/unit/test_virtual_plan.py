"""Virtual workers onto uneven devices: the paper's examples and the edges."""

from __future__ import annotations

import math

import pytest

from concertina.core.placement import VirtualPlacement
from concertina.core.virtual_plan import DeviceGroup, deal, evaluate, plan, step_time


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("virtual", range(1, 17))
def test_equal_speeds_are_dealt_as_blocks_are(virtual: int, workers: int) -> None:
    sizes = tuple(map(len, VirtualPlacement.blocks(virtual, workers).workers)) if virtual >= workers else None
    dealt = deal(virtual, [3.7] * workers)
    assert sum(dealt) == virtual
    assert sizes in (None, dealt)


@pytest.mark.parametrize(
    ("virtual", "speeds", "dealt"),
    [
        (4, (3.0, 1.0), (3, 1)),
        (8, (1.0, 1.0, 1 / 3, 1.0), (2, 2, 1, 3)),  # a step lasts 3 s anyway, so the fast ones share evenly
        (8, (2.45, 1.0), (6, 2)),  # ResNet50 on a V100 and a T4: 2.45 times faster
        (8, (1.55, 1.0), (5, 3)),  # Bert on the same two
        (4, (5.0, 1.0, 1.0), (2, 1, 1)),  # nobody without one, though (4, 0, 0) would be faster
        (3, (1.0, 4.0, 2.0, 1.0), (0, 2, 1, 0)),  # too few for all
        (64, (0.1,), (64,)),
    ],
)
def test_faster_workers_get_more(virtual: int, speeds: tuple[float, ...], dealt: tuple[int, ...]) -> None:
    assert deal(virtual, speeds) == dealt


def test_equal_workers_differ_by_one_at_most_and_beyond_rounding() -> None:
    assert deal(6, (1 / 3, 1 / 3, 1 / 3 * (1 + 1e-15))) == (2, 2, 2)
    assert step_time((2, 1), (4.0, 1.0)) == 1.0


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_a_speed_that_is_none_is_refused_by_name(speed: float) -> None:
    with pytest.raises(ValueError, match=r"worker 1 has the speed .* above 0"):
        deal(4, (1.0, speed))


def test_nothing_to_deal_or_nobody_to_deal_to_is_refused() -> None:
    with pytest.raises(ValueError, match="0 virtual workers"):
        deal(0, (1.0,))
    with pytest.raises(ValueError, match="no worker"):
        deal(1, ())
    with pytest.raises(ValueError, match="-1 devices"):
        DeviceGroup(-1, (1.0,))
    with pytest.raises(ValueError, match="speeds"):
        DeviceGroup(1, ())
    with pytest.raises(ValueError, match="0 virtual workers"):
        plan(0, [DeviceGroup(1, (1.0,))])


def test_the_equations_on_paper() -> None:
    """1 V100 (3 mini-batches/s), 2 T4 (1/s), P = 5, threads 3 and 1: no device waits for another."""
    groups = [DeviceGroup(1, (3.0,)), DeviceGroup(2, (1.0,))]
    even = evaluate(5, groups, (1, 1), (3, 1))
    assert even is not None
    assert (even.waste, even.perf, even.waste_norm) == (0.0, 5.0, 0.0)
    naive = evaluate(5, groups, (1, 1), (2, 2))  # the T4s need 2 s: 3 - 1 wasted on the V100, room for one too many
    assert naive is not None
    assert (naive.waste, naive.perf) == (2.5, 2.5)
    assert naive.waste_norm == 0.5
    assert evaluate(5, groups, (1, 1), (1, 1)) is None  # 1a


def test_the_plan_balances_types() -> None:
    best = plan(5, [DeviceGroup(1, (3.0,)), DeviceGroup(2, (1.0,))])
    assert best is not None
    assert (best.threads, best.executors, best.perf) == ((3, 1), (1, 1), 5.0)
    assert best.by_device() == ((3,), (1, 1))


def test_a_device_too_slow_to_help_is_left_out() -> None:
    best = plan(2, [DeviceGroup(2, (4.0,)), DeviceGroup(4, (1.0,)), DeviceGroup(0, (9.0,))])
    assert best is not None
    assert (best.threads[:2], best.perf) == ((1, 0), 8.0)
    assert best.waste == pytest.approx(4.0)
    assert best.by_device() == ((1, 1), (0, 0, 0, 0), ())


def test_a_second_executor_is_used_where_it_brings_something() -> None:
    idle = plan(8, [DeviceGroup(2, (1.0, 1.8))])  # Wide&Deep leaves half of the device idle
    busy = plan(8, [DeviceGroup(2, (1.0, 0.9))])
    assert idle is not None
    assert busy is not None
    assert (idle.executors, idle.threads, idle.perf) == ((2,), (2,), pytest.approx(3.6))
    assert (busy.executors, busy.threads, busy.perf) == ((1,), (4,), 2.0)


def test_no_more_executors_and_room_than_needed() -> None:
    few = plan(5, [DeviceGroup(1, (1.0, 2.0)), DeviceGroup(4, (1.0,))])  # a second executor would not shorten the step
    assert few is not None
    assert (few.executors, few.threads) == ((1, 1), (1, 1))
    fast = plan(4, [DeviceGroup(2, (6.0,)), DeviceGroup(2, (3.0,))])
    assert fast is not None
    assert (fast.threads, fast.by_device()) == ((2, 0), ((2, 2), (0, 0)))


def test_no_devices_no_plan() -> None:
    assert plan(4, []) is None
    assert plan(4, [DeviceGroup(0, (1.0,))]) is None
