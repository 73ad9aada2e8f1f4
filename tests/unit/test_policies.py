"""Each policy on a table small enough to see why."""

from __future__ import annotations

import numpy as np
import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.admission import fits, fits_elastic, rule
from concertina.policies.base import Policy
from concertina.policies.chronus import ChronusPolicy, jobs_in_time
from concertina.policies.edf import EdfPolicy
from concertina.policies.gandiva import GandivaPolicy
from concertina.policies.las import LasPolicy
from concertina.policies.optimus import OptimusPolicy
from concertina.policies.registry import POLICIES
from concertina.policies.round import observed
from concertina.policies.scaling_curve import Curves, ThroughputRow, ThroughputTable
from concertina.policies.srtf import SrtfPolicy
from concertina.policies.table import Table
from concertina.policies.themis import ThemisPolicy, finish_time_fairness
from concertina.policies.tiresias import TiresiasPolicy, gittins_index, log_normal_samples, queue_of
from concertina.policies.yarn_cs import YarnCsPolicy

CURVE = ThroughputTable(
    rows=tuple(
        ThroughputRow(model="m", batch_size=8, device_type="gpu", workers=n, iterations_per_s=speed)
        for n, speed in ((1, 1.0), (2, 1.8), (4, 3.0), (8, 2.9))
    )
)


def job(name: str, gpus: int = 1, seconds: float = 100.0, **fields: object) -> JobSpec:
    return JobSpec(**{"id": name, "submit_s": 0.0, "gpus": gpus, "duration_s": seconds, **fields})  # type: ignore[arg-type]


def elastic(name: str, work: float = 100.0, **fields: object) -> JobSpec:
    return job(name, work=work, model="m", batch_size=8, **fields)


def table(*jobs: JobSpec | JobView, cluster: str = "1x4", now: float = 10.0) -> Table:
    views = tuple(
        entry if isinstance(entry, JobView) else JobView(spec=entry, phase=JobPhase.WAITING, waiting_since_s=0.0)
        for entry in jobs
    )
    snapshot = Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=views)
    return Table.from_snapshot(snapshot, Curves(CURVE))


def running(spec: JobSpec, kind: str = "gpu", **fields: object) -> JobView:
    held = ((kind, spec.gpus),)
    base = {"spec": spec, "phase": JobPhase.RUNNING, "workers": held, "placement": (("n0", spec.gpus),)}
    return JobView(**{**base, **fields})  # type: ignore[arg-type]


def shares(policy: Policy, rows: Table) -> list[int]:
    found = policy.allocate(rows)
    workers = found.workers.copy()
    for row in found.starts:
        workers[row] = rows.gpus[row]
    return workers.tolist()


def test_srtf_prefers_the_shortest_and_in_two_dimensions_the_smallest() -> None:
    rows = table(job("long", 4, 100), job("short", 4, 60), job("thin", 1, 70))
    assert shares(SrtfPolicy(), rows) == [0, 4, 0]
    assert shares(SrtfPolicy(two_dimensional=True), rows) == [0, 0, 1]


def test_las_prefers_whoever_had_least_and_wakes_while_somebody_waits() -> None:
    had = running(job("had", 2), service_s=50.0)
    rows = table(had, job("none", 4))
    found = LasPolicy(quantum_s=30).allocate(rows)
    assert found.workers.tolist() == [0, 4]
    assert found.wake_s == 40.0
    assert LasPolicy().allocate(table(job("alone"))).wake_s is None


def test_tiresias_ranks_by_queue_then_place_and_wakes_at_the_next_limit() -> None:
    old = running(job("old", 4), service_s=3250.0, level=1, stamp=1.0)
    assert shares(TiresiasPolicy(), table(old, job("new", 1))) == [0, 1]
    young = running(job("young", 4), service_s=50.0, stamp=1.0)
    found = TiresiasPolicy().allocate(table(young, job("new", 1)))
    assert found.workers.tolist() == [4, 0]
    assert found.wake_s == 10.0 + 3200.0 / 4


def test_tiresias_puts_a_job_that_just_sank_behind_those_already_there() -> None:
    sinks = running(job("sinks", 4), service_s=3250.0, level=0, stamp=1.0)
    there = JobView(
        spec=job("there", 4),
        phase=JobPhase.WAITING,
        service_s=4000.0,
        level=1,
        stamp=2.0,
        waiting_since_s=0.0,
    )
    assert shares(TiresiasPolicy(), table(sinks, there)) == [0, 4]


def test_queues_follow_the_limits() -> None:
    assert queue_of(np.asarray([0.0, 99.0, 100.0, 250.0]), (100.0, 200.0)).tolist() == [0, 0, 1, 2]


def test_the_gittins_index_falls_and_rises_with_the_chance_to_end_soon() -> None:
    samples = (10.0, 10.0, 10.0, 1000.0, 1000.0)
    fresh, survivor, nearly = gittins_index(np.asarray([0.0, 10.0, 995.0]), samples, 50.0)
    assert fresh == pytest.approx((3 / 5) / ((3 * 10 + 2 * 50) / 5))
    assert survivor == 0.0
    assert nearly == 0.0  # the table has one entry for all that outlived 10
    ordered = TiresiasPolicy(samples=samples, delta=50.0)
    outlived = running(job("outlived", 4), service_s=20.0)
    assert shares(ordered, table(outlived, job("fresh", 4))) == [0, 4]


def test_log_normal_samples_rise_around_the_median() -> None:
    samples = log_normal_samples(100.0, 1.0, 101)
    assert list(samples) == sorted(samples)
    assert samples[50] == pytest.approx(100.0)


def test_themis_serves_the_worst_treated_first() -> None:
    late = job("late", 4, 50.0)
    rows = table(job("fresh", 4, 50.0, submit_s=9.0), late, now=100.0)
    rho = finish_time_fairness(rows)
    assert rho[1] > rho[0]
    assert shares(ThemisPolicy(), rows) == [0, 4]


def test_chronus_gives_the_largest_job_up_so_that_most_are_in_time() -> None:
    rows = table(
        job("huge", 4, 90.0, deadline_s=110.0),
        job("a", 4, 40.0, deadline_s=111.0),
        job("b", 4, 40.0, deadline_s=112.0),
        job("hopeless", 1, 500.0, deadline_s=50.0),
        job("best effort", 1, 5.0),
    )
    assert jobs_in_time(rows).tolist() == [False, True, True, False, False]
    assert shares(ChronusPolicy(), rows) == [0, 4, 0, 0, 0]


def test_edf_takes_what_speeds_it_up_and_no_more() -> None:
    rows = table(elastic("late", deadline_s=99.0), elastic("soon", deadline_s=50.0), cluster="1x8")
    assert shares(EdfPolicy(), rows) == [4, 4]
    assert shares(EdfPolicy(largest=True), rows) == [0, 8]


def test_edf_keeps_within_what_the_job_allows() -> None:
    rows = table(elastic("a", deadline_s=50.0, max_workers=2), elastic("b", min_workers=4), cluster="1x4")
    assert shares(EdfPolicy(), rows) == [2, 0]


def test_optimus_gives_devices_where_they_save_most_time() -> None:
    rows = table(elastic("long", 1000.0), elastic("short", 10.0), cluster="1x5")
    assert shares(OptimusPolicy(), rows) == [4, 1]
    assert shares(OptimusPolicy(), table(elastic("a"), elastic("b"), cluster="1x1")) == [1, 0]


def test_optimus_stops_where_more_devices_bring_nothing() -> None:
    assert shares(OptimusPolicy(), table(elastic("a"), cluster="1x8")) == [4]


def test_yarn_waits_for_a_compact_place() -> None:
    snapshot = Snapshot(
        now=1.0,
        cluster=Cluster.parse("2x4"),
        jobs=(
            running(job("a", 2), placement=(("n0", 2),)),
            running(job("b", 2), placement=(("n1", 2),)),
            JobView(spec=job("c", 4), phase=JobPhase.WAITING),
        ),
    )
    rows = Table.from_snapshot(snapshot, Curves())
    assert shares(POLICIES["fifo"], rows) == [2, 2, 4]
    rows.rooms = observed(snapshot, migrate=False)[0]
    assert shares(YarnCsPolicy(), rows) == [2, 2, 0]


def test_gandiva_lets_jobs_of_one_size_take_turns() -> None:
    policy = GandivaPolicy()
    rows = table(job("a", 4), job("b", 4), now=10.0)
    found = policy.allocate(rows)
    assert found.workers.tolist() == [4, 0]
    assert found.wake_s == 60.0
    rows.now = 60.0
    assert found.level is not None
    assert found.stamp is not None
    rows.column("level")[:], rows.column("stamp")[:] = found.level, found.stamp
    assert policy.allocate(rows).workers.tolist() == [0, 4]


def test_gandiva_opens_nodes_for_a_size_before_it_slices_time() -> None:
    rows = table(job("a", 4), job("b", 4), cluster="2x4")
    found = GandivaPolicy().allocate(rows)
    assert found.workers.tolist() == [4, 4]
    assert found.wake_s is None


def test_on_several_types_a_gang_takes_the_fastest_with_room() -> None:
    rows = ThroughputTable(
        rows=tuple(
            ThroughputRow(model="m", batch_size=8, device_type=kind, workers=2, iterations_per_s=speed)
            for kind, speed in (("T4", 1.0), ("A100", 4.0))
        )
    )
    jobs = tuple(JobView(spec=elastic(name, gpus=2), phase=JobPhase.WAITING, waiting_since_s=0.0) for name in "abc")
    snapshot = Snapshot(now=1.0, cluster=Cluster.parse("1x2:T4,1x2:A100"), jobs=jobs)
    found = SrtfPolicy().allocate(Table.from_snapshot(snapshot, Curves(rows)))
    assert found.kind is not None
    assert found.kind.tolist() == [1, 0, -1]


def test_a_job_runs_only_on_the_types_it_allows() -> None:
    rows = table(job("a", 2, device_types=("B",)), cluster="1x4:A,1x4:B")
    found = SrtfPolicy().allocate(rows)
    assert found.kind is not None
    assert found.kind.tolist() == [1]
    assert "there are gpu" in fits(job("b", device_types=("B",)), Curves().of(job("b"))[0], [4], table()).reason


def test_admission_refuses_a_size_whose_speed_is_not_known() -> None:
    spec = job("a", 16, work=10.0, model="m", batch_size=8, duration_s=None)
    curve = Curves(CURVE).of(spec)[0]
    assert "not known" in fits(spec, curve, [32], table(cluster="4x8")).reason
    assert "it can run" in fits_elastic(spec, curve, [32], table(cluster="4x8")).reason
    few = job("b", 1, work=10.0, model="m", batch_size=8, duration_s=None, min_workers=16)
    assert "at least 16" in fits_elastic(few, curve, [32], table(cluster="4x8")).reason


def test_every_policy_names_a_rule_that_exists() -> None:
    assert all(rule(policy.admission) for policy in POLICIES.values())


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_explains_growing_shrinking_and_waiting(name: str) -> None:
    rows = table(running(job("a", 2)), job("b", 4, deadline_s=500.0))
    told = {POLICIES[name].explain(rows, 1, before, after) for before, after in ((0, 4), (4, 0), (0, 0))}
    assert all(sentence and "\n" not in sentence for sentence in told)
