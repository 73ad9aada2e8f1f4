"""ElasticFlow's promises, by hand: the paper's example, refusals, and who gets what is left."""

from __future__ import annotations

import math

import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.errors import UsageError
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Admitted, Rejected
from concertina.policies.admission import makes_promises, on_terms, rule, rule_of
from concertina.policies.base import explainer_of
from concertina.policies.counter import admit
from concertina.policies.elasticflow import ElasticFlowPolicy
from concertina.policies.filling import ChangeCost, Claim, Ladder, Ladders, Profile, scale_of
from concertina.policies.promise import Claims, claims_of, look_ahead
from concertina.policies.registry import policy_named
from concertina.policies.round import run_round
from concertina.policies.scaling_curve import Curves, ScalingCurve, ThroughputRow, ThroughputTable
from concertina.policies.table import Table
from concertina.policies.terms import Terms, reserve_of

FIGURE_4 = {1: 1.0, 2: 1.5, 4: 2.0}
"""The scaling curve of the paper's figure 4(a)."""
CURVES = Curves(
    ThroughputTable(
        rows=tuple(
            ThroughputRow(model="m", batch_size=8, device_type="gpu", workers=n, iterations_per_s=speed)
            for n, speed in FIGURE_4.items()
        )
    )
)
FREE = ChangeCost(flat_s=0.0, doubling_s=0.0)
HOUR = 3600.0


def claim(work: float, low: int = 1, high: int = 4) -> Claim:
    return Claim(work, [Ladder(ScalingCurve(points={"gpu": FIGURE_4}), "gpu", (low, high), scale_of(4), FREE)])


def job(name: str, work: float, deadline: float | None, **fields: object) -> JobSpec:
    known = {"submit_s": 0.0, "gpus": 1, "model": "m", "batch_size": 8}
    return JobSpec(**{"id": name, "work": work, "deadline_s": deadline, **known, **fields})  # type: ignore[arg-type]


def table(*jobs: JobSpec | JobView, cluster: str = "1x4", now: float = 0.0) -> Table:
    views = tuple(
        j if isinstance(j, JobView) else JobView(spec=j, phase=JobPhase.WAITING, waiting_since_s=0.0) for j in jobs
    )
    return Table.from_snapshot(Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=views), CURVES)


def answer(new: JobSpec, rows: Table, policy: str = "elasticflow") -> Admitted | Rejected:
    return rule(policy_named(policy).admission)(new, CURVES.of(new)[0], rows.capacity, rows)


def shares(rows: Table, policy: str = "elasticflow") -> list[int]:
    return [int(count) for count in policy_named(policy).allocate(rows).workers]


# -- filling -------------------------------------------------------------------------------------------------


def test_figure_4b_alone_on_four_devices_two_are_enough() -> None:
    profile = Profile(0.0, 4, 4, scale_of(4))
    share = profile.fill(claim(3.0), 0, 2.0)
    assert share is not None
    assert (share.level, share.rank, share.finish_s) == (2, 2, 2.0)
    assert profile.pieces() == [(0.0, 2), (2.0, 4)]


def test_figure_4c_beside_others_one_device_at_first_and_then_four() -> None:
    profile = Profile(0.0, 4, 4, scale_of(4))
    assert profile.fill(claim(1.0, high=1), 0, 1.0)
    assert profile.fill(claim(1.5, low=2, high=2), 0, 1.0)
    share = profile.fill(claim(3.0), 0, 2.0)
    assert share is not None
    assert (share.level, share.rank) == (3, 1)
    assert (share.grows_s, share.finish_s) == (1.0, 2.0)
    assert profile.pieces() == [(0.0, 0), (1.0, 0), (2.0, 4)]


def test_every_change_on_the_way_costs_a_pause() -> None:
    cost = ChangeCost(flat_s=10.0, doubling_s=1.0)
    profile = Profile(0.0, 4, 4, scale_of(4))
    assert profile.fill(claim(150.0, low=2, high=2), 0, 100.0)
    steps = Ladder(ScalingCurve(points={"gpu": FIGURE_4}), "gpu", (1, 4), scale_of(4), cost)
    # 2 devices from 11 s to 100 s, 4 devices from 112 s on
    share = profile.fill(Claim(89 * 1.5 + 50 * 2.0, [steps]), 0, 162.0)
    assert share is not None
    assert (share.level, share.rank, share.grows_s, share.finish_s) == (3, 2, 100.0, 162.0)


def test_a_job_that_pauses_goes_on_when_the_pause_is_over() -> None:
    waits = claim(10.0)
    waits.kind, waits.rank, waits.busy_s = 0, 1, 7.0
    share = Profile(0.0, 4, 4, scale_of(4)).fill(waits, 0, 17.0)
    assert share is not None
    assert (share.level, share.finish_s) == (1, 17.0)


def test_a_start_costs_more_than_a_change() -> None:
    cost = ChangeCost(flat_s=2.0, doubling_s=0.0, start_s=8.0)
    steps = Ladder(ScalingCurve(points={"gpu": FIGURE_4}), "gpu", (1, 1), scale_of(4), cost)
    share = Profile(0.0, 4, 4, scale_of(4)).fill(Claim(5.0, [steps]), 0, 20.0)
    assert share is not None
    assert share.finish_s == 15.0
    # 3 s of work, 2 s without a device, 10 s until it goes on, 2 s of work
    share = Profile(0.0, 4, 4, scale_of(4)).follow(
        Claim(5.0, [steps], 0, 1), 0, ((0.0, 1), (3.0, 0), (5.0, 1)), None, 100.0
    )
    assert share is not None
    assert round(share.finish_s, 3) == 17.0
    assert ChangeCost(flat_s=5.0, start_s=4.0).at_least(7.0, 0.0).start_s == 2.0


def test_who_waits_until_something_is_free_pays_a_start_from_then_on() -> None:
    cost = ChangeCost(flat_s=2.0, doubling_s=0.0, start_s=8.0)
    steps = Ladder(ScalingCurve(points={"gpu": FIGURE_4}), "gpu", (1, 1), scale_of(4), cost)
    for until in (18.0, 17.9):
        profile = Profile(0.0, 1, 4, scale_of(1))
        assert profile.fill(Claim(3.0, [steps], 0, 1), 0, 3.0) is not None
        share = profile.fill(Claim(5.0, [steps], 0, 1, busy_s=15.0), 0, until)
        assert (None if share is None else share.finish_s) == (18.0 if until >= 18.0 else None)
        rushed = profile.rush(Claim(5.0, [steps]), 0)
        assert rushed is not None
        assert rushed.finish_s == (33.0 if share else 18.0)


@pytest.mark.parametrize(("start_s", "finish_s"), [(3.0, 19.0), (0.0, 12.0)])
def test_where_starts_are_dear_a_change_does_not_end_before_the_one_under_way(start_s: float, finish_s: float) -> None:
    cost = ChangeCost(flat_s=2.0, doubling_s=0.0, start_s=start_s)
    steps = Ladder(ScalingCurve(points={"gpu": FIGURE_4}), "gpu", (1, 4), scale_of(4), cost)
    share = Profile(0.0, 4, 4, scale_of(4)).fill(Claim(15.0, [steps], 0, 1, busy_s=9.0), 0, 19.0)
    assert share is not None
    assert (share.level, share.finish_s) == (2, finish_s)


def test_what_can_not_be_filled_in_takes_nothing() -> None:
    profile = Profile(0.0, 4, 4, scale_of(4))
    assert profile.fill(claim(4.1), 0, 2.0) is None
    assert profile.pieces() == [(0.0, 4)]


def test_a_size_that_is_no_power_of_two_stands_on_the_next_one() -> None:
    curve = ScalingCurve(points={"gpu": {1: 1.0, 3: 2.5, 8: 4.0}})
    ladder = Ladder(curve, "gpu", (3, 3), scale_of(8), FREE)
    assert ladder.counts == [0, 0, 0, 3, 3]
    assert ladder.levels == [3]


def test_a_job_that_holds_an_odd_number_is_known_to_hold_it() -> None:
    curves = Curves(
        ThroughputTable(rows=tuple(ThroughputRow(**row) for row in _rows({1: 1.0, 2: 1.8, 3: 2.5})))  # type: ignore[arg-type]
    )
    view = JobView(
        spec=job("a", HOUR, 9 * HOUR, max_workers=3),
        phase=JobPhase.RUNNING,
        workers=(("gpu", 3),),
        placement=(("n0", 3),),
    )
    rows = Table.from_snapshot(Snapshot(now=0.0, cluster=Cluster.parse("1x4"), jobs=(view,)), curves)
    held = Claims(rows, Ladders(rows.types, rows.capacity, FREE), elastic=True).of(0)
    assert held.ladders[0] is not None
    assert held.ladders[0].counts[held.rank] == 3


def _rows(speeds: dict[int, float]) -> list[dict[str, object]]:
    fixed = {"model": "m", "batch_size": 8, "device_type": "gpu"}
    return [{**fixed, "workers": n, "iterations_per_s": speed} for n, speed in speeds.items()]


def test_a_plan_is_followed_from_where_it_stands_and_lasts_until_the_work_is_done() -> None:
    runs = [(0.0, 1), (2.0, 0), (5.0, 2)]
    share = Profile(1.0, 4, 1, scale_of(4)).follow(
        claim(3.5), 0, runs, 7.0, 20.0
    )  # a step until 2 s, then 1.5 a second from 5 s on
    assert share is not None
    assert share.finish_s == pytest.approx(5.0 + 2.5 / 1.5, abs=1e-4)
    assert share.runs == ((1.0, 1), (2.0, 0), (5.0, 2))
    assert Profile(1.0, 4, 1, scale_of(4)).follow(claim(3.5), 0, runs, 6.0, 6.0) is None


def test_a_plan_is_followed_as_far_as_there_are_devices() -> None:
    profile = Profile(0.0, 1, 1, scale_of(1))
    share = profile.follow(claim(3.0), 0, [(0.0, 3)], 2.0, 20.0)
    assert share is not None
    assert (share.rank, share.finish_s) == (1, pytest.approx(3.0, abs=1e-4))
    assert [free for _, free in profile.pieces()] == [0, 1]


def test_a_plan_that_is_followed_ends_when_it_was_to_end_whatever_rounding_does() -> None:
    for ends in (3.0 - 1e-9, 3.0 + 1e-9):
        profile = Profile(0.0, 1, 2, scale_of(1))
        first = profile.follow(claim(3.0), 0, [(0.0, 1)], ends, 20.0)
        other = profile.follow(claim(1.0), 0, [(0.0, 0), (ends, 1)], ends + 1.0, 20.0)
        assert first is not None
        assert other is not None
        assert (first.finish_s, other.runs) == (ends, ((0.0, 0), (ends, 1)))


def test_a_plan_that_can_not_be_followed_leaves_what_waits_where_it_was() -> None:
    profile = Profile(0.0, 1, 2, scale_of(1))
    assert profile.fill(claim(5.0, high=1), 0, 5.0)  # nothing is free before 5 s
    assert profile.follow(claim(9.0, high=1), 0, [(0.0, 0), (2.0, 1)], 11.0, 6.0) is None
    assert profile.fill(claim(1.0, high=1), 0, 6.0)
    assert [free for _, free in profile.pieces()] == [0, 0, 0, 1]


def test_next_to_nothing_left_still_waits_for_its_turn() -> None:
    profile = Profile(0.0, 4, 1, scale_of(4))
    share = profile.follow(claim(1e-9), 0, [(0.0, 0), (5.0, 1)], 5.0, 20.0)
    assert share is not None
    assert share.finish_s == pytest.approx(5.0)
    assert [free for _, free in profile.pieces()][:1] == [4]


def test_a_job_short_of_spare_is_filled_in_as_early_as_it_can_be() -> None:
    profile = Profile(0.0, 4, 4, scale_of(4))
    share = profile.rush(claim(6.0), 0, 4.5)
    assert share is not None
    assert (share.level, share.finish_s) == (3, 3.0)
    assert Profile(0.0, 4, 4, scale_of(4)).rush(claim(6.0), 0, 2.9) is None


# -- admission -----------------------------------------------------------------------------------------------


def test_a_promise_is_the_deadline_asked_for() -> None:
    assert answer(job("a", HOUR, 2 * HOUR), table()).promised_s == 2 * HOUR  # type: ignore[union-attr]


def test_the_cost_of_starting_and_the_margin_are_part_of_the_promise() -> None:
    work = 2.0 * HOUR  # an hour on four devices, to the second
    assert isinstance(answer(job("a", work, HOUR), table()), Rejected)
    assert isinstance(answer(job("a", work, 1.2 * HOUR), table()), Admitted)


def test_a_promise_keeps_a_fixed_and_a_proportional_spare() -> None:
    terms = Terms(spare_s=90.0, spare_share=0.03)
    assert terms.due(1000.0, 11_000.0) == 11_000.0 - 90.0 - 300.0
    assert terms.due(1000.0, 11_000.0, 0.5) == 11_000.0 - 45.0 - 150.0
    assert terms.due(1000.0, terms.deadline(1000.0, 5000.0)) == pytest.approx(5000.0)


def test_a_job_that_is_in_time_only_if_all_goes_well_is_refused() -> None:
    spec, bold = job("a", 2.0 * HOUR, 1.09 * HOUR), Terms(headroom=0.0)
    curve = CURVES.of(spec)[0]
    assert isinstance(admit(spec, curve, table(), bold), Admitted)
    assert isinstance(admit(spec, curve, table(), Terms(headroom=0.08)), Rejected)


def test_a_newcomer_is_refused_that_would_break_an_older_promise() -> None:
    rows = table(job("old", 4.0 * HOUR, 2.5 * HOUR))
    new = job("new", 3.0 * HOUR, 1.9 * HOUR)
    assert isinstance(answer(new, table()), Admitted)
    assert isinstance(answer(new, rows), Rejected)


def test_a_refusal_names_a_deadline_that_would_be_promised() -> None:
    rows = table(job("old", 4.0 * HOUR, 2.5 * HOUR))
    told = answer(job("new", 3.0 * HOUR, 1.9 * HOUR), rows)
    assert isinstance(told, Rejected)
    assert told.earliest_s is not None
    assert told.earliest_s > 2.5 * HOUR
    assert f"{told.earliest_s:.0f} s could be promised" in told.reason
    assert isinstance(answer(job("new", 3.0 * HOUR, told.earliest_s), rows), Admitted)


@pytest.mark.parametrize("fields", [{"deadline_s": None}, {"deadline_s": 1.0, "soft": True}])
def test_soft_deadlines_and_best_effort_are_never_refused(fields: dict[str, object]) -> None:
    spec = JobSpec(id="a", submit_s=0.0, gpus=1, model="m", batch_size=8, work=HOUR, **fields)  # type: ignore[arg-type]
    told = answer(spec, table(job("old", 4.0 * HOUR, 2.5 * HOUR)))
    assert isinstance(told, Admitted)
    assert told.promised_s is None


def test_without_elasticity_a_job_must_be_in_time_on_what_it_asks_for() -> None:
    tight = job("a", HOUR, 0.9 * HOUR)
    assert isinstance(answer(tight, table()), Admitted)
    assert isinstance(answer(tight, table(), "edf-admission"), Rejected)
    assert isinstance(answer(tight, table(), "edf-elastic"), Admitted)


def test_a_quota_counts_the_promised_devices_of_a_user() -> None:
    old = job("old", HOUR, 9 * HOUR, gpus=2, user="ann")
    terms = Terms(quotas=(("ann", 3), ("*", 2)))

    def ask(**fields: object) -> Admitted | Rejected:
        new = job("new", HOUR, 9 * HOUR, **fields)
        return admit(new, CURVES.of(new)[0], table(old, cluster="1x8"), terms)

    assert isinstance(ask(user="ann", gpus=1), Admitted)
    told = ask(user="ann", gpus=2)
    assert isinstance(told, Rejected)
    assert told.reason.startswith("promised jobs of ann ask for 2 of the 3 devices of its quota and this one for 2")
    assert isinstance(ask(user="bob", gpus=2), Admitted)
    assert isinstance(ask(user="bob", gpus=4), Rejected)
    assert isinstance(ask(user="ann", gpus=4, soft=True), Admitted)


def test_a_reserve_is_what_the_largest_nodes_of_each_type_have() -> None:
    cluster = Cluster.parse("2x4:A100,1x8:A100,3x2:T4")
    assert reserve_of(cluster, 0) == ()
    assert reserve_of(cluster, 1) == (("A100", 8), ("T4", 2))
    assert reserve_of(cluster, 2) == (("A100", 12), ("T4", 4))
    with pytest.raises(UsageError, match="a reserve of 6 nodes on a cluster of 6: needed 0 to 5"):
        reserve_of(cluster, 6)


def test_no_promise_relies_on_the_reserve_but_jobs_use_it() -> None:
    policy = on_terms(policy_named("elasticflow"), reserve=(("gpu", 2),))
    tight, loose = job("a", 2.0 * HOUR, 1.2 * HOUR), job("a", 2.0 * HOUR, 1.6 * HOUR)  # four devices, two devices
    curve = CURVES.of(tight)[0]
    assert isinstance(rule_of(policy)(tight, curve, [4], table()), Rejected)
    assert isinstance(rule_of(policy)(loose, curve, [4], table()), Admitted)
    assert policy.allocate(table(loose)).workers.tolist() == [4]


def test_what_is_lost_already_counts_as_reserve() -> None:
    policy = on_terms(policy_named("elasticflow"), reserve=(("gpu", 2),))
    new, rows = job("a", 2.0 * HOUR, 1.6 * HOUR), table()
    rows.capacity = [2]
    assert isinstance(rule_of(policy)(new, CURVES.of(new)[0], [4], rows), Admitted)


def test_terms_are_a_matter_of_policies_that_promise() -> None:
    assert on_terms(policy_named("fifo"), spare_s=1.0) is policy_named("fifo")
    assert makes_promises(policy_named("elasticflow"))
    assert not makes_promises(policy_named("edf-elastic"))
    with pytest.raises(UsageError, match="-1 devices for ann: needed 0 or more"):
        Terms(quotas=(("ann", -1),))


# -- allocation ----------------------------------------------------------------------------------------------


def test_promises_come_before_best_effort() -> None:
    tight = job("tight", 4.0 * HOUR, 2.4 * HOUR)
    assert shares(table(job("any", HOUR, None), tight)) == [0, 4]


def test_what_is_left_goes_where_a_device_more_brings_most() -> None:
    rows = table(job("a", HOUR, 9 * HOUR), job("b", HOUR, None), cluster="1x3")
    assert sorted(shares(rows)) == [1, 2]
    assert shares(table(job("a", HOUR, 9 * HOUR), job("b", HOUR, 9 * HOUR), cluster="2x4")) == [4, 4]


def test_best_effort_starts_before_others_grow_and_the_shortest_first() -> None:
    loose, short, long = job("p", HOUR, 9 * HOUR), job("s", 10.0, None), job("l", HOUR, None)
    assert shares(table(loose, long, short, cluster="1x2")) == [1, 0, 1]
    assert shares(table(loose, long, short, cluster="1x3")) == [1, 1, 1]


def test_a_job_whose_deadline_is_lost_waits_for_those_that_can_be_in_time() -> None:
    lost, tight = job("lost", 4 * HOUR, 0.5 * HOUR), job("tight", 4 * HOUR, 2.4 * HOUR)
    assert shares(table(lost, tight)) == [0, 4]
    assert shares(table(lost, tight), "edf-elastic") == [4, 0]


def test_a_job_whose_deadline_is_lost_keeps_what_it_holds_if_that_costs_nobody_a_promise() -> None:
    held = {"phase": JobPhase.RUNNING, "workers": (("gpu", 1),), "placement": (("n0", 1),)}
    lost = JobView(spec=job("lost", HOUR, 60.0, max_workers=1), **held)  # type: ignore[arg-type]
    easy, tight = job("easy", HOUR, 9 * HOUR, max_workers=1), job("tight", HOUR, 1.1 * HOUR, max_workers=1)
    assert shares(table(lost, easy, cluster="1x1", now=30.0)) == [1, 0]
    assert shares(table(lost, tight, cluster="1x1", now=30.0)) == [0, 1]


def test_a_newcomer_is_promised_nothing_that_makes_a_lost_promise_later_still() -> None:
    lost = job("lost", HOUR, 60.0, max_workers=1)
    new = job("new", HOUR, 1.5 * HOUR, submit_s=100.0, max_workers=1)
    assert isinstance(answer(new, table(cluster="1x1", now=100.0)), Admitted)
    refused = answer(new, table(lost, cluster="1x1", now=100.0))
    assert isinstance(refused, Rejected)
    assert refused.earliest_s is not None
    assert refused.earliest_s > 2 * HOUR
    assert isinstance(answer(new, table(lost, cluster="1x2", now=100.0)), Admitted)


def test_without_elasticity_jobs_get_what_they_ask_for_or_nothing() -> None:
    rows = table(job("a", HOUR, 9 * HOUR, gpus=2), job("b", HOUR, 8 * HOUR, gpus=4), cluster="1x4")
    assert shares(rows, "edf-admission") == [0, 4]


def test_growing_is_not_worth_a_pause_for_a_job_that_is_almost_done() -> None:
    held = JobView(
        spec=job("a", HOUR, 9 * HOUR),
        phase=JobPhase.RUNNING,
        workers=(("gpu", 1),),
        placement=(("n0", 1),),
        work_done=HOUR - 20.0,
    )
    assert shares(table(held)) == [1]


def test_a_round_is_asked_for_when_a_share_has_to_grow() -> None:
    first, second = job("a", 1.5 * HOUR, 1.2 * HOUR, max_workers=2), job("b", 3.0 * HOUR, 2.5 * HOUR)
    found = policy_named("elasticflow").allocate(table(first, second, cluster="1x3"))
    assert found.workers.tolist() == [2, 1]
    rows = table(first, second, cluster="1x3")
    assert look_ahead(claims_of(rows, Terms()), Terms()).shares[1].grows_s < math.inf
    assert found.wake_s is not None
    assert found.wake_s > 0.0


def test_levels_travel_in_the_plan() -> None:
    views = (JobView(spec=job("a", HOUR, 2.0 * HOUR), phase=JobPhase.SUBMITTED),)
    snapshot = Snapshot(now=0.0, cluster=Cluster.parse("1x4"), jobs=views)
    plan = run_round(snapshot, ElasticFlowPolicy(), CURVES)
    assert isinstance(plan.answers[0], Admitted)
    assert plan.notes == {"a": (1, 0.0)}
    assert plan.reserved == {"a": ((0.0, 0, 1), (HOUR + 9.0, 0, 0))}


HARD = job("a", 3.0 * HOUR, 3.0 * HOUR), job("b", 2.0 * HOUR, 2.0 * HOUR), job("c", HOUR, 2.5 * HOUR)
"""Three jobs for three devices: taken in this order all can be in time, planned anew by deadline one is late."""


def test_what_admission_has_planned_is_kept_where_no_order_of_jobs_finds_a_plan_again() -> None:
    rows = table(cluster="1x3")
    for count, new in enumerate(HARD, 1):
        told = answer(new, rows)
        assert isinstance(told, Admitted)
        rows = table(*HARD[:count], cluster="1x3")
        rows.reserved = dict(told.reserved)
    assert not look_ahead(claims_of(rows, Terms()), Terms()).late
    rows.reserved = {}
    assert look_ahead(claims_of(rows, Terms()), Terms()).late


def hard_pressed(count: int) -> Table:
    """Jobs that could all be in time alone, half of which can not beside the others."""
    return table(*(job(f"j{i}", HOUR, 1.2 * HOUR, max_workers=1) for i in range(count)), cluster="1x4")


def test_what_promises_in_danger_cost_is_bounded_by_jobs_filled_in() -> None:
    rows = hard_pressed(8)
    terms = Terms(effort=100)
    free, bound, none = (
        look_ahead(claims_of(rows, some), some) for some in (Terms(effort=10**9), terms, Terms(effort=0))
    )
    assert len(none.late) == 4
    assert none.tried == 0
    assert 0 < bound.tried <= terms.effort < free.tried
    assert bound.loss >= free.loss


def test_a_refusal_costs_a_bounded_number_of_jobs_filled_in() -> None:
    rows = hard_pressed(40)
    new = job("new", HOUR, 1.3 * HOUR, max_workers=1)
    for effort in (0, 400):
        terms = Terms(effort=effort)
        refused = admit(new, CURVES.of(new)[0], rows, terms)
        assert isinstance(refused, Rejected)
        # those who are there, beside the newcomer, and with eased dues, once each; then the line by halves
        assert 0 < refused.work <= effort + 3 * 41 + (terms.halvings + 2) * 41


def test_many_changes_are_explained_as_one_by_one() -> None:
    rows = table(job("a", HOUR, 2 * HOUR), job("b", HOUR, 1.1 * HOUR), job("c", HOUR, None), cluster="1x4")
    for name in ("elasticflow", "concertina"):
        policy = policy_named(name)
        explain = explainer_of(policy, rows)
        assert [explain(row, 0, 1) for row in range(3)] == [policy.explain(rows, row, 0, 1) for row in range(3)]


def test_jobs_that_come_at_once_are_planned_for_as_they_were_admitted() -> None:
    views = tuple(JobView(spec=spec, phase=JobPhase.SUBMITTED) for spec in HARD)
    plan = run_round(Snapshot(now=0.0, cluster=Cluster.parse("1x3"), jobs=views), ElasticFlowPolicy(), CURVES)
    assert plan.reserved is not None
    assert sorted(plan.reserved) == ["a", "b", "c"]


def test_the_reason_tells_the_promise_from_the_rest() -> None:
    rows = table(job("a", HOUR, 2.0 * HOUR), job("b", HOUR, None), job("c", 9 * HOUR, HOUR))
    policy = ElasticFlowPolicy()
    assert policy.explain(rows, 0, 0, 1) == "1 device is enough now for its deadline"
    assert policy.explain(rows, 0, 0, 4) == "1 device is enough now for its deadline; further ones bring most here"
    assert policy.explain(rows, 1, 0, 1).startswith("best effort")
    assert "can not be met with the devices there are" in policy.explain(rows, 2, 0, 0)
