"""Our own policy on generated clusters and jobs: promises stay possible, nobody starves, nothing is given twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Admitted
from concertina.policies.admission import rule
from concertina.policies.concertina import ConcertinaPolicy
from concertina.policies.promise import Terms, claims_of, look_ahead
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.run import simulate

COMMON = settings(max_examples=30, deadline=None)
CLUSTERS = ("1x1", "1x4", "2x4", "3x8", "2x4:A100,3x2:T4")


@st.composite
def traces(draw: st.DrawFn, most: int = 12, loose: bool = True, strict: bool = True) -> list[JobSpec]:
    """Jobs of minutes to hours in order of submission, with strict deadlines, soft ones or none."""
    found, submit = [], 0
    wishes = [*(["none", "soft"] if loose else []), *(["strict"] * 2 if strict else [])]
    for index in range(draw(st.integers(1, most))):
        submit += draw(st.integers(0, 1800))
        seconds = draw(st.integers(60, 9000))
        wish = draw(st.sampled_from(wishes))
        wait = seconds * draw(st.sampled_from((0.4, 0.7, 1.0, 1.5, 3.0)))
        found.append(
            JobSpec(
                id=f"j{index}",
                submit_s=submit,
                gpus=draw(st.sampled_from((1, 1, 2, 4, 8))),
                duration_s=seconds,
                deadline_s=None if wish == "none" else submit + wait,
                soft=wish == "soft",
                max_workers=draw(st.none() | st.sampled_from((2, 4))),
            )
        )
    return found


SHORT_ONES = [
    JobSpec(id="long", submit_s=0, gpus=1, duration_s=3000),
    *(JobSpec(id=f"s{i}", submit_s=600 * i, gpus=1, duration_s=590) for i in range(60)),
]
"""A job that is never the shortest while the others come."""


def table(cluster: str, jobs: list[JobView], now: float = 0.0) -> Table:
    return Table.from_snapshot(Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=tuple(jobs)), Curves())


@COMMON
@given(traces(), st.sampled_from(CLUSTERS))
def test_an_admitted_set_stays_feasible_after_any_admission(jobs: list[JobSpec], cluster: str) -> None:
    admit = rule(policy_named("concertina").admission)
    taken: list[JobView] = []
    for job in jobs:
        wait = None if job.deadline_s is None else job.deadline_s - job.submit_s
        now = replace(job, submit_s=0.0, deadline_s=wait)
        rows = table(cluster, taken)
        if isinstance(admit(now, Curves().of(now)[0], list(rows.capacity), rows), Admitted):
            taken.append(JobView(spec=now, phase=JobPhase.WAITING, waiting_since_s=0.0))
            outlook = look_ahead(claims_of(table(cluster, taken), Terms()), Terms())
            assert not outlook.late


@COMMON
@given(traces(most=10), st.sampled_from(CLUSTERS), st.sampled_from(("instant", "elasticflow", 9.0)))
def test_an_admitted_job_is_never_late_whoever_comes_without_a_promise(
    jobs: list[JobSpec], cluster: str, overhead: str | float
) -> None:
    result = simulate(jobs, cluster=Cluster.parse(cluster), policy="concertina", overhead=overhead)
    assert result.summary.admitted_missed == 0


@COMMON
@given(traces(loose=False), st.sampled_from(CLUSTERS), st.sampled_from(("instant", "elasticflow")))
def test_with_deadlines_alone_nobody_fares_otherwise_than_under_elasticflow(
    jobs: list[JobSpec], cluster: str, overhead: str
) -> None:
    ours, theirs = (
        simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, overhead=overhead)
        for policy in ("concertina", "elasticflow")
    )
    assert ours.outcomes == theirs.outcomes


@COMMON
@given(traces(strict=False), st.sampled_from(("1x1", "1x4", "2x4", "3x8")))
@example(SHORT_ONES, "1x1")
def test_no_job_without_a_promise_takes_much_longer_than_its_fair_share_would(
    jobs: list[JobSpec], cluster: str
) -> None:
    loose = [replace(job, deadline_s=None, soft=False, max_workers=None) for job in jobs]
    result = simulate(loose, cluster=Cluster.parse(cluster), policy="concertina")
    for outcome in result.outcomes:
        if outcome.phase is not JobPhase.REJECTED:
            assert outcome.phase is JobPhase.FINISHED
            assert outcome.fair_share <= 2.5


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(390, 1800), st.integers(60, 9000), st.sampled_from((1.0, 2.0)))
@example(2, 397, 9000, 2.0)
def test_no_job_starves_beside_a_stream_of_promises(devices: int, every: int, seconds: int, tight: float) -> None:
    """Jobs with deadlines keep coming for a day, enough to fill the cluster; one without any comes as well."""
    stream = [
        JobSpec(
            id=f"s{i}",
            submit_s=i * every,
            gpus=1,
            duration_s=devices * every,
            deadline_s=i * every + devices * every * tight + 300,
        )
        for i in range(86400 // every)
    ]
    loose = JobSpec(id="loose", submit_s=1000, gpus=1, duration_s=seconds)
    result = simulate([*stream, loose], cluster=Cluster.parse(f"1x{devices}"), policy="concertina")
    (outcome,) = (o for o in result.outcomes if o.job_id == "loose")
    assert outcome.phase is JobPhase.FINISHED
    assert outcome.fair_share <= 4.0
    assert result.summary.admitted_missed == 0


@COMMON
@given(traces(), st.sampled_from(CLUSTERS), st.integers(0, 20_000))
def test_never_more_devices_than_exist_and_only_sizes_that_pack(jobs: list[JobSpec], cluster: str, now: int) -> None:
    views = [JobView(spec=job, phase=JobPhase.WAITING, waiting_since_s=0.0) for job in jobs if job.submit_s <= now]
    rows = table(cluster, views, now=now)
    found = ConcertinaPolicy().allocate(rows)
    assert found.kind is not None
    for kind, capacity in enumerate(rows.capacity):
        assert found.workers[found.kind == kind].sum() <= capacity
    assert all(count == 0 or count & (count - 1) == 0 for count in found.workers.tolist())


@COMMON
@given(traces(strict=False), st.sampled_from(("1x4", "2x4", "3x8")))
def test_no_device_is_idle_while_a_job_waits(jobs: list[JobSpec], cluster: str) -> None:
    views = [JobView(spec=replace(job, submit_s=0.0), phase=JobPhase.WAITING, waiting_since_s=0.0) for job in jobs]
    rows = table(cluster, views)
    found = ConcertinaPolicy().allocate(rows)
    assert found.workers.sum() == sum(rows.capacity) or np.all(found.workers > 0)
