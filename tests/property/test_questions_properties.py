"""Answers against what then happens, on generated clusters: the simulator, begun in the middle, ends the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec
from concertina.core.plan import Admitted
from concertina.policies.admission import rule
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.questions import Basis, etas, quote
from concertina.questions.ask import World
from concertina.questions.forward import Pace
from concertina.simulator.engine import Setting, Simulation
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import overhead_named
from concertina.simulator.recorder import Record

CLUSTER = Cluster.parse("2x4")
EXACT = ("fifo", "backfill", "srtf", "las", "edf", "optimus")
"""Policies whose rounds depend on nothing but what a snapshot says, and on no clock of their own."""
FEW = settings(max_examples=15, deadline=None)


@st.composite
def specs(draw: st.DrawFn, most: int = 12) -> list[JobSpec]:
    count = draw(st.integers(1, most))
    found = []
    for i in range(count):
        submit, seconds = float(draw(st.integers(0, 600))), float(draw(st.integers(10, 900)))
        wait = draw(st.none() | st.integers(200, 6_000))
        found.append(
            JobSpec(
                id=f"j{i}",
                submit_s=submit,
                gpus=draw(st.sampled_from((1, 2, 4, 8))),
                duration_s=seconds,
                deadline_s=None if wait is None else submit + wait,
            )
        )
    return found


class Kept(Simulation):
    """A simulation that keeps a snapshot after the n-th round, and forgets what was still to come."""

    def __init__(self, jobs: list[JobSpec], policy: str, after: int) -> None:
        setting = Setting(
            cluster=CLUSTER,
            policy=policy_named(policy),
            curves=Curves(),
            overhead=overhead_named("instant"),
            noise=Noise(),
            record=Record(),
        )
        super().__init__(jobs, setting)
        self.after = after
        self.kept: Snapshot | None = None

    def _round(self, clock: object) -> None:
        super()._round(clock)  # type: ignore[arg-type]
        if self.rounds == self.after:
            self.kept = self.cluster.observe()
            del self.jobs[self.next_job :]


def begun(jobs: list[JobSpec], policy: str, after: int) -> tuple[Snapshot | None, Result]:
    simulation = Kept(jobs, policy, after)
    result = simulation.run(lambda: 0.0, "kept")
    return simulation.kept, result


def basis(policy: str, **fields: object) -> Basis:
    plain = Basis(policy=policy_named(policy), curves=Curves(), overhead=overhead_named("instant"), noise=Noise())
    return replace(plain, **fields)  # type: ignore[arg-type]


@FEW
@given(specs(), st.sampled_from(EXACT), st.integers(1, 12))
def test_without_chance_an_eta_is_what_happens(jobs: list[JobSpec], policy: str, after: int) -> None:
    kept, result = begun(jobs, policy, after)
    if kept is None:
        return
    actual = {outcome.job_id: outcome.end_s for outcome in result.outcomes}
    for name, found in etas(kept, basis(policy, budget_ms=1e6)).items():
        assert found.end.expected_s == pytest.approx(actual[name], abs=1e-6)
        assert kept.now <= found.start.expected_s <= found.end.expected_s


@FEW
@given(specs(), st.sampled_from(("fifo", "edf", "optimus", "elasticflow")), st.integers(1, 8), st.integers(1, 6))
def test_few_rounds_lose_no_job_and_end_none_before_it_can(
    jobs: list[JobSpec], policy: str, after: int, rounds: int
) -> None:
    kept, _ = begun(jobs, policy, after)
    if kept is None:
        return
    world = World(snapshot=kept, basis=basis(policy), pace=Pace(rounds=rounds, span_s=900.0), run_ms=1.0)
    course = world.run(draw=None, until=())
    for view in kept.jobs:
        name = view.spec.id
        assert kept.now <= course.starts[name] + 1e-6
        fastest = ((view.spec.duration_s or 0.0) - view.work_done) / 8.0  # 8 devices are at most 8 times as fast
        assert course.ends[name] >= kept.now + fastest - 1e-6


@FEW
@given(specs(), st.integers(1, 12), st.sampled_from((1, 2, 4, 8)), st.integers(10, 900))
def test_a_quoted_deadline_would_be_promised_and_no_promise_is_delayed_beyond_its_own(
    jobs: list[JobSpec], after: int, gpus: int, seconds: int
) -> None:
    kept, _ = begun(jobs, "elasticflow", after)
    if kept is None:
        return
    spec = JobSpec(id="new", submit_s=kept.now, gpus=gpus, duration_s=float(seconds))
    found = quote(kept, spec, basis("elasticflow"))
    if found.earliest_s is None:
        return
    asked = replace(spec, deadline_s=found.earliest_s)
    table = Table.from_snapshot(kept, Curves())
    answer = rule("promise")(asked, Curves().of(asked)[0], [8], table)
    assert isinstance(answer, Admitted), answer.reason
    again = quote(kept, asked, basis("elasticflow"))
    assert again.taken
    assert again.end is not None
    assert again.end.expected_s <= found.earliest_s
    deadlines = {view.spec.id: view.spec.deadline_s for view in kept.jobs}
    for delay in again.delays:
        deadline = deadlines[delay.job_id]
        assert deadline is None or delay.after_s <= deadline or delay.before_s > deadline


@FEW
@given(specs(), st.sampled_from((*EXACT, "elasticflow", "tiresias")), st.integers(1, 12), st.integers(0, 5))
def test_the_same_question_has_the_same_answer(jobs: list[JobSpec], policy: str, after: int, seed: int) -> None:
    kept, _ = begun(jobs, policy, after)
    if kept is None:
        return
    spec = JobSpec(id="new", submit_s=kept.now, gpus=2, duration_s=100.0)
    rules = basis(policy, noise=Noise(step_time=0.2), past=tuple(jobs), seed=seed, runs=3)
    assert quote(kept, spec, rules) == quote(kept, spec, rules)
    assert {view.phase for view in kept.jobs} <= {JobPhase.RUNNING, JobPhase.WAITING}
