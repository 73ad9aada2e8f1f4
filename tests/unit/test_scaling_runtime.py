"""The batch of a running job: how epochs are cut, what changes the size, and the rate that goes with it."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR

from concertina.core.batch_scaling import Scaling
from concertina.core.cut_plan import CutPlan
from concertina.core.errors import UsageError
from concertina.report import SampleBook
from concertina.runtime.data import Feed, LoaderOptions
from concertina.runtime.scaling import PROBE, BatchScale, gate_rate, parts_of, script_factor

# -- cutting an epoch ------------------------------------------------------------------------------------------------


def test_a_change_leaves_the_batches_before_it_where_they_were() -> None:
    plan = CutPlan.even(20, False, 3).from_batch(2, 5)
    assert plan.bounds() == [(0, 3), (3, 6), (6, 11), (11, 16), (16, 20)]
    assert plan.batches == 5


def test_a_last_batch_that_is_not_full_is_dropped_where_asked() -> None:
    plan = CutPlan.even(20, True, 3).from_batch(2, 5)
    assert plan.bounds() == [(0, 3), (3, 6), (6, 11), (11, 16)]
    assert plan.position(plan.batches) == 16


def test_changes_at_one_batch_replace_each_other() -> None:
    plan = CutPlan.even(20, False, 3).from_batch(2, 5)
    assert plan.from_batch(2, 4).cuts == ((0, 0, 3), (2, 6, 4))
    assert plan.from_batch(2, 3) == CutPlan.even(20, False, 3)
    assert plan.from_batch(0, 7) == CutPlan.even(20, False, 7)


def test_going_back_forgets_what_was_planned_after() -> None:
    plan = CutPlan.even(40, False, 2).from_batch(3, 4).from_batch(5, 8)
    assert plan.from_batch(4, 4).cuts == ((0, 0, 2), (3, 6, 4))


@given(
    samples=st.integers(1, 60),
    drop_last=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=5),
)
def test_every_sample_is_in_one_batch_however_often_the_size_changes(
    samples: int, drop_last: bool, changes: list[tuple[int, int]]
) -> None:
    plan, batch, trained = CutPlan.even(samples, drop_last, 2), 0, []
    for ahead, size in changes:
        ahead = min(ahead, plan.batches - batch)
        trained += plan.bounds()[batch : batch + ahead]
        batch += ahead
        plan = plan.from_batch(batch, size)
    trained += plan.bounds()[batch:]
    assert trained == plan.bounds()
    positions = [p for lo, hi in trained for p in range(lo, hi)]
    assert positions == list(range(plan.position(plan.batches)))
    left = samples - len(positions)
    assert left == 0 or (drop_last and left < plan.size)
    assert CutPlan.load(samples, drop_last, [list(cut) for cut in plan.cuts]) == plan


@pytest.mark.parametrize("cuts", [[], [[1, 0, 2]], [[0, 0, 0]]])
def test_senseless_cuts_are_refused(cuts: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="needed sizes of 1 or more from batch 0 on"):
        CutPlan.load(10, False, cuts)


def test_a_feed_cuts_the_rest_of_an_epoch_anew_and_the_next_one_evenly() -> None:
    feed = Feed(list(range(40)), LoaderOptions(batch_size=2, shuffle=False), virtual=4)
    feed.cut_from(0, 2)
    assert feed.plan is None
    assert feed.batches == 5
    feed.cut_from(2, 4)
    feed.open(0, 2, (1,))
    assert [feed.take(1, b).tolist() for b in range(feed.batches)] == [[1, 5], [9, 13], [17, 21, 25, 29], [33, 37]]
    feed.cut_from(0, 2)
    assert feed.plan is None


# -- what the report makes of it -------------------------------------------------------------------------------------

TOLD = {"loader": 0, "epoch": 0, "turn": 0, "virtual": 2, "size": 2, "expected": 20}
CUTS = [0, 0, 2, 4, 8, 6]  # four batches of 2, then two of 6


def row(expected: int = 40, seen: int = 40, duplicated: int = 0, missed: int = 0) -> list[dict[str, int]]:
    counts = {"expected": expected, "seen": seen, "duplicated": duplicated, "missed": missed}
    return [{"epoch": 0, "loader": 0, **counts}]


def told(first: int, end: int, **more: Any) -> dict[str, Any]:
    return {**TOLD, "first": first, "end": end, "round": first, **more}


def test_samples_are_counted_by_position_when_batches_differ() -> None:
    book = SampleBook()
    book.add(told(0, 4))
    book.add(told(4, 6, cuts=CUTS))
    book.add(told(0, 6, cuts=CUTS))  # another worker, which was there all the time
    assert book.rows() == row()


def test_a_gap_between_two_cuts_is_missed_and_an_overlap_doubled() -> None:
    book = SampleBook()
    book.add(told(0, 4))
    book.add(told(5, 6, cuts=CUTS))
    assert book.rows() == row(seen=28, missed=12)
    book = SampleBook()
    book.add(told(0, 5))  # one batch of 2 more than the plan of the others has
    book.add(told(4, 6, cuts=CUTS, round=5))
    assert book.rows() == row(seen=44, duplicated=4)


def test_what_counts_as_the_epoch_is_what_its_last_report_says() -> None:
    book = SampleBook()
    book.add(told(4, 5, cuts=CUTS, expected=14))  # the rest of 6 did not fill a batch
    book.add(told(0, 4))
    assert book.rows() == row(expected=28, seen=28)


def test_what_was_trained_after_a_checkpoint_counts_no_more_when_all_go_back_to_it() -> None:
    """Then the rest of the epoch may be cut in another way, in other rounds."""
    book = SampleBook()
    assert book.go_back(1, 0)
    book.add(told(0, 10))
    book.add(told(0, 6, epoch=1, round=10))
    book.go_back(2, 4)
    book.go_back(2, 4)
    book.add(told(4, 6, cuts=CUTS))
    assert not book.go_back(2, 4)  # a member whose word comes late
    assert book.rows() == row()


# -- how large a batch is --------------------------------------------------------------------------------------------


def scale(mode: Scaling = Scaling.CONSISTENT, workers: int = 1, virtual: int = 4, ramp: int = 10) -> BatchScale:
    made = BatchScale(mode, virtual, workers, ramp)
    made.stepped(0.0, 8, 1000)
    return made


@pytest.mark.parametrize("mode", [Scaling.CONSISTENT, Scaling.STRONG])
def test_consistent_and_strong_keep_batch_and_rate_at_any_number_of_workers(mode: Scaling) -> None:
    s = scale(mode, workers=2)
    for workers in (4, 1, 3):
        assert not s.by_workers(workers, step=7)
        assert (s.size(8, 1000), s.rate_factor(8)) == (8, 1.0)


def test_weak_scaling_follows_the_workers_up_and_down() -> None:
    s = scale(Scaling.WEAK, workers=2)
    assert s.by_workers(4, step=30)
    assert s.size(8, 1000) == 16
    assert [s.rate_factor(t) for t in (30, 35, 40, 90)] == [1.0, 1.5, 2.0, 2.0]
    assert s.by_workers(1, step=50)
    assert s.size(8, 1000) == 4
    assert s.rate_factor(60) == 0.5
    assert s.by_workers(2, step=70)
    assert s.size(8, 1000) == 8
    assert s.rate_factor(80) == 1.0
    assert "weak scaling" in s.reason


def test_the_rate_follows_the_batch_as_it_was_cut() -> None:
    """Three halves of 5 samples are 8, so the rate grows by 8/5."""
    s = BatchScale(Scaling.WEAK, 4, 2, 0)
    s.stepped(0.0, 5, 1000)
    s.by_workers(3, step=1)
    assert s.size(5, 1000) == 8
    assert s.rate_factor(1) == 1.6


def test_a_batch_is_never_larger_than_the_data_nor_empty() -> None:
    s = scale(Scaling.WEAK, workers=4)
    s.by_script(Fraction(10**6), 1, None)
    assert s.size(8, 1000) == 1000
    s.by_script(Fraction(1, 10**6), 2, None)
    assert s.size(8, 1000) == 1


def test_the_script_counts_from_its_own_batch_and_may_say_it_again() -> None:
    s = scale()
    assert s.by_script(Fraction(2), 5, ramp=4)
    assert [s.rate_factor(t) for t in (5, 7, 9)] == [1.0, 1.5, 2.0]
    assert not s.by_script(Fraction(2), 9, ramp=4)
    assert s.by_script(Fraction(4), 9, ramp=None)
    assert s.size(8, 1000) == 32
    assert [s.rate_factor(t) for t in (9, 14, 19)] == [2.0, 3.0, 4.0]


def test_hybrid_tries_the_batch_it_has_before_it_doubles_it() -> None:
    s = scale(Scaling.HYBRID)
    assert not s.learn(PROBE, 0.100)  # alone: 32 samples in 100 ms
    assert not s.by_workers(4, step=30), "strong scaling first (line 6)"
    assert s.learn(30 + PROBE, 0.120), "four workers are slower than one (line 10), so twice the batch (line 13)"
    assert s.total == 64
    assert s.learn(60 + PROBE, 0.250), "still slower"
    assert s.total == 128
    assert not s.learn(90 + PROBE, 0.300), "fast enough"
    assert s.rate_factor(1000) == 4.0


def test_hybrid_keeps_the_batch_where_more_workers_pay_off() -> None:
    s = scale(Scaling.HYBRID)
    s.learn(PROBE, 0.100)
    s.by_workers(2, step=30)
    assert not s.learn(30 + PROBE, 0.060)
    assert (s.total, s.rate_factor(1000)) == (32, 1.0)


def test_a_batch_too_small_for_two_is_not_tried_on_four() -> None:
    s = scale(Scaling.HYBRID)
    s.learn(PROBE, 0.100)
    s.by_workers(2, step=30)
    s.learn(50, 0.110)
    s.learn(80, 0.140)
    assert s.total == 64
    assert not s.by_workers(4, step=100)
    assert s.total == 64
    assert s.learn(120, 0.250)
    assert s.total == 128


def test_a_script_may_know_better_how_long_a_step_took() -> None:
    s = scale(Scaling.HYBRID)
    for k in range(8):
        s.told = 0.5 if k != 4 else 0.0
        s.stepped(10.0 + k, 8, 1000)
    assert s.microseconds == 500_000


def test_hybrid_grows_no_further_than_the_workers_did() -> None:
    s = scale(Scaling.HYBRID)
    s.learn(PROBE, 0.100)
    s.by_workers(2, step=30)
    assert s.learn(50, 0.500)
    assert s.total == 64
    assert not s.learn(80, 5.0)
    assert s.total == 64


def test_hybrid_shrinks_with_the_workers() -> None:
    s = scale(Scaling.HYBRID, workers=4)
    assert s.by_workers(2, step=3)
    assert s.total == 16


def test_losing_a_worker_for_another_does_not_undo_what_was_found_too_small() -> None:
    s = scale(Scaling.HYBRID)
    s.learn(PROBE, 0.100)
    s.by_workers(2, step=30)
    s.learn(50, 0.500)
    assert not s.by_workers(2, step=60)
    assert s.total == 64


def test_members_exchange_times_at_one_step_only() -> None:
    s = scale(Scaling.HYBRID)
    s.by_workers(2, step=5)
    for k in range(PROBE):
        s.stepped(10.0 + k * 0.25, 8, 1000)
    assert [t for t in range(200) if s.due(t)] == [5 + PROBE]
    assert s.microseconds == 250_000
    assert not any(scale(Scaling.WEAK).due(t) for t in range(200))


def test_a_newcomer_comes_to_the_same_as_those_who_were_there() -> None:
    old = scale(Scaling.HYBRID, workers=2)
    old.learn(PROBE, 0.1)
    old.by_script(Fraction(3, 2), 25, None)
    new = BatchScale(Scaling.HYBRID, 4, 2, 10)
    new.load(old.state())
    for s in (old, new):
        s.by_workers(4, 40)
        s.learn(60, 0.2)
    assert new.state() == old.state()
    assert (new.total, new.rate_factor(47)) == (old.total, old.rate_factor(47))


@pytest.mark.parametrize("factor", [0, -1, "two", None, float("nan"), float("inf")])
def test_a_senseless_factor_is_refused(factor: Any) -> None:
    with pytest.raises(UsageError, match="needs a number above 0"):
        script_factor(factor)


# -- the learning rate -----------------------------------------------------------------------------------------------


class Engine:
    turn = None


class Turn:
    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last


def trained(factor: Any, gated: bool = True) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = StepLR(optimizer, 2, 0.5)
    rates = iter(range(100))
    if gated:
        gate_rate(optimizer, Engine(), lambda: factor(next(rates)))  # type: ignore[arg-type]
    for k in range(6):
        if not gated:
            own, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
            optimizer.param_groups[0]["lr"] = own * factor(k)
        model(torch.ones(2, 3)).square().sum().mul(0.01).backward()
        optimizer.step()
        if not gated:
            optimizer.param_groups[0]["lr"] = own
        optimizer.zero_grad()
        scheduler.step()
    return model.weight.detach(), scheduler.state_dict(), optimizer.state_dict()["param_groups"][0]


def test_a_factor_acts_while_the_optimizer_steps_and_nobody_else_sees_it() -> None:
    weight, schedule, group = trained(lambda k: 1.0 + k / 4)
    by_hand, _, _ = trained(lambda k: 1.0 + k / 4, gated=False)
    plain, plain_schedule, plain_group = trained(lambda k: 1.0)
    assert torch.equal(weight, by_hand)
    assert not torch.equal(weight, plain)
    assert schedule == plain_schedule
    assert group == plain_group


def test_without_a_change_the_optimizer_is_as_it_was() -> None:
    ungated, schedule, group = trained(lambda k: 1.0, gated=False)
    weight, *states = trained(lambda k: 1.0)
    assert torch.equal(weight, ungated)
    assert states == [schedule, group]


def test_turns_before_the_last_leave_the_rate_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    seen: list[float] = []
    optimizer.step = lambda: seen.append(optimizer.param_groups[0]["lr"])  # type: ignore[method-assign, assignment]
    engine = Engine()
    gate_rate(optimizer, engine, lambda: 2.0)  # type: ignore[arg-type]
    for is_last in (False, True):
        engine.turn = Turn(is_last)  # type: ignore[assignment]
        optimizer.step()
    assert seen == [0.5, 1.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_batch_that_fits_stays_whole() -> None:
    batch = (torch.arange(6), {"y": torch.ones(6)})
    for largest in (0, 6, 7):
        ((weight, part, last),) = parts_of(batch, largest)
        assert part is batch
        assert weight == 1.0
        assert last


def test_parts_are_as_equal_as_can_be_and_their_weights_make_one_mean() -> None:
    x = torch.arange(7.0)
    parts = list(parts_of({"x": x, "name": "a"}, 3))
    assert [p["x"].tolist() for _, p, _ in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [last for *_, last in parts] == [False, False, True]
    assert sum(w * p["x"].mean() for w, p, _ in parts).item() == pytest.approx(x.mean().item())
    assert all(p["name"] == "a" for _, p, _ in parts)


def test_tensors_of_different_lengths_cannot_be_divided() -> None:
    with pytest.raises(UsageError, match=r"sizes \[4, 6\]"):
        list(parts_of((torch.ones(6), torch.ones(4)), 3))
