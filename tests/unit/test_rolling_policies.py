"""`milp` and `greedy` on tables small enough to see why."""

from __future__ import annotations

import numpy as np
import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.base import Policy
from concertina.policies.greedy import GreedyPolicy
from concertina.policies.milp import MilpPolicy
from concertina.policies.rolling import is_moment, ladder
from concertina.policies.scaling_curve import Curves, ThroughputRow, ThroughputTable
from concertina.policies.table import Table
from concertina.simulator.run import simulate

FIGURES = (("m", 1, 1.0), ("m", 2, 1.8), ("m", 4, 3.0), ("m", 8, 2.9), ("odd", 3, 1.0))
DENTED = ThroughputTable(
    rows=tuple(
        ThroughputRow(model=model, batch_size=8, device_type="gpu", workers=n, iterations_per_s=speed)
        for model, n, speed in FIGURES
    )
)
BOTH = pytest.mark.parametrize("policy", [GreedyPolicy(), MilpPolicy()], ids=lambda policy: policy.name)


def job(name: str, seconds: float = 36_000.0, **fields: object) -> JobSpec:
    return JobSpec(**{"id": name, "submit_s": 0.0, "gpus": 1, "duration_s": seconds, **fields})  # type: ignore[arg-type]


def measured(name: str, model: str = "m", **fields: object) -> JobSpec:
    return job(name, model=model, batch_size=8, work=36_000.0, **fields)


def waiting(spec: JobSpec) -> JobView:
    return JobView(spec=spec, phase=JobPhase.WAITING, waiting_since_s=0.0)


def running(spec: JobSpec, workers: int, minutes: float = 1.0, stamp: float = 0.0, kind: str = "gpu") -> JobView:
    return JobView(
        spec=spec,
        phase=JobPhase.RUNNING,
        workers=((kind, workers),),
        executed_s=60 * minutes,
        stamp=stamp,
    )


def table(*views: JobView, cluster: str, now: float = 300.0) -> Table:
    snapshot = Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=views)
    return Table.from_snapshot(snapshot, Curves(DENTED))


def workers(policy: Policy, rows: Table) -> list[int]:
    return policy.allocate(rows).workers.tolist()


def test_greedy_gives_idle_nodes_to_the_job_that_trained_shortest() -> None:
    """The paper's figure 4, above."""
    rows = table(*(running(job(f"{i}"), 2, minutes) for i, minutes in enumerate((15, 12, 5, 1))), cluster="1x10")
    assert workers(GreedyPolicy(), rows) == [2, 2, 2, 4]


def test_greedy_halves_the_job_that_trained_longest_for_the_head_of_the_queue() -> None:
    """The paper's figure 4, below."""
    held = ((4, 15), (4, 12), (2, 5))
    views = [running(job(f"{i}"), count, minutes) for i, (count, minutes) in enumerate(held)]
    rows = table(*views, waiting(job("head")), cluster="1x10")
    assert workers(GreedyPolicy(), rows) == [2, 4, 2, 2]


def test_greedy_halves_one_job_at_a_time_unless_told_to_go_on() -> None:
    views = (running(job("a"), 4, 9), running(job("b"), 4, 5), *(waiting(job(name)) for name in "cde"))
    rows = table(*views, cluster="1x8")
    assert workers(GreedyPolicy(), rows) == [2, 4, 2, 0, 0]
    assert workers(GreedyPolicy(halvings=None), rows) == [1, 2, 2, 1, 2]
    full = table(running(job("a"), 1), running(job("b"), 1), waiting(job("c")), cluster="1x2")
    assert workers(GreedyPolicy(halvings=None), full) == [1, 1, 0]


@BOTH
def test_between_moments_those_that_run_stay_and_the_queue_gets_what_is_idle(policy: Policy) -> None:
    views = (running(job("a"), 8, stamp=300.0), waiting(job("b")), waiting(job("c")), waiting(job("d")))
    rows = table(*views, cluster="1x11", now=301.0)
    found = policy.allocate(rows)
    assert found.workers.tolist() == [8, 2, 1, 0]
    assert found.stamp is None
    assert found.wake_s == 600.0


@BOTH
def test_a_moment_comes_once_a_period_however_rounds_are_spaced(policy: Policy) -> None:
    rows = table(running(job("a"), 1, stamp=290.0), cluster="1x8", now=640.0)
    found = policy.allocate(rows)
    assert found.workers.tolist() == [8]
    assert found.stamp is not None
    assert found.stamp.tolist() == [640.0]
    assert found.wake_s == 900.0
    rows.column("stamp")[:] = found.stamp
    rows.now = 899.0
    assert not is_moment(rows, 300.0)
    rows.now = 900.0
    assert is_moment(rows, 300.0)


@BOTH
def test_nobody_is_woken_where_nobody_runs(policy: Policy) -> None:
    """Else a simulation in which the last nodes are lost would never end."""
    assert policy.allocate(table(cluster="1x4")).wake_s is None
    rows = table(waiting(job("a")), cluster="1x4")
    assert policy.allocate(rows).wake_s == 600.0
    rows.capacity[0] = 0
    found = policy.allocate(rows)
    assert found.workers.tolist() == [0]
    assert found.wake_s is None


def test_milp_lets_nobody_wait_where_there_are_nodes_for_all() -> None:
    rows = table(running(job("long"), 4, 60), *(waiting(job(name, 600.0)) for name in "abc"), cluster="1x4")
    assert workers(MilpPolicy(), rows) == [1, 1, 1, 1]


def test_milp_serves_the_shortest_where_there_are_too_few_nodes() -> None:
    views = (running(job("long"), 2), waiting(job("short", 650.0)), waiting(job("shorter", 600.0)))
    assert workers(MilpPolicy(), table(*views, cluster="1x2")) == [0, 1, 1]


def test_milp_follows_the_measured_curve_of_a_job() -> None:
    rows = table(waiting(measured("dented")), cluster="1x8")
    assert workers(MilpPolicy(), rows) == [4]


def test_milp_plans_each_device_type_for_itself_and_jobs_stay_on_theirs() -> None:
    views = (running(job("a"), 1, kind="B"), waiting(job("b")), waiting(job("c", device_types=("B",))))
    rows = table(*views, cluster="1x4:A,1x4:B")
    found = MilpPolicy().allocate(rows)
    assert found.kind is not None
    assert found.kind.tolist() == [1, 0, 1]
    assert found.workers.tolist() == [2, 4, 2]


def test_sizes_are_powers_of_two_within_what_the_job_allows_and_knows() -> None:
    views = (
        job("any"), job("asked", gpus=64), measured("few", max_workers=3), measured("many", min_workers=3),
        measured("odd", "odd", gpus=3),
    )  # fmt: skip
    rows = table(*map(waiting, views), cluster="1x48")
    sizes = [ladder(rows, row, 0, 16)[0] for row in range(len(rows))]
    assert sizes == [(1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2), (4, 8), (3,)]
    assert ladder(rows, 3, 0, 16)[1] == (3.0, 2.9)


@BOTH
def test_lost_nodes_are_taken_from_the_last_submitted(policy: Policy) -> None:
    rows = table(running(job("a"), 2, stamp=300.0), running(job("b"), 2, stamp=300.0), cluster="1x4", now=310.0)
    rows.capacity[0] = 3
    assert workers(policy, rows) == [2, 1]


@BOTH
def test_a_job_grows_when_another_ends_and_both_policies_finish_everything(policy: Policy) -> None:
    jobs = [job("short", 400.0), job("long", 4_000.0, submit_s=10.0)]
    result = simulate(jobs, cluster=Cluster.parse("1x2"), policy=policy)
    assert all(outcome.phase is JobPhase.FINISHED for outcome in result.outcomes)
    ends = [outcome.end_s for outcome in result.outcomes]
    # one has both devices for 300 s (480 s of work); the other has both from the next moment on
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0] < 400.0
    assert ends[1] == pytest.approx(300.0 + 4_000.0 / 1.6, rel=0.1)
    assert np.sum([outcome.queue_s for outcome in result.outcomes]) < 300.0
