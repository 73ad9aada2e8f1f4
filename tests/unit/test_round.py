"""One round on a snapshot: admit, allocate, place, plan; and nothing left to do on a settled cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.errors import UnknownNameError
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Launch, Plan, Rejected, Resize, Stop
from concertina.policies.edf import EdfPolicy
from concertina.policies.registry import POLICIES, policy_named
from concertina.policies.round import run_round
from concertina.policies.scaling_curve import Curves


def view(name: str, gpus: int, *, submit: float = 0.0, **fields: object) -> JobView:
    spec = JobSpec(id=name, submit_s=submit, gpus=gpus, duration_s=100.0)
    return JobView(**{"spec": spec, "phase": JobPhase.SUBMITTED, "waiting_since_s": submit, **fields})  # type: ignore[arg-type]


def carry_out(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """What the cluster looks like once the actions are done, one after the other."""
    refused = {answer.job_id for answer in plan.answers if isinstance(answer, Rejected)}
    placed = {view.spec.id: view.placement for view in snapshot.jobs}
    for action in plan.actions:
        placed[action.job_id] = () if isinstance(action, Stop) else action.nodes
    assert {name: nodes for name, nodes in placed.items() if nodes} == plan.placement.nodes
    jobs = []
    for old in snapshot.jobs:
        name = old.spec.id
        if name not in refused:
            level, stamp = plan.notes[name]
            phase = JobPhase.RUNNING if placed[name] else JobPhase.WAITING
            workers = plan.allocation.workers.get(name, ())
            jobs.append(replace(old, phase=phase, placement=placed[name], workers=workers, level=level, stamp=stamp))
    return replace(snapshot, jobs=tuple(jobs))


def test_fifo_launches_what_fits_and_refuses_what_never_will() -> None:
    snapshot = Snapshot(
        now=1.0, cluster=Cluster.parse("2x4"), jobs=(view("a", 6), view("b", 16), view("c", 2), view("d", 1))
    )
    plan = run_round(snapshot, policy_named("fifo"), Curves())
    assert [answer.job_id for answer in plan.answers if isinstance(answer, Rejected)] == ["b"]
    assert plan.answers[1].reason == "asks for 16 devices of one type; the cluster has 8"
    assert [(type(a), a.job_id) for a in plan.actions] == [(Launch, "a"), (Launch, "c")]
    assert all(action.reason for action in plan.actions)


def test_what_gives_devices_back_stands_before_what_takes_them() -> None:
    running = view("late", 4, phase=JobPhase.RUNNING, workers=(("gpu", 4),), placement=(("n0", 4),), service_s=9000.0)
    running = replace(running, level=2, stamp=1.0)
    snapshot = Snapshot(now=1.0, cluster=Cluster.parse("1x4"), jobs=(running, view("new", 4)))
    plan = run_round(snapshot, policy_named("tiresias"), Curves())
    assert [type(action) for action in plan.actions] == [Stop, Launch]
    assert "queue 2" in plan.actions[0].reason


def test_a_plan_hands_the_policys_notes_on() -> None:
    old = view("old", 4, phase=JobPhase.WAITING, service_s=4000.0, level=0, stamp=2.0)
    snapshot = Snapshot(now=1.0, cluster=Cluster.parse("1x4"), jobs=(old, view("new", 4)))
    assert run_round(snapshot, policy_named("tiresias"), Curves()).notes == {"old": (1, 2.0), "new": (0, 1.0)}
    assert run_round(snapshot, policy_named("fifo"), Curves()).notes == {"old": (0, 2.0), "new": (0, 0.0)}


def test_an_elastic_policy_resizes_a_running_job() -> None:
    running = view("a", 1, phase=JobPhase.RUNNING, workers=(("gpu", 1),), placement=(("n0", 1),))
    snapshot = Snapshot(now=1.0, cluster=Cluster.parse("1x4"), jobs=(running,))
    plan = run_round(snapshot, EdfPolicy(), Curves())
    (action,) = plan.actions
    assert isinstance(action, Resize)
    assert (action.before, action.nodes) == ((("n0", 1),), (("n0", 4),))


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("cluster", ["2x4", "1x4:A,1x4:B"])
def test_a_settled_cluster_needs_no_plan(name: str, cluster: str) -> None:
    jobs = tuple(view(f"j{i}", gpus, submit=float(i)) for i, gpus in enumerate((2, 4, 1, 2, 4)))
    snapshot = Snapshot(now=5.5, cluster=Cluster.parse(cluster), jobs=jobs)
    policy = policy_named(name)
    first = run_round(snapshot, policy, Curves())
    assert first.actions
    assert run_round(carry_out(snapshot, first), policy, Curves()).actions == ()


def test_a_policy_nobody_knows_is_refused_with_the_list() -> None:
    with pytest.raises(UnknownNameError, match="backfill") as caught:
        policy_named("best")
    assert caught.value.seen == "best"


def test_every_policy_names_its_source() -> None:
    assert all(policy.paper and policy.name == name for name, policy in POLICIES.items())
