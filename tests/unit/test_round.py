"""One round on a snapshot: admit, allocate, place, plan; and nothing left to do on a settled cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.errors import UnknownNameError
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.core.plan import Launch, Move, Plan, Rejected, Resize, Stop
from concertina.policies.edf import EdfPolicy
from concertina.policies.registry import POLICIES, policy_named
from concertina.policies.round import run_round, surviving
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


def on(nodes: dict[str, int], name: str = "a", gpus: int = 4, **fields: object) -> JobView:
    """A job that runs on these nodes of one type."""
    held = {"workers": (("gpu", sum(nodes.values())),), "placement": tuple(nodes.items()), "waiting_since_s": None}
    return view(name, gpus, phase=JobPhase.RUNNING, **{**held, **fields})


def test_a_job_goes_on_with_what_is_left_when_one_of_its_nodes_is_lost() -> None:
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("2x2"), jobs=(on({"n0": 2, "n1": 2}),), down=frozenset({"n1"}))
    plan = run_round(snapshot, policy_named("elasticflow"), Curves())
    (action,) = plan.actions
    assert isinstance(action, Resize)
    assert (action.before, action.nodes) == ((("n0", 2), ("n1", 2)), (("n0", 2),))
    assert action.reason == "node n1 is down; it goes on with the devices it has left"


def test_a_job_of_a_policy_that_gives_all_or_nothing_waits_when_one_of_its_nodes_is_lost() -> None:
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("2x2"), jobs=(on({"n0": 2, "n1": 2}),), down=frozenset({"n1"}))
    plan = run_round(snapshot, policy_named("fifo"), Curves())
    (action,) = plan.actions
    assert isinstance(action, Stop)
    assert action.before == (("n0", 2), ("n1", 2))
    assert action.reason == "node n1 is down; it waits for other devices"
    assert not plan.placement.nodes


def test_a_job_that_needs_more_workers_than_are_left_waits() -> None:
    job = on({"n0": 2, "n1": 2})
    job = replace(job, spec=replace(job.spec, min_workers=3))
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("2x2"), jobs=(job,), down=frozenset({"n1"}))
    policy = policy_named("concertina")
    (left,) = surviving(snapshot, policy, Curves()).jobs
    assert (left.phase, left.workers, left.placement, left.waiting_since_s) == (JobPhase.WAITING, (), (), 9.0)
    (action,) = run_round(snapshot, policy, Curves()).actions
    assert isinstance(action, Stop)


def test_a_job_leaves_a_drained_node_for_one_that_is_free() -> None:
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("2x4"), jobs=(on({"n0": 4}),), down=frozenset({"n0"}))
    (action,) = run_round(snapshot, policy_named("fifo"), Curves()).actions
    assert isinstance(action, Resize)
    assert (action.before, action.nodes) == ((("n0", 4),), (("n1", 4),))
    assert action.reason.startswith("node n0 is down; ")


def test_a_node_that_is_gone_from_the_cluster_is_lost_like_one_that_is_down() -> None:
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("1x4"), jobs=(on({"n0": 2, "gone": 2}),))
    plan = run_round(snapshot, policy_named("elasticflow"), Curves())
    assert plan.actions[0].reason.startswith("node gone is down; ")
    assert plan.placement.nodes == {"a": (("n0", 4),)}


def test_who_moves_aside_after_a_loss_is_first_said_to_have_lost() -> None:
    jobs = (on({"n0": 1, "n2": 1}, "a", 1), on({"n1": 1}, "b", 1), view("c", 2))
    jobs = tuple(replace(job, spec=replace(job.spec, max_workers=job.spec.gpus)) for job in jobs)
    snapshot = Snapshot(now=9.0, cluster=Cluster.parse("3x2"), jobs=jobs, down=frozenset({"n2"}))
    plan = run_round(snapshot, policy_named("elasticflow"), Curves(), migrate=True)
    assert [(type(action), action.job_id) for action in plan.actions] == [(Resize, "a"), (Move, "a"), (Launch, "c")]
    carry_out(snapshot, plan)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("cluster", ["4x4", "2x4:A,2x4:B"])
@pytest.mark.parametrize("lost", [{"n1"}, {"n0", "n2"}, {"n0", "n1", "n2", "n3"}])
def test_no_job_stays_on_a_node_that_is_down(name: str, cluster: str, lost: set[str]) -> None:
    jobs = tuple(view(f"j{i}", gpus, submit=float(i)) for i, gpus in enumerate((2, 8, 1, 2, 3, 4)))
    snapshot = Snapshot(now=5.5, cluster=Cluster.parse(cluster), jobs=jobs)
    policy = policy_named(name)
    before = carry_out(snapshot, run_round(snapshot, policy, Curves()))
    before = replace(before, now=6.0, down=frozenset(lost))
    plan = run_round(before, policy, Curves())
    hit = {job.spec.id for job in before.jobs if any(node in lost for node, _ in job.placement)}
    assert hit <= {action.job_id for action in plan.actions}
    assert all(" down; " in action.reason for action in plan.actions if action.job_id in hit)
    after = carry_out(before, plan)
    assert not any(node in lost for job in after.jobs for node, _ in job.placement)
    if name != "gandiva":  # a job whose set of nodes is lost gets its next set a round later
        assert run_round(after, policy, Curves()).actions == ()


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


def test_new_jobs_that_a_round_has_no_work_left_for_are_answered_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = [view(f"s{i}", 1) for i in range(4)]
    strict = [replace(one, spec=replace(one.spec, deadline_s=2000.0)) for one in strict]
    snapshot = Snapshot(now=0.0, cluster=Cluster.parse("1x4"), jobs=(*strict, view("loose", 1)))
    assert len(run_round(snapshot, policy_named("elasticflow"), Curves()).answers) == 5
    monkeypatch.setattr("concertina.policies.round.ADMIT_WORK", 3)  # 1 and 2 jobs filled in for the first two
    plan = run_round(snapshot, policy_named("elasticflow"), Curves())
    assert [answer.job_id for answer in plan.answers] == ["s0", "s1"]
    assert set(plan.placement.nodes) == {"s0", "s1"}
    assert set(plan.notes) == {"s0", "s1"}
    taken = [replace(one, phase=JobPhase.WAITING) for one in strict[:2]]
    later = replace(snapshot, jobs=(*taken, *strict[2:], view("loose", 1)))
    assert [answer.job_id for answer in run_round(later, policy_named("elasticflow"), Curves()).answers] == ["s2"]
