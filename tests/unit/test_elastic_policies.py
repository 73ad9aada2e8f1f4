"""The elastic policies of EasyScale, Elan and EDL on small tables, and fast code against slow twins."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.easyscale import EasyScalePolicy
from concertina.policies.easyscale_notes import STUCK, pack
from concertina.policies.elastic_backfill import ElasticBackfillPolicy
from concertina.policies.elastic_fifo import ElasticFifoPolicy
from concertina.policies.elastic_tiresias import ElasticTiresiasPolicy, extra_devices
from concertina.policies.hybrid_curves import HybridCurves, curves_for
from concertina.policies.marginal import CurveKey, Ladder, fill, ladder
from concertina.policies.mixed_speed import mixed_speed, virtual_plan
from concertina.policies.round import moved, run_round
from concertina.policies.scaling_curve import Curves, ScalingCurve, ThroughputRow, ThroughputTable
from concertina.policies.table import Table
from concertina.simulator.run import simulate

SPEEDS = {
    ("m", 8, "gpu"): {1: 1.0, 2: 1.8, 4: 3.0, 8: 2.9},
    ("m", 8, "A"): {1: 2.0, 2: 3.6, 4: 6.0},
    ("m", 8, "B"): {1: 1.0, 2: 1.8, 4: 3.0},
    ("same", 8, "A"): {1: 1.0},
    ("same", 8, "B"): {1: 1.0},
    ("flat", 8, "gpu"): {1: 1.0, 2: 1.1, 4: 1.2},
    ("wide", 8, "gpu"): {1: 1.0, 2: 2.0, 4: 3.9, 8: 7.6},
}
CURVES = ThroughputTable(
    rows=tuple(
        ThroughputRow(model=model, batch_size=batch, device_type=kind, workers=n, iterations_per_s=speed)
        for (model, batch, kind), points in SPEEDS.items()
        for n, speed in points.items()
    )
)
HOMO, HETER = EasyScalePolicy(), EasyScalePolicy(name="easyscale-heter", mixes=True)


def job(name: str, gpus: int = 1, work: float = 100.0, model: str = "m", **fields: object) -> JobSpec:
    base = {"id": name, "submit_s": 0.0, "gpus": gpus, "work": work, "model": model, "batch_size": 8}
    return JobSpec(**{**base, **fields})  # type: ignore[arg-type]


def running(spec: JobSpec, *workers: tuple[str, int], **fields: object) -> JobView:
    base = {"spec": spec, "phase": JobPhase.RUNNING, "workers": workers}
    return JobView(**{**base, **fields})  # type: ignore[arg-type]


def table(*jobs: JobSpec | JobView, cluster: str = "1x4", now: float = 10.0) -> Table:
    views = tuple(
        one if isinstance(one, JobView) else JobView(spec=one, phase=JobPhase.WAITING, waiting_since_s=0.0)
        for one in jobs
    )
    return Table.from_snapshot(Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=views), Curves(CURVES))


# -- EasyScale -----------------------------------------------------------------------------------------------


def test_easyscale_starts_on_what_is_free_and_grows_to_its_virtual_workers() -> None:
    assert HOMO.allocate(table(job("a", 4))).workers.tolist() == [4]
    assert HOMO.allocate(table(job("a", 2))).workers.tolist() == [2]  # never more than virtual workers
    assert HOMO.allocate(table(job("a", 8), cluster="1x3")).workers.tolist() == [3]
    assert HOMO.allocate(table(job("a", 4), cluster="1x3")).workers.tolist() == [2]  # 3 for 4 would waste a third


def test_easyscale_proposes_nothing_that_wastes_too_much() -> None:
    rows = table(job("a", 3), cluster="1x2")  # one of the two does two, the other waits for it: a quarter is wasted
    assert HOMO.allocate(rows).workers.tolist() == [2]
    assert EasyScalePolicy(most_waste=0.2).allocate(rows).workers.tolist() == [1]


def test_easyscale_gives_borrowed_devices_back_to_who_waits_in_order() -> None:
    found = HOMO.allocate(table(running(job("a", 4), ("gpu", 4)), job("b")))
    assert found.workers.tolist() == [2, 1]
    crowd = HOMO.allocate(table(running(job("a", 4), ("gpu", 4)), *(job(f"b{i}", 4) for i in range(5))))
    assert crowd.workers.tolist() == [1, 1, 1, 1, 0, 0]  # nobody gives its only device


def test_easyscale_takes_from_who_loses_least() -> None:
    rows = table(
        running(job("a", 4, model="wide"), ("gpu", 4)), running(job("b", 4, model="flat"), ("gpu", 4)), job("c")
    )
    rows.capacity[0] = 8
    assert HOMO.allocate(rows).workers.tolist()[0] == 4


def test_easyscale_gives_back_the_type_that_is_worth_more_to_who_waits() -> None:
    both = running(job("a", 6), ("A", 2), ("B", 2))  # without a B it loses least, but an A is twice as fast
    found = HETER.allocate(table(both, job("b"), cluster="1x2:A,1x2:B"))
    assert found.kind is not None
    assert (found.workers.tolist()[1], found.kind.tolist()[1]) == (1, 0)


def test_easyscale_grants_the_highest_speedup_per_device() -> None:
    rows = table(
        running(job("a", 2, model="flat"), ("gpu", 1)), running(job("b", 2, model="wide"), ("gpu", 1)), cluster="1x3"
    )
    assert HOMO.allocate(rows).workers.tolist() == [1, 2]


def test_only_heter_mixes_types_and_only_where_it_is_faster() -> None:
    rows = table(job("a", 6), cluster="1x2:A,1x2:B")
    assert HOMO.allocate(rows).workers.tolist() == [2]
    mixed = HETER.allocate(rows)  # two on each A, one on each B: nobody waits for another
    assert (mixed.workers.tolist(), mixed.splits) == ([4], {0: (2, 2)})
    four = HETER.allocate(table(job("a", 4), cluster="1x2:A,1x2:B"))  # any B would make the step longer
    assert (four.workers.tolist(), dict(four.splits)) == ([2], {})
    alone = HETER.allocate(table(job("a", 1), cluster="1x2:A,1x2:B"))
    assert (alone.workers.tolist(), alone.kind is not None and alone.kind.tolist()) == ([1], [0])


@pytest.mark.parametrize("policy", [HOMO, HETER])
def test_a_faster_type_that_comes_free_releases_the_slower_one(policy: EasyScalePolicy) -> None:
    found = policy.allocate(table(running(job("a", 1), ("B", 1)), cluster="1x1:A,1x1:B"))
    assert found.kind is not None
    assert (found.workers.tolist(), found.kind.tolist(), dict(found.splits)) == ([1], [0], {})


def test_easyscale_falls_back_when_growing_made_it_slower_and_tries_again_later() -> None:
    grown = running(job("a", 4), ("gpu", 4), level=pack((2,)), stamp=9.0)  # it did 9 iterations/s on two
    rows = table(grown, now=50.0)
    back = HOMO.allocate(rows)
    assert back.level is not None
    assert back.stamp is not None
    assert (back.workers.tolist(), back.level.tolist(), back.stamp.tolist()) == ([2], [STUCK], [50.0])
    assert back.wake_s == 50.0 + HOMO.patience_s
    assert "slower" in HOMO.explain(rows, 0, 4, 2)
    stuck = running(job("a", 4), ("gpu", 2), level=STUCK, stamp=50.0)
    assert HOMO.allocate(table(stuck, now=60.0)).workers.tolist() == [2]
    assert HOMO.allocate(table(stuck, now=50.0 + HOMO.patience_s)).workers.tolist() == [4]


def test_easyscale_notes_what_a_job_had_before_it_grew() -> None:
    found = HOMO.allocate(table(running(job("a", 4), ("gpu", 2))))
    assert found.level is not None
    assert found.stamp is not None
    assert (found.workers.tolist(), found.level.tolist(), found.stamp.tolist()) == ([4], [pack((2,))], [1.8])
    assert found.wake_s == 10.0 + HOMO.watch_s  # to see whether it is faster now
    assert HOMO.allocate(table(running(job("a", 2), ("gpu", 2)))).wake_s is None


def test_of_equal_speedups_the_one_with_least_left_comes_first() -> None:
    rows = table(
        running(job("long", 2, 1000.0, "wide"), ("gpu", 1)),
        running(job("short", 2, 10.0, "wide"), ("gpu", 1)),
        cluster="1x3",
    )
    assert HOMO.allocate(rows).workers.tolist() == [1, 2]


def test_heter_takes_what_is_left_of_several_types_at_once() -> None:
    curves = Curves()  # without figures all types are equally fast: three of four virtual workers' devices gain nothing
    four = JobView(spec=JobSpec(id="a", submit_s=0.0, gpus=4, duration_s=9.0), phase=JobPhase.WAITING)
    there = Snapshot(now=1.0, cluster=Cluster.parse("1x2:A,1x1:B,1x1:C"), jobs=(four,))
    assert HETER.allocate(Table.from_snapshot(there, curves)).splits == {0: (2, 1, 1)}
    assert HOMO.allocate(Table.from_snapshot(there, curves)).workers.tolist() == [2]


def test_heter_lets_two_jobs_change_places_where_both_together_gain() -> None:
    # "m" is twice as fast on A, "same" as fast on B: whoever came first holds the A
    views = running(job("a", 1, model="same"), ("A", 1)), running(job("b", 1), ("B", 1))
    rows = table(*views, cluster="1x1:A,1x1:B")
    found = HETER.allocate(rows)
    assert found.kind is not None
    assert found.kind.tolist() == [1, 0]
    assert HETER.explain(rows, 0, 1, 1).startswith("no other devices that it could have")
    assert HOMO.allocate(rows).workers is rows.held or HOMO.allocate(rows).workers.tolist() == rows.held.tolist()
    only_a = running(job("a", 1, model="same", device_types=("A",)), ("A", 1))
    assert HETER.allocate(table(only_a, views[1], cluster="1x1:A,1x1:B")).workers.tolist() == [1, 1]
    assert HETER.allocate(table(only_a, views[1], cluster="1x1:A,1x1:B")).kind is None


NEAR = ThroughputTable(
    rows=tuple(
        ThroughputRow(model="lm", batch_size=8, device_type="gpu", workers=n, nodes=nodes, iterations_per_s=speed)
        for n, nodes, speed in ((1, 1, 1.0), (2, 1, 1.9), (4, 1, 3.6), (2, 2, 0.3), (4, 2, 0.5))
    )
)


@pytest.mark.parametrize("policy", [HOMO, HETER])
def test_easyscale_does_not_grow_onto_a_second_node_where_that_is_slower(policy: EasyScalePolicy) -> None:
    held = running(job("a", 4, model="lm"), ("gpu", 2), placement=(("n0", 2),))
    there = Snapshot(now=1.0, cluster=Cluster.parse("2x2"), jobs=(held,))
    assert run_round(there, policy, Curves(NEAR)).actions == ()
    (action,) = run_round(replace(there, cluster=Cluster.parse("1x2,1x4")), policy, Curves(NEAR)).actions
    assert action.nodes == (("n1", 4),)  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [HOMO, HETER])
def test_easyscale_brings_devices_together_that_are_slow_apart(policy: EasyScalePolicy) -> None:
    held = running(job("a", 2, model="lm"), ("gpu", 2), placement=(("n0", 1), ("n1", 1)))
    there = Snapshot(now=1.0, cluster=Cluster.parse("2x2"), jobs=(held,))
    (action,) = run_round(there, policy, Curves(NEAR)).actions
    assert len(action.nodes) == 1  # type: ignore[union-attr]
    other = running(job("b"), ("gpu", 1), placement=(("n0", 1),))
    third = replace(other, spec=job("c"), placement=(("n1", 1),))
    full = replace(there, jobs=(held, other, third))
    (action,) = run_round(full, policy, Curves(replace(NEAR, rows=(*NEAR.rows, *CURVES.rows)))).actions
    assert sum(count for _, count in action.nodes) == 1  # type: ignore[union-attr]
    assert action.reason == "is faster on 1 devices close together than on 2 far apart"


def test_a_job_that_can_not_run_here_holds_nobody_up() -> None:
    rows = table(job("a", 4, max_workers=1, min_workers=1, device_types=("B",)), job("b"), cluster="1x2:gpu")
    assert HOMO.allocate(rows).workers.tolist() == [0, 1]


def test_on_mixed_types_each_device_does_what_one_of_as_many_of_its_own_does() -> None:
    curve, _ = Curves(CURVES).of(job("a"))
    assert mixed_speed(curve, [("A", 2), ("B", 2)]) == pytest.approx((6.0 + 3.0) / 2)
    assert mixed_speed(curve, [("A", 2), ("none", 2)]) == 0.0
    planned = virtual_plan(curve, 6, ("A", "B"), (2, 2))
    assert planned is not None
    assert planned.perf / 6 == pytest.approx(4.5)  # two on each A and one on each B: nothing is wasted
    assert virtual_plan(curve, 6, ("A", "none"), (2, 2)) is None


def test_a_part_that_moves_aside_leaves_the_other_types_where_they_are() -> None:
    assert moved(((0, 2), (5, 1)), ((0, 2),), ((1, 2),)) == ((5, 1), (1, 2))
    draw = random.Random(15)  # in this one, a job on both types moves aside and ends later
    sizes = (1, 2, 3, 6)
    jobs = [job(f"j{i}", draw.choice(sizes), draw.uniform(20, 300), submit_s=draw.uniform(0, 60)) for i in range(8)]
    result = simulate(
        jobs, cluster=Cluster.parse("2x4:A,3x2:B"), policy=HETER, throughput=CURVES, placement="buddy", overhead="elan"
    )
    assert result.summary.finished == 8


# -- Elan ----------------------------------------------------------------------------------------------------


def test_elastic_fifo_gives_a_job_what_makes_it_faster_and_no_more() -> None:
    assert ElasticFifoPolicy().allocate(table(job("a"), cluster="1x8")).workers.tolist() == [4]  # 8 are slower
    assert ElasticFifoPolicy().allocate(table(job("a", max_workers=2), cluster="1x8")).workers.tolist() == [2]


def test_elastic_fifo_gives_steps_to_who_saves_most_time() -> None:
    rows = table(running(job("a", work=10.0), ("gpu", 1)), running(job("b", work=1000.0), ("gpu", 1)))
    assert ElasticFifoPolicy().allocate(rows).workers.tolist() == [1, 3]


def test_elastic_fifo_starts_a_job_unless_that_makes_completion_times_longer() -> None:
    a = running(job("a", 2), ("gpu", 2))
    small, large = job("b", 1), job("b", 4)  # on one device, the large one does a third of what it asked for
    assert ElasticFifoPolicy().allocate(table(a, small, cluster="1x2")).workers.tolist() == [1, 1]
    assert ElasticFifoPolicy().allocate(table(a, large, cluster="1x2")).workers.tolist() == [2, 0]
    assert ElasticFifoPolicy().allocate(table(a, large, cluster="1x3")).workers.tolist() == [2, 1]  # one is idle


@pytest.mark.parametrize(("work", "starts"), [(20.0, 2), (2000.0, 0)])
def test_elastic_backfill_fills_the_gap_only_with_what_ends_before_the_head_can_start(work: float, starts: int) -> None:
    rows = (
        running(job("a", 2, min_workers=2), ("gpu", 4)),
        job("head", 4, min_workers=3),
        job("c", 2, work, min_workers=2),
    )
    assert ElasticFifoPolicy().allocate(table(*rows)).workers.tolist() == [4, 0, 0]
    assert ElasticBackfillPolicy().allocate(table(*rows)).workers.tolist() == [4 - starts, 0, starts]


def test_elastic_policies_keep_the_queue_when_nodes_are_lost() -> None:
    rows = table(*(running(job(f"a{i}"), ("gpu", 1)) for i in range(4)))
    rows.capacity[0] = 2
    for policy in (ElasticFifoPolicy(), ElasticBackfillPolicy(), HOMO):
        assert policy.allocate(rows).workers.tolist() == [1, 1, 0, 0]


def naive_fill(ladders: list[Ladder], left: list[float], capacity: int) -> list[int]:
    """One step at a time, as it is said in words."""
    at = [0] * len(ladders)
    free = capacity - sum(one.sizes[0] for one in ladders)
    best_yet = [np.inf] * len(ladders)
    blocked: set[int] = set()
    while True:
        offers = []
        for row, one in enumerate(ladders):
            if row not in blocked and at[row] + 1 < len(one.sizes):
                now, then = one.speeds[at[row]], one.speeds[at[row] + 1]
                cost = one.sizes[at[row] + 1] - one.sizes[at[row]]
                offers.append((-min((1 / now - 1 / then) / cost * left[row], best_yet[row]), row, cost))
        if not offers:
            return [one.sizes[step] for one, step in zip(ladders, at, strict=True)]
        gain, row, cost = min(offers)
        if cost > free:
            blocked.add(row)
        else:
            best_yet[row], free, at[row] = -gain, free - cost, at[row] + 1


@pytest.mark.parametrize("seed", range(60))
def test_steps_on_arrays_go_where_the_loop_gives_them(seed: int) -> None:
    draw = random.Random(seed)
    ladders = []
    for _ in range(draw.randint(1, 7)):
        sizes = sorted(draw.sample((1, 2, 3, 4, 6, 8), draw.randint(1, 5)))
        speeds = sorted(draw.uniform(0.5, 8.0) for _ in sizes)
        ladders.append(Ladder(tuple(sizes), tuple(speeds)))
    left = [draw.uniform(1.0, 500.0) for _ in ladders]
    capacity = sum(one.sizes[0] for one in ladders) + draw.randint(0, 20)
    filled = fill(ladders, np.asarray(left), capacity)
    assert filled.sizes.tolist() == naive_fill(ladders, left, capacity)
    assert filled.speeds.tolist() == [
        one.speeds[one.sizes.index(size)] for one, size in zip(ladders, filled.sizes.tolist(), strict=True)
    ]


def test_a_ladder_has_half_way_sizes_and_no_slower_ones() -> None:
    curve, _ = Curves(CURVES).of(job("a"))
    assert ladder(CurveKey(curve), "gpu", 1, 8).sizes == (1, 2, 3, 4)
    assert ladder(CurveKey(curve), "gpu", 2, 3).speeds == pytest.approx((1.8, 2.4))


# -- hybrid batches ------------------------------------------------------------------------------------------

BATCHES = ThroughputTable(
    rows=tuple(
        ThroughputRow(model="m", batch_size=batch, device_type="gpu", workers=n, iterations_per_s=speed)
        for batch, points in ((8, {1: 1.0, 2: 1.8, 4: 1.7, 8: 1.5}), (16, {1: 0.5, 2: 0.95, 4: 1.7, 8: 1.6}))
        for n, speed in points.items()
    )
)


def test_a_growing_job_takes_the_smallest_batch_that_keeps_all_workers_busy() -> None:
    curve, work = HybridCurves(BATCHES).of(job("a", 2))
    assert work == 100.0
    assert [curve.speed("gpu", n) for n in (1, 2)] == [1.0, 1.8]  # as asked for or fewer: its own batch
    assert curve.speed("gpu", 4) == pytest.approx(2 * 1.7)  # twice the batch, so each iteration counts double
    assert curve.speed("gpu", 8) == 1.5  # 32 was not measured: nothing is made up
    large, _ = HybridCurves(BATCHES).of(job("a", 4, batch_size=16))
    assert large.speed("gpu", 2) == 0.95  # half the workers keep the whole batch


def test_only_policies_that_say_so_let_the_batch_grow() -> None:
    assert isinstance(curves_for(ElasticFifoPolicy().scaling, BATCHES), HybridCurves)
    assert not isinstance(curves_for("strong", BATCHES), HybridCurves)
    without_table = job("a", model=None, batch_size=None, work=None, duration_s=5.0)
    assert HybridCurves(BATCHES).of(without_table)[1] == 5.0
    kept = simulate([job("a", 2)], cluster=Cluster.parse("1x4"), policy="fifo", throughput=BATCHES)
    grown = simulate([job("a", 2)], cluster=Cluster.parse("1x4"), policy="elastic-fifo", throughput=BATCHES)
    assert kept.summary.avg_jct_s == pytest.approx(100 / 1.8)
    assert grown.summary.avg_jct_s == pytest.approx(100 / 3.4)


# -- Elastic-Tiresias ----------------------------------------------------------------------------------------


def test_r1_halves_all_but_the_first_queue_when_too_many_wait() -> None:
    old = running(job("old", 4), ("gpu", 4), service_s=4000.0, level=1, stamp=1.0)
    rows = table(old, job("new", 2))
    assert ElasticTiresiasPolicy().allocate(rows).workers.tolist() == [2, 2]
    assert ElasticTiresiasPolicy(pending=1).allocate(rows).workers.tolist() == [0, 2]
    young = running(job("young", 4), ("gpu", 4), service_s=10.0, stamp=1.0)
    assert ElasticTiresiasPolicy().allocate(table(young, job("new", 2))).workers.tolist() == [4, 0]


def test_r1_leaves_a_job_alone_that_does_not_run_on_half() -> None:
    big = ThroughputRow(model="big", batch_size=8, device_type="gpu", workers=4, iterations_per_s=1.0)
    curves = Curves(ThroughputTable(rows=(*CURVES.rows, big)))
    for spec in (job("old", 4, min_workers=3), job("old", 4, model="big")):
        old = running(spec, ("gpu", 4), service_s=4000.0, level=1, stamp=1.0)
        new = JobView(spec=job("new", 1), phase=JobPhase.WAITING, waiting_since_s=0.0)
        snapshot = Snapshot(now=10.0, cluster=Cluster.parse("1x4"), jobs=(old, new))
        found = ElasticTiresiasPolicy().allocate(Table.from_snapshot(snapshot, curves))
        assert found.workers.tolist() == [0, 1]


def test_r2_gives_idle_devices_to_the_largest_relative_gain_when_nobody_waits() -> None:
    policy = ElasticTiresiasPolicy()
    assert policy.allocate(table(job("a"))).workers.tolist() == [4]
    assert policy.allocate(table(job("a", max_workers=2))).workers.tolist() == [2]
    assert policy.allocate(table(job("flat", model="flat"), job("wide", model="wide"))).workers.tolist() == [1, 3]
    assert policy.allocate(table(job("a"), job("b", 4))).workers.tolist() == [1, 0]  # b waits: no growing


def test_a_job_that_both_rules_touch_gets_one_size() -> None:
    old = running(job("old", 4), ("gpu", 4), service_s=4000.0, level=1, stamp=1.0)
    assert ElasticTiresiasPolicy().allocate(table(old, job("new", 1))).workers.tolist() == [2, 2]


def naive_extra(curves: list[ScalingCurve], now: list[int], limits: list[int], free: int) -> list[int]:
    """One device at a time to the largest gain; no job ahead of an earlier, smaller gain of its own."""
    sizes, least = list(now), [np.inf] * len(now)
    for _ in range(free):
        best, at = 0.0, -1
        for row, curve in enumerate(curves):
            speed, more = curve.speed("gpu", sizes[row]), curve.speed("gpu", sizes[row] + 1)
            gain = min(more / speed - 1, least[row]) if more > 0 and sizes[row] < limits[row] else 0.0
            if gain > best * (1 + 1e-12):
                best, at = gain, row
        if at < 0:
            break
        sizes[at], least[at] = sizes[at] + 1, best
    return [after - before for before, after in zip(now, sizes, strict=True)]


@pytest.mark.parametrize("seed", range(60))
def test_growing_by_groups_gives_what_growing_one_by_one_gives(seed: int) -> None:
    draw = random.Random(seed)
    powers = [draw.uniform(0.2, 1.0) for _ in range(3)]
    kinds = [ScalingCurve(points={"gpu": {n: n**power for n in (1, 2, 4, 8)}}) for power in powers]
    curves = [draw.choice(kinds) for _ in range(draw.randint(1, 9))]
    now = [draw.randint(1, 4) for _ in curves]
    limits = [draw.choice((4, 8, 1 << 30))] * len(curves)
    free = draw.randint(1, 30)
    extra = extra_devices(curves, "gpu", np.asarray(now), np.asarray(limits), free)
    slow = naive_extra(curves, now, limits, free)
    after = [  # jobs alike may change places where their gains are equal
        sorted((id(curve), n + more) for curve, n, more in zip(curves, now, found, strict=True))
        for found in (extra.tolist(), slow)
    ]
    assert after[0] == after[1]
