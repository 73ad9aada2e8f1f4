"""Sentences with "never" in them, on generated clusters, traces and policies."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase, JobSpec
from concertina.policies.base import Policy, Shares
from concertina.policies.registry import POLICIES, policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.engine import Setting, Simulation
from concertina.simulator.metrics import Result
from concertina.simulator.noise import NodeLost, NodeReturned, Noise
from concertina.simulator.overhead import overhead_named
from concertina.simulator.recorder import Record
from concertina.simulator.run import simulate

FULL = Record(spans=True, load=True, decisions=True)
CLUSTERS = ("1x4", "2x4", "3x8", "5x2", "2x4:A100,3x2:T4")
GREEDY = ("srtf", "las", "tiresias", "tiresias-gittins", "themis", "chronus")
"""Policies that hand out gangs to whoever fits: work-conserving."""
RESIZING = {
    "concertina",
    "easyscale-heter",
    "easyscale-homo",
    "edf",
    "edf-elastic",
    "elastic-backfill",
    "elastic-fifo",
    "elastic-tiresias",
    "elasticflow",
    "greedy",
    "milp",
    "optimus",
}
"""Policies that give jobs other sizes than they ask for."""
MIXING = {"easyscale-heter"}
"""Policies that give a job several device types at once."""
COMMON = settings(max_examples=40, deadline=None)


@st.composite
def traces(draw: st.DrawFn, most: int = 14) -> list[JobSpec]:
    """Jobs of whole seconds, so that sums are exact."""
    jobs = []
    for index in range(draw(st.integers(1, most))):
        submit = draw(st.integers(0, 400))
        seconds = draw(st.integers(1, 500))
        deadline = draw(st.none() | st.integers(submit + 1, submit + 3 * seconds))
        jobs.append(
            JobSpec(
                id=f"j{index}",
                submit_s=submit,
                gpus=draw(st.sampled_from((1, 1, 2, 3, 4, 8))),
                duration_s=seconds,
                deadline_s=deadline,
                user=draw(st.sampled_from("xyz")),
            )
        )
    return jobs


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[JobSpec], str, str, dict[str, object]]:
    """A trace, a cluster, a policy, and how to run it."""
    cluster = draw(st.sampled_from(CLUSTERS))
    how: dict[str, object] = {
        "overhead": draw(st.sampled_from(("instant", "elasticflow", 7.0))),
        "placement": draw(st.sampled_from(("best-fit", "buddy", "roomiest"))),
        "gap_s": draw(st.sampled_from((0.0, 60.0))),
        "noise": Noise(step_time=draw(st.sampled_from((0.0, 0.2))), estimate=draw(st.sampled_from((0.0, 0.5)))),
        "seed": draw(st.integers(0, 3)),
    }
    if draw(st.booleans()):
        lost = draw(st.integers(0, 300))
        how["faults"] = [NodeLost(time_s=lost, node="n0"), NodeReturned(time_s=lost + 50, node="n0")]
    return draw(traces()), cluster, draw(st.sampled_from(sorted(POLICIES))), how


def run(case: tuple[list[JobSpec], str, str, dict[str, object]]) -> Result:
    jobs, cluster, policy, how = case
    return simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, record=FULL, **how)  # type: ignore[arg-type]


def ends(result: Result) -> dict[str, set[JobPhase]]:
    found: dict[str, set[JobPhase]] = defaultdict(set)
    for outcome in result.outcomes:
        found[outcome.job_id].add(outcome.phase)
    return found


@COMMON
@given(runs())
def test_never_more_devices_than_exist_on_any_node(
    case: tuple[list[JobSpec], str, str, dict[str, object]],
) -> None:
    result = run(case)
    slots = {node.id: node.slots for node in result.cluster.nodes}
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for span in result.spans:
        assert sum(count for _, count in span.nodes) == span.workers
        for node, count in span.nodes:
            changes[node] += [(span.start_s, count), (span.end_s, -count)]
    for node, steps in changes.items():
        held = 0
        for _, step in sorted(steps):  # at one moment, what is given back comes first
            held += step
            assert held <= slots[node]
    assert all(point.used <= point.devices for point in result.load)


@COMMON
@given(runs())
def test_never_a_job_on_two_device_types_unless_the_policy_mixes(
    case: tuple[list[JobSpec], str, str, dict[str, object]],
) -> None:
    result = run(case)
    kinds = {node.id: node.device_type for node in result.cluster.nodes}
    for span in result.spans:
        assert {kinds[node] for node, _ in span.nodes} == set(span.device_type.split("+"))
        assert case[2] in MIXING or "+" not in span.device_type


@COMMON
@given(runs())
def test_no_job_is_lost_and_each_ends_once(case: tuple[list[JobSpec], str, str, dict[str, object]]) -> None:
    result = run(case)
    assert sorted(o.job_id for o in result.outcomes) == sorted(job.id for job in case[0])
    for phases in ends(result).values():
        assert phases in ({JobPhase.FINISHED}, {JobPhase.REJECTED})
    closing = [d.job_id for d in result.decisions if d.action in ("finished", "reject")]
    assert sorted(closing) == sorted(job.id for job in case[0])


@COMMON
@given(traces(), st.sampled_from(CLUSTERS), st.sampled_from(sorted(set(POLICIES) - RESIZING)))
def test_work_is_conserved(jobs: list[JobSpec], cluster: str, policy: str) -> None:
    """Without overheads and noise a gang holds its devices for exactly its duration, however it is cut up."""
    result = simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, record=FULL)
    held: dict[str, float] = defaultdict(float)
    for span in result.spans:
        held[span.job_id] += (span.end_s - span.start_s) * span.workers
    for outcome, job in zip(result.outcomes, sorted(jobs, key=lambda j: j.submit_s), strict=True):
        if outcome.phase is JobPhase.FINISHED:
            assert job.duration_s is not None
            assert held[job.id] == pytest.approx(job.gpus * job.duration_s, abs=1e-6)
            assert outcome.device_s == pytest.approx(held[job.id], abs=1e-6)
            lived = (outcome.end_s or 0.0) - job.submit_s
            assert lived == pytest.approx(outcome.queue_s + job.duration_s, abs=1e-6)


@COMMON
@given(runs())
def test_same_seed_same_bytes(case: tuple[list[JobSpec], str, str, dict[str, object]]) -> None:
    assert as_bytes(run(case)) == as_bytes(run(case))


def as_bytes(result: Result) -> bytes:
    """All of a result but how long the deciding took."""
    summary = {
        key: value for key, value in result.summary.as_dict().items() if not key.startswith(("decision_ms", "wall"))
    }
    parts = (summary, result.outcomes, result.spans, result.load, result.decisions)
    return json.dumps(parts, default=_plain).encode()


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


class Watch:
    """A policy that hands the question on and looks at question and answer."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.name, self.paper, self.admission = inner.name, inner.paper, inner.admission
        self.simulation: Simulation | None = None

    def allocate(self, table: Table) -> Shares:
        before = {name: table.column(name).copy() for name in table._columns}
        shares = self.inner.allocate(table)
        for name, column in before.items():
            np.testing.assert_array_equal(column, table.column(name), err_msg=f"{self.name} changed {name}")
        self.check(table, shares)
        return shares

    def check(self, table: Table, shares: Shares) -> None:
        """What to look at."""

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        return self.inner.explain(table, row, before, after)


class NothingIdle(Watch):
    """No free devices beside a job that could use them."""

    def check(self, table: Table, shares: Shares) -> None:
        kinds = np.zeros(len(table), dtype=np.int64) if shares.kind is None else shares.kind
        for kind, capacity in enumerate(table.capacity):
            free = capacity - int(shares.workers[kinds == kind].sum())
            assert free >= 0
            waiting = table.gpus[shares.workers == 0]
            assert not waiting.size or waiting.min() > free, f"{free} devices idle"


@COMMON
@given(traces(), st.sampled_from(CLUSTERS), st.sampled_from(GREEDY))
def test_an_idle_device_never_stands_beside_a_runnable_job(jobs: list[JobSpec], cluster: str, policy: str) -> None:
    simulate(jobs, cluster=Cluster.parse(cluster), policy=NothingIdle(policy_named(policy)), overhead=3)


class SameAsSnapshot(Watch):
    """The table that is kept up to date equals the one built from the snapshot."""

    def check(self, table: Table, shares: Shares) -> None:
        assert self.simulation is not None
        fresh = Table.from_snapshot(self.simulation.cluster.observe(), Curves())
        assert fresh.used == table.used
        assert fresh.capacity == table.capacity
        assert [spec.id for spec in fresh.specs] == [spec.id for spec in table.specs]
        for name in ("gpus", "held", "kind", "allowed", "level", "stamp", "submit", "deadline", "speed"):
            np.testing.assert_array_equal(getattr(fresh, name), getattr(table, name), err_msg=name)
        waits = table.held == 0
        np.testing.assert_allclose(fresh.waiting_left[waits], table.time_left()[waits], atol=1e-6)
        np.testing.assert_allclose(table.waiting_left[waits], table.time_left()[waits], atol=1e-6)
        rows = np.arange(len(table))
        np.testing.assert_allclose(table.time_left_of(rows), table.time_left(), atol=1e-6)
        for name in ("service", "executed", "done", "left", "time_left"):
            np.testing.assert_allclose(getattr(fresh, name)(), getattr(table, name)(), atol=1e-6, err_msg=name)


@COMMON
@given(traces(), st.sampled_from(CLUSTERS), st.sampled_from(sorted(POLICIES)), st.sampled_from((0.0, 40.0)))
def test_the_kept_table_equals_the_snapshot_by_columns(
    jobs: list[JobSpec], cluster: str, policy: str, gap: float
) -> None:
    watch = SameAsSnapshot(policy_named(policy))
    setting = Setting(
        cluster=Cluster.parse(cluster),
        policy=watch,
        curves=Curves(),
        overhead=overhead_named("instant"),
        noise=Noise(),
        gap_s=gap,
        record=Record(),
    )
    simulation = watch.simulation = Simulation(jobs, setting)
    simulation.run(lambda: 0.0, "trace")


@COMMON
@given(traces(most=8), st.sampled_from(("1x4", "2x4", "3x8")))
def test_backfill_never_lets_a_job_wait_longer_than_its_first_reservation(jobs: list[JobSpec], cluster: str) -> None:
    """With right estimates the head of the queue starts no later than promised when it became the head."""
    promised: dict[str, float] = {}

    class Promise(Watch):
        def check(self, table: Table, shares: Shares) -> None:
            waiting = [r for r in range(len(table)) if table.held[r] == 0 and r not in shares.starts]
            if not waiting:
                return
            head = waiting[0]
            ends_at = sorted(
                (table.now + float(table.time_left()[r]), int(table.gpus[r]))
                for r in range(len(table))
                if table.held[r] or r in shares.starts
            )
            free = table.capacity[0] - sum(gpus for _, gpus in ends_at)
            for end, gpus in ends_at:
                free += gpus
                if free >= table.gpus[head]:
                    promised.setdefault(table.specs[head].id, end)
                    break

    result = simulate(jobs, cluster=Cluster.parse(cluster), policy=Promise(policy_named("backfill")))
    for outcome in result.outcomes:
        if outcome.job_id in promised:
            assert outcome.start_s is not None
            assert outcome.start_s <= promised[outcome.job_id] + 1e-6
