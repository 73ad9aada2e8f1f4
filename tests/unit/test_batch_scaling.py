"""Batch and learning rate after a change of workers, line by line along Elan's algorithm 1, and EDL's accumulation."""

import json
from collections.abc import Callable
from fractions import Fraction

import pytest

from concertina.core.batch_scaling import (
    BatchRule,
    Scaling,
    accumulation,
    hybrid,
    split_evenly,
    strong,
    weak,
)
from concertina.core.errors import UsageError
from concertina.core.learning_rate import RateRamp
from concertina.core.step_times import StepTimes


def asked(table: dict[int, int]) -> tuple[Callable[[int], int], list[int]]:
    """A curve out of a table, and the list of the batches it was asked about."""
    calls: list[int] = []

    def optimal(total: int) -> int:
        calls.append(total)
        return table[total]

    return optimal, calls


# -- strong and weak ---------------------------------------------------------------------------------------------


def test_section_iii_example_strong_scaling_of_128_from_4_to_8_workers_gives_16_each() -> None:
    size = strong(128, 4, 8)
    assert (size.total, size.local, size.factor) == (128, (16,) * 8, 1)


def test_section_iii_example_weak_scaling_of_128_from_4_to_8_workers_gives_256() -> None:
    size = weak(128, 4, 8)
    assert (size.total, size.local, size.factor) == (256, (32,) * 8, 2)


def test_strong_scaling_divides_what_does_not_divide_evenly() -> None:
    assert strong(128, 4, 6).local == (22, 22, 21, 21, 21, 21)


def test_weak_scaling_rounds_to_whole_samples_and_the_factor_follows_what_is_used() -> None:
    size = weak(10, 4, 3)  # 7.5 samples
    assert (size.total, size.factor) == (8, Fraction(8, 10))
    assert weak(1, 8, 2).total == 2, "every worker has a sample"


def test_strong_scaling_refuses_more_workers_than_samples() -> None:
    with pytest.raises(UsageError, match=r"total batch of 4 cannot be divided over 5 workers.*at most 4 workers"):
        strong(4, 2, 5)


@pytest.mark.parametrize(("total", "before", "after"), [(0, 1, 1), (8, 0, 1), (8, 1, -1)])
def test_impossible_numbers_are_refused(total: int, before: int, after: int) -> None:
    with pytest.raises(UsageError, match="needed a whole number of 1 or more"):
        weak(total, before, after)


# -- algorithm 1, parallelism ------------------------------------------------------------------------------------


def test_lines_6_to_8_try_the_batch_as_it_is_first() -> None:
    optimal, calls = asked({128: 8})
    assert hybrid(128, 4, 8, optimal).total == 128
    assert calls == [128]


def test_line_9_asks_for_the_optimum_of_the_batch_that_is_tried() -> None:
    optimal, calls = asked({128: 4, 256: 7, 512: 8})
    assert hybrid(128, 2, 8, optimal).total == 512
    assert calls == [128, 256, 512]


@pytest.mark.parametrize(("best", "total"), [(7, 256), (8, 128), (9, 128)])
def test_line_10_takes_a_batch_whose_optimum_is_not_smaller_than_the_workers_after(best: int, total: int) -> None:
    optimal, _ = asked({128: best, 256: 16})
    assert hybrid(128, 4, 8, optimal).total == total


def test_line_11_returns_the_smallest_batch_that_passes_although_larger_ones_would_too() -> None:
    optimal, calls = asked({64: 4, 128: 16, 256: 16, 512: 32})
    size = hybrid(64, 2, 16, optimal)
    assert (size.total, size.factor) == (128, 2)
    assert calls == [64, 128]


def test_line_13_doubles_the_factor_each_time() -> None:
    optimal, calls = asked({10: 1, 20: 1, 40: 1, 80: 1})
    hybrid(10, 1, 8, optimal)
    assert calls == [10, 20, 40, 80]


def test_line_7_tries_no_factor_beyond_the_ratio_of_workers() -> None:
    optimal, calls = asked({10: 1, 20: 1})
    hybrid(10, 3, 11, optimal)  # 11 / 3 = 3.67: factors 1 and 2, not 4
    assert calls == [10, 20]


def test_line_7_tries_a_factor_equal_to_the_ratio_of_workers() -> None:
    optimal, calls = asked({10: 1, 20: 12, 40: 12})
    assert hybrid(10, 3, 12, optimal).total == 20
    assert calls == [10, 20]


def test_lines_15_and_16_fall_back_to_weak_scaling_with_the_ratio_itself() -> None:
    optimal, _ = asked({30: 1, 60: 1})
    size = hybrid(30, 3, 11, optimal)
    assert (size.total, size.factor) == (110, Fraction(11, 3))
    assert size.total == weak(30, 3, 11).total


def test_line_7_with_fewer_workers_tries_nothing_and_lines_15_and_16_shrink_the_batch() -> None:
    optimal, calls = asked({})
    size = hybrid(128, 8, 4, optimal)
    assert (size.total, size.factor, calls) == (64, Fraction(1, 2), [])


def test_section_vi_b_adabatch_512_on_16_becomes_1024_on_32_and_2048_on_64() -> None:
    optimal, _ = asked({512: 16, 1024: 32, 2048: 64})
    middle = hybrid(512, 16, 32, optimal)
    assert (middle.total, middle.factor) == (1024, 2)
    last = hybrid(middle.total, 32, 64, optimal)
    assert (last.total, last.factor) == (2048, 2)


def test_every_decision_says_why() -> None:
    optimal, _ = asked({128: 4, 256: 16})
    assert hybrid(128, 4, 8, optimal).reason == (
        "hybrid scaling, 4 -> 8 workers: 2 x 128 = 256 keeps up to 16 workers busy"
    )
    assert weak(128, 4, 8).reason == "weak scaling, 4 -> 8 workers: the total batch goes from 128 to 256"


# -- the rule of a job -------------------------------------------------------------------------------------------


def test_there_and_back_has_the_batch_of_the_beginning() -> None:
    """Change by change, algorithm 1 halves the batch here; counted from the beginning it does not."""
    optimal, _ = asked({128: 8})
    assert hybrid(hybrid(128, 4, 8, optimal).total, 8, 4, optimal).total == 64
    rule = BatchRule(scaling=Scaling.HYBRID, total=128, workers=4, optimal_workers=optimal)
    assert [rule.at(n).total for n in (4, 8, 4)] == [128, 128, 128]


@pytest.mark.parametrize(("scaling", "total"), [("consistent", 64), ("strong", 64), ("weak", 128), ("hybrid", 64)])
def test_a_rule_follows_its_scaling(scaling: str, total: int) -> None:
    rule = BatchRule(scaling=Scaling(scaling), total=64, workers=2, optimal_workers=lambda total: 4)
    assert rule.at(4).total == total


def test_hybrid_without_a_curve_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no throughput curve.*concertina profile"):
        BatchRule(scaling=Scaling.HYBRID, total=64, workers=2)


# -- algorithm 1, learning rate ----------------------------------------------------------------------------------


def test_line_24_the_target_is_k_times_the_rate_before() -> None:
    ramp = RateRamp().changed(500, Fraction(2), 100)
    assert 0.1 * ramp.at(10_000) == 0.2


def test_line_27_rises_linearly_from_the_step_at_which_the_adjustment_begins() -> None:
    ramp = RateRamp().changed(500, Fraction(2), 100)
    assert [ramp.at(t) for t in (500, 525, 550, 575)] == [1.0, 1.25, 1.5, 1.75]


def test_line_25_ends_t_steps_after_the_beginning_although_the_print_says_t() -> None:
    ramp = RateRamp().changed(500, Fraction(2), 100)
    assert ramp.at(599) == pytest.approx(1.99)
    assert ramp.at(600) == 2.0


def test_line_29_stays_at_the_target() -> None:
    ramp = RateRamp().changed(0, Fraction(4), 100)
    assert {ramp.at(t) for t in (100, 101, 10**9)} == {4.0}


def test_a_step_before_the_beginning_has_the_rate_before() -> None:
    assert RateRamp(begin=10, length=5, start=1.0, target=Fraction(3)).at(4) == 1.0


def test_a_change_in_the_middle_goes_on_from_there_to_the_product_of_both_factors() -> None:
    first = RateRamp().changed(0, Fraction(2), 100)
    second = first.changed(50, Fraction(4), 100)
    assert second.at(50) == first.at(50) == 1.5
    assert second.at(100) == pytest.approx(2.75)
    assert second.at(150) == 4.0


def test_a_change_taken_back_in_the_middle_ends_at_exactly_the_old_rate() -> None:
    ramp = RateRamp().changed(0, Fraction(10, 3), 100).changed(7, Fraction(1), 100)
    assert ramp.at(107) == 1.0


def test_a_ramp_of_no_steps_changes_at_once() -> None:
    assert [RateRamp().changed(5, Fraction(2), 0).at(t) for t in (5, 6)] == [2.0, 2.0]


def test_a_ramp_survives_json_with_all_its_bits() -> None:
    ramp = RateRamp().changed(0, Fraction(10, 3), 7).changed(3, Fraction(10, 21), 9)
    assert RateRamp.from_json(json.loads(json.dumps(ramp.to_json()))) == ramp


def test_a_ramp_that_ends_at_zero_or_runs_backwards_is_refused() -> None:
    with pytest.raises(UsageError, match="needed factors above 0"):
        RateRamp(target=Fraction(0))
    with pytest.raises(UsageError, match="from 0 up"):
        RateRamp().changed(3, Fraction(2), -1)


# -- EDL 5.4 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "largest", "parts"),
    [(32, 64, (32,)), (64, 64, (64,)), (65, 64, (33, 32)), (96, 32, (32, 32, 32)), (7, 3, (3, 2, 2)), (0, 4, ())],
)
def test_a_local_batch_is_run_in_the_fewest_and_most_equal_parts_that_fit(
    local: int, largest: int, parts: tuple[int, ...]
) -> None:
    assert accumulation(local, largest) == parts


def test_a_device_that_holds_no_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="largest_local_batch is 0"):
        accumulation(8, 0)


def test_parts_are_whole_and_differ_by_one_at_most() -> None:
    for total in range(40):
        for parts in range(1, 12):
            split = split_evenly(total, parts)
            assert (sum(split), len(split)) == (total, parts)
            assert max(split) - min(split) <= 1


# -- the measured curve ------------------------------------------------------------------------------------------


def made(workers: int, local: int) -> float:
    return 0.010 + 0.001 * local + 0.02 * (workers - 1) / workers + 0.004 * (workers - 1)


MEASURED = {(n, b): made(n, b) for n in (1, 2, 3, 4) for b in (8, 16, 32)}


def test_a_fit_gives_back_what_the_measurements_were_made_from() -> None:
    times = StepTimes.fit(MEASURED)
    for n, b in ((8, 4), (16, 64), (1, 1)):
        assert times.seconds(n, b) == pytest.approx(made(n, b), rel=1e-6)


def test_what_was_measured_is_believed() -> None:
    times = StepTimes.fit({**MEASURED, (4, 16): 9.0})
    assert times.seconds(4, 16) == 9.0


def test_strong_scaling_rises_then_falls_and_a_larger_batch_moves_the_optimum_up() -> None:
    """Elan III-1, both observations."""
    times = StepTimes.fit(MEASURED)
    best = [times.optimal_workers(total, 64) for total in (64, 256, 1024)]
    assert best == sorted(set(best))
    for total, n in zip((64, 256, 1024), best, strict=True):
        assert 1 < n < 64
        assert times.throughput(n, total) >= max(times.throughput(m, total) for m in range(1, 65))


def test_the_fewest_of_equally_fast_numbers_of_workers_is_the_optimum() -> None:
    times = StepTimes.fit({(1, 4): 4.0, (2, 2): 2.0, (4, 1): 2.0})
    assert times.optimal_workers(4, 4) == 2


def test_one_measurement_is_enough_to_say_something() -> None:
    assert StepTimes.fit({(2, 32): 0.5}).seconds(2, 32) == 0.5


def test_a_curve_without_or_with_wrong_measurements_is_refused() -> None:
    with pytest.raises(UsageError, match="no step time was measured"):
        StepTimes.fit({})
    with pytest.raises(UsageError, match=r"0.0 s per step for 2 workers"):
        StepTimes.fit({(2, 8): 0.0})
