"""Our own policy by hand: promises first, the short before the long, nobody below the floor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Admitted, Rejected
from concertina.policies.admission import rule
from concertina.policies.climb import Climber, climb, lift
from concertina.policies.concertina import ConcertinaPolicy, weights_by_rank
from concertina.policies.elasticflow import ElasticFlowPolicy
from concertina.policies.fairness import fairness_of
from concertina.policies.filling import ChangeCost, Ladder, scale_of
from concertina.policies.registry import policy_named
from concertina.policies.round import run_round
from concertina.policies.scaling_curve import Curves, ScalingCurve, ThroughputRow, ThroughputTable
from concertina.policies.table import Table
from concertina.simulator.run import simulate

HOUR = 3600.0
FREE = ChangeCost(flat_s=0.0, doubling_s=0.0)
SPEEDS = {
    ("m", "gpu"): {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0},
    ("m", "A100"): {1: 3.0, 2: 5.4, 4: 9.0},
    ("m", "T4"): {1: 1.0, 2: 1.8, 4: 3.0},
    ("one", "gpu"): {1: 1.0},
}
CURVES = Curves(
    ThroughputTable(
        rows=tuple(
            ThroughputRow(model=model, batch_size=8, device_type=kind, workers=n, iterations_per_s=speed)
            for (model, kind), points in SPEEDS.items()
            for n, speed in points.items()
        )
    )
)
POLICY = ConcertinaPolicy()


def job(name: str, work: float, deadline: float | None = None, **fields: object) -> JobSpec:
    known = {"submit_s": 0.0, "gpus": 1, "model": "m", "batch_size": 8}
    return JobSpec(**{"id": name, "work": work, "deadline_s": deadline, **known, **fields})  # type: ignore[arg-type]


def running(spec: JobSpec, count: int, kind: str = "gpu", **fields: object) -> JobView:
    node = ((f"n{0 if kind in ('gpu', 'A100') else 1}", count),)
    return JobView(spec=spec, phase=JobPhase.RUNNING, workers=((kind, count),), placement=node, **fields)  # type: ignore[arg-type]


def table(*jobs: JobSpec | JobView, cluster: str = "1x4", now: float = 0.0) -> Table:
    views = tuple(
        j if isinstance(j, JobView) else JobView(spec=j, phase=JobPhase.WAITING, waiting_since_s=0.0) for j in jobs
    )
    return Table.from_snapshot(Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=views), CURVES)


def shares(rows: Table, policy: ConcertinaPolicy = POLICY) -> list[int]:
    return [int(count) for count in policy.allocate(rows).workers]


def answer(new: JobSpec, rows: Table, policy: str = "concertina") -> Admitted | Rejected:
    return rule(policy_named(policy).admission)(new, CURVES.of(new)[0], rows.capacity, rows)


# -- promises ------------------------------------------------------------------------------------------------


def test_with_promised_jobs_alone_it_decides_as_elasticflow() -> None:
    rows = table(job("a", 9 * HOUR, 6 * HOUR), job("b", HOUR, 2 * HOUR), job("c", 2 * HOUR, 9 * HOUR), cluster="1x8")
    assert shares(rows) == [int(count) for count in ElasticFlowPolicy().allocate(rows).workers]


def test_a_promise_comes_before_best_effort() -> None:
    # two devices are done at 3411 s; the other job would take one of them for a minute
    for due, given in ((3430.0, [0, 2]), (3460.0, [1, 1])):
        strict = job("strict", 1.7 * HOUR, POLICY.terms.deadline(0.0, due))
        assert shares(table(job("loose", 60.0, model="one"), strict, cluster="1x2")) == given


def test_best_effort_goes_before_a_promise_that_has_time() -> None:
    rows = table(job("strict", HOUR, 4 * HOUR, model="one"), job("loose", 300.0, model="one"), cluster="1x1")
    assert shares(rows) == [0, 1]
    assert [int(n) for n in ElasticFlowPolicy().allocate(rows).workers] == [1, 0]


def test_best_effort_waits_where_a_promise_would_lose_its_spare() -> None:
    rows = table(job("strict", HOUR, 1.1 * HOUR, model="one"), job("loose", 300.0, model="one"), cluster="1x1")
    assert shares(rows) == [1, 0]


def test_a_promise_that_is_lost_still_comes_before_best_effort() -> None:
    late = job("late", HOUR, 100.0, model="one")
    loose = job("loose", 300.0, submit_s=200.0, model="one")
    assert shares(table(late, loose, cluster="1x1", now=200.0)) == [1, 0]


def test_a_deadline_is_refused_where_best_effort_would_lose_its_share() -> None:
    # one device for all: those who wait for it would only wait longer
    new = job("new", HOUR, 1.2 * HOUR, model="one")
    assert isinstance(answer(new, table(cluster="1x1")), Admitted)
    waiting = table(job("loose", HOUR, model="one"), job("other", HOUR, model="one"), cluster="1x1")
    refused = answer(new, waiting)
    assert isinstance(refused, Rejected)
    assert "lose their share" in refused.reason
    assert refused.earliest_s is not None
    assert f"{refused.earliest_s:.0f} s could be promised" in refused.reason
    assert isinstance(answer(new, waiting, "elasticflow"), Admitted)


def test_while_a_job_is_behind_no_longer_one_is_promised_anything() -> None:
    rows = table(job("loose", 600.0, model="one"), cluster="1x1", now=400.0)  # on its way to 1000 s instead of 600
    short, long = (job("new", work, 10 * HOUR, submit_s=400.0, model="one") for work in (300.0, 900.0))
    assert isinstance(answer(short, rows), Admitted)
    refused = answer(long, rows)
    assert isinstance(refused, Rejected)
    assert "loose is on its way to 1.7 times its fair time and has less to do" in refused.reason
    assert isinstance(answer(long, table(job("loose", 600.0, model="one"), cluster="1x1", now=50.0)), Admitted)


def test_best_effort_and_soft_deadlines_are_always_taken() -> None:
    rows = table(job("old", 99 * HOUR), cluster="1x1")
    for new in (job("new", HOUR), job("new", HOUR, 60.0, soft=True)):
        assert isinstance(answer(new, rows), Admitted)


# -- what is left --------------------------------------------------------------------------------------------


def test_the_shorter_job_runs_where_only_one_can() -> None:
    rows = table(job("long", 9 * HOUR), job("short", HOUR), cluster="1x1")
    assert shares(rows) == [0, 1]


def test_shorter_jobs_get_more_but_not_all() -> None:
    rows = table(*(job(f"j{i}", HOUR * (i + 1)) for i in range(3)), cluster="1x8")
    given = shares(rows)
    assert sum(given) == 8
    assert given == sorted(given, reverse=True)
    assert given[2] >= 1


def test_the_more_jobs_are_longer_the_more_a_jobs_work_is_worth() -> None:
    weights = weights_by_rank(np.array([30.0, 10.0, 20.0]), bias=0.5)
    assert weights.tolist() == [1.0, math.sqrt(3.0), math.sqrt(2.0)]


def test_a_change_that_does_not_pay_for_its_pause_is_not_made() -> None:
    nearly_done = replace(running(job("a", 1000.0), 2), work_done=980.0)
    assert shares(table(nearly_done)) == [2]
    begun = replace(running(job("a", 9000.0), 2), work_done=980.0)
    assert shares(table(begun)) == [4]


def test_a_job_starts_on_what_it_asked_for_even_if_it_is_over_soon() -> None:
    assert shares(table(job("a", 2.0, gpus=1))) == [1]
    assert shares(table(job("a", 2.0, gpus=4))) == [4]


def test_who_runs_is_not_stopped_for_one_that_is_hardly_shorter() -> None:
    held = running(job("a", 1000.0, model="one"), 1)
    assert shares(table(held, job("b", 990.0, model="one"), cluster="1x1")) == [1, 0]
    assert shares(table(held, *(job(f"b{i}", 60.0, model="one") for i in range(2)), cluster="1x1"))[0] == 0


def climber(points: dict[int, float], **fields: object) -> Climber:
    steps = Ladder(ScalingCurve(points={"gpu": points}), "gpu", (1, 64), scale_of(8), FREE)
    known = {"row": 0, "ladders": [steps], "left": 1e4, "held_kind": -1, "held_rank": 0, "weight": 1.0, "unit": 1.0}
    return Climber(**{**known, "tie": 0.0, **fields})  # type: ignore[arg-type]


def test_a_step_goes_over_a_dent_in_the_curve() -> None:
    dented = climber({1: 1.0, 2: 1.01, 4: 3.0, 8: 3.1})
    other = climber({1: 1.0, 2: 1.2}, row=1)
    free = [5]
    climb([dented, other], free, horizon_s=600.0, loyalty=1.0)
    assert (dented.count, other.count, free) == (4, 1, [0])


def test_a_step_that_does_not_fit_gives_way_to_a_smaller_one() -> None:
    dented, free = climber({1: 1.0, 2: 1.01, 4: 3.0}), [3]
    climb([dented], free, horizon_s=600.0, loyalty=1.0)
    assert (dented.count, free) == (2, [1])


def test_a_step_that_others_have_made_too_large_gives_way_to_a_smaller_one() -> None:
    dented, other = climber({1: 1.0, 2: 1.01, 4: 3.0}, weight=2.0), climber({1: 1.0, 2: 3.0}, row=1)
    free = [5]  # after its first step the way to four is open; the other's step comes between
    climb([dented, other], free, horizon_s=600.0, loyalty=1.0)
    assert (dented.count, other.count, free) == (2, 2, [1])


def test_a_lift_takes_the_lowest_rank_that_is_fast_enough() -> None:
    points = {1: 1.0, 2: 1.8, 4: 3.0}
    enough, most = climber(points), climber(points)
    free = [7]
    lift(enough, 1.5, free)
    lift(most, 9.0, free)
    assert (enough.count, most.count, free) == (2, 4, [1])


# -- the floor -----------------------------------------------------------------------------------------------


def test_a_job_below_the_floor_comes_before_a_shorter_one() -> None:
    # alone it takes an hour; with two jobs for one device its fair time is two hours
    old, new = job("old", HOUR, model="one"), job("new", 600.0, submit_s=3.0 * HOUR, model="one")
    assert shares(table(old, new, cluster="1x1", now=3.0 * HOUR)) == [1, 0]
    assert shares(table(old, replace(new, submit_s=0.5 * HOUR), cluster="1x1", now=0.5 * HOUR)) == [0, 1]


def test_crowding_is_remembered_over_rounds() -> None:
    crowd = [job(f"j{i}", HOUR, model="one") for i in range(4)]
    snapshot = Snapshot(
        now=0.0,
        cluster=Cluster.parse("1x1"),
        jobs=tuple(JobView(spec=spec, phase=JobPhase.WAITING, waiting_since_s=0.0) for spec in crowd),
    )
    before = replace(snapshot, now=1000.0)
    notes = run_round(before, POLICY, CURVES).notes
    kept = tuple(
        replace(view, level=notes[view.spec.id][0], stamp=notes[view.spec.id][1]) for view in snapshot.jobs[:1]
    )
    alone = Table.from_snapshot(replace(snapshot, now=3000.0, jobs=kept), CURVES)
    found = fairness_of(alone, np.array([0]))
    assert found.crowd == 1.0
    # four jobs for one device in the first 1000 s, one from then on
    assert found.crowd_s[0] == pytest.approx(4 * 1000.0 + 2000.0)
    assert found.rho[0] == pytest.approx((3000 + HOUR) / (HOUR * (6000 + HOUR) / (3000 + HOUR)))


def test_a_round_is_asked_for_when_the_next_job_falls_below_the_floor() -> None:
    rows = table(job("short", HOUR, model="one"), job("long", 2 * HOUR, model="one"), cluster="1x1")
    found = POLICY.allocate(rows)
    assert [int(n) for n in found.workers] == [1, 0]
    # its fair time is 4 h: twice that is reached if it waits for as long
    assert found.wake_s == pytest.approx((POLICY.floor - 1.0) * 4 * HOUR)


def test_no_round_is_asked_for_where_everybody_has_its_share() -> None:
    assert POLICY.allocate(table(job("a", HOUR), job("b", HOUR))).wake_s is None


# -- device types --------------------------------------------------------------------------------------------


def test_the_faster_type_goes_to_the_shorter_job() -> None:
    rows = table(job("long", 9 * HOUR, model="m"), job("short", HOUR), cluster="1x1:A100,1x1:T4")
    found = POLICY.allocate(rows)
    assert found.kind is not None
    assert [rows.types[k] for k in found.kind] == ["T4", "A100"]


def test_a_job_stays_on_the_types_it_allows() -> None:
    rows = table(job("a", HOUR, device_types=("T4",)), cluster="1x4:A100,1x2:T4")
    found = POLICY.allocate(rows)
    assert found.kind is not None
    assert (int(found.workers[0]), rows.types[int(found.kind[0])]) == (2, "T4")


def test_a_job_moves_to_a_faster_type_that_is_free_if_that_pays() -> None:
    def types(done: float, **fields: object) -> tuple[str, int]:
        held = replace(running(job("a", 9000.0, **fields), 2, "T4"), work_done=done)
        rows = table(held, cluster="1x2:A100,1x2:T4")
        found = POLICY.allocate(rows)
        assert found.kind is not None
        return rows.types[int(found.kind[0])], int(found.workers[0])

    assert types(0.0) == ("A100", 2)
    assert types(8990.0) == ("T4", 2)
    assert types(0.0, device_types=("T4",)) == ("T4", 2)


def test_what_a_job_leaves_behind_goes_to_the_next_in_the_same_round() -> None:
    held = running(job("a", 9000.0), 1, "T4")
    rows = table(held, job("b", 90000.0, device_types=("T4",)), cluster="1x2:A100,1x1:T4")
    found = POLICY.allocate(rows)
    assert found.kind is not None
    assert [(rows.types[k], int(n)) for k, n in zip(found.kind, found.workers, strict=True)] == [("A100", 2), ("T4", 1)]


# -- reasons and whole runs ----------------------------------------------------------------------------------


def test_reasons_name_the_fair_time_and_who_goes_first() -> None:
    rows = table(job("long", 9 * HOUR, model="one"), job("short", HOUR, model="one"), cluster="1x1")
    assert POLICY.explain(rows, 0, 0, 1) == "1 device is of most use here; expected to take 1.0 times its fair time"
    assert "1 job with less to do comes first" in POLICY.explain(rows, 0, 1, 0)
    alone = table(job("only", HOUR, model="one"), cluster="1x4")
    assert POLICY.explain(alone, 0, 2, 1).startswith("1 device is of most use here; ")
    assert POLICY.explain(alone, 0, 2, 2).startswith("2 devices are of most use here; ")
    assert POLICY.explain(alone, 0, 1, 0).startswith("expected to take ")
    old = table(job("old", HOUR, model="one"), cluster="1x1", now=9 * HOUR)
    assert "the floor is 2" in POLICY.explain(old, 0, 0, 1)
    strict = table(job("a", HOUR, 2 * HOUR), job("b", HOUR))
    assert "1 device is enough now for its deadline" in POLICY.explain(strict, 0, 0, 1)
    assert "promises" in POLICY.explain(strict, 1, 0, 1)


@pytest.mark.parametrize(
    ("devices", "every", "tight", "seconds", "most"),
    [(1, 300.0, 1.0, 60.0, 600.0), (2, 397.0, 2.0, 9000.0, 36000.0)],
)
def test_a_stream_of_promises_does_not_starve_best_effort(
    devices: int, every: float, tight: float, seconds: float, most: float
) -> None:
    """A day of jobs that fill the cluster. With promises alone the other one waits for their end."""
    loose = JobSpec(id="loose", submit_s=1000.0, gpus=1, duration_s=seconds)
    length = devices * every
    stream = [
        JobSpec(id=f"s{i}", submit_s=at, gpus=1, duration_s=length, deadline_s=at + length * tight + 300.0)
        for i, at in enumerate(every * i for i in range(round(24 * HOUR / every)))
    ]

    def taken(policy: str) -> float:
        found = simulate([*stream, loose], cluster=Cluster.parse(f"1x{devices}"), policy=policy)
        assert found.summary.admitted_missed == 0
        return next(o.jct_s or math.inf for o in found.outcomes if o.job_id == "loose")

    assert taken("elasticflow") > 20 * HOUR
    assert taken("concertina") < most
