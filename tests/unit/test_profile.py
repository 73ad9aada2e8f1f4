"""What `concertina profile` decides: which steps count, when to go on, which batch to try next."""

from typing import Any

import pytest

from concertina.core.errors import UsageError
from concertina.profile import Plan, Point, Profile, Sweep, Tried, estimated_batch, largest_batch, powers_up_to


def started(step: int, workers: int) -> dict[str, Any]:
    return {"event": "generation_started", "step": step, "workers": workers}


def step(number: int, at: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "at": at}


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_counts_are_powers_of_two_and_the_largest_itself(most: int, counts: tuple[int, ...]) -> None:
    assert powers_up_to(most) == counts


def test_steps_before_and_right_after_a_change_are_left_out() -> None:
    sweep = Sweep(Plan(workers=(1, 2), warm=2, measured=2))
    assert not sweep.note(started(0, 1))
    for number, at in ((1, 50.0), (2, 60.0), (3, 61.0)):
        assert not sweep.note(step(number, at))
    assert sweep.note(step(4, 64.0))  # steps 3 and 4, counted from the end of step 2
    assert sweep.points == [Point(workers=1, steps=2, mean_s=2.0, median_s=2.0, slowest_s=3.0)]
    assert sweep.target == 2
    for number, at in ((5, 65.0), (6, 66.0), (7, 67.0), (8, 68.0)):
        assert not sweep.note(step(number, at)), "the job still has one worker"
    assert not sweep.note(started(8, 2))
    done = [sweep.note(step(number, 100.0 + number)) for number in (9, 10, 11, 12)]
    assert done == [False, False, False, True]
    assert sweep.points[1] == Point(workers=2, steps=2, mean_s=1.0, median_s=1.0, slowest_s=1.0)
    assert sweep.target is None


def test_a_change_may_be_heard_of_after_its_steps() -> None:
    sweep = Sweep(Plan(workers=(1,), warm=1, measured=1))
    assert not sweep.note(step(1, 1.0))
    assert not sweep.note(step(2, 1.5))
    assert sweep.note(started(0, 1))
    assert sweep.points[0].mean_s == 0.5


def test_a_count_that_is_lost_on_the_way_is_measured_anew() -> None:
    sweep = Sweep(Plan(workers=(2,), warm=1, measured=2))
    sweep.note(started(0, 2))
    sweep.note(step(1, 1.0))
    sweep.note(step(2, 2.0))
    sweep.note(started(2, 1))  # a worker was lost
    assert not any(sweep.note(step(n, 9.0 + n)) for n in (3, 4, 5, 6)), "those were the steps of one worker"
    sweep.note(started(6, 2))
    assert [sweep.note(step(n, 20.0 + n)) for n in (7, 8, 9)] == [False, False, True]
    assert sweep.points[0].mean_s == 1.0


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"workers": ()}, "from 1 up"),
        ({"workers": (2, 0)}, "from 1 up"),
        ({"workers": (2, 2)}, "twice in a row"),
        ({"workers": (1,), "measured": 0}, "--measure 0"),
        ({"workers": (1,), "warm": -1}, "--warm -1"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan(**plan)


def test_speedup_and_efficiency_are_against_the_first_count() -> None:
    points = tuple(Point(workers=w, steps=1, mean_s=s, median_s=s, slowest_s=s) for w, s in ((2, 1.0), (4, 0.625)))
    rows = Profile(script="x.py", virtual=4, points=points, samples_per_step=10.0).to_json()["points"]
    assert [(row["speedup"], row["efficiency"], row["samples_per_s"]) for row in rows] == [
        (1.0, 1.0, 10.0),
        (1.6, 0.8, 16.0),
    ]


@pytest.mark.parametrize("own", [1, 24, 100, 500])
@pytest.mark.parametrize("most", [1, 3, 24, 99, 1000])
def test_the_largest_batch_is_found_to_an_eighth(own: int, most: int) -> None:
    found, tried = largest_batch(own, 10_000, lambda batch: batch <= most)
    assert most - max(1, found // 8) < found <= most
    assert len(tried) == len(set(tried)) < 20


def test_no_batch_is_tried_beyond_the_samples_there_are() -> None:
    assert largest_batch(32, 100, lambda batch: True) == (100, [32, 64, 100])
    assert largest_batch(32, 20, lambda batch: True) == (20, [20])
    assert largest_batch(4, 100, lambda batch: False)[0] == 0


def tried(batch: int, megabytes: float) -> Tried:
    return Tried(
        batch=batch, own=8, samples=100, fits=True, on_gpu=False, device="cpu",
        peak_bytes=int(megabytes * (1 << 20)), memory_bytes=0,
    )  # fmt: skip


def test_an_estimate_needs_growth_to_go_by() -> None:
    assert estimated_batch(tried(8, 100), tried(32, 148), free_bytes=200 << 20) == 108
    assert estimated_batch(tried(8, 100), tried(32, 100), free_bytes=200 << 20) is None
    assert estimated_batch(tried(8, 100), tried(32, 100.5), free_bytes=200 << 20) is None, "that may be noise"
    assert estimated_batch(tried(8, 100), tried(8, 180), free_bytes=200 << 20) is None
