"""Promises on generated clusters and jobs: what was promised stays possible, whatever comes after it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView, Reserved
from concertina.core.plan import Admitted
from concertina.policies.admission import on_terms, rule
from concertina.policies.counter import Counter, Line
from concertina.policies.filling import ChangeCost, Claim, Filling, Ladder, Profile, Share, scale_of
from concertina.policies.promise import claims_of, entries_of, look_ahead
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves, LawCurve, ScalingCurve
from concertina.policies.table import Table
from concertina.policies.terms import Terms, reserve_of
from concertina.simulator.generate import Recipe, generate
from concertina.simulator.noise import NodeLost
from concertina.simulator.run import simulate

COMMON = settings(max_examples=60, deadline=None)
CLUSTERS = ("1x4", "2x4", "3x8", "1x7", "2x4:A100,3x2:T4")


@st.composite
def strict_jobs(draw: st.DrawFn, most: int = 12) -> list[JobSpec]:
    """Jobs of minutes to hours with strict deadlines, some of them tight, in order of submission."""
    found, submit = [], 0
    for index in range(draw(st.integers(1, most))):
        submit += draw(st.integers(0, 900))
        seconds = draw(st.integers(60, 9000))
        wait = seconds * draw(st.sampled_from((0.4, 0.7, 1.0, 1.5, 3.0)))
        found.append(
            JobSpec(
                id=f"j{index}",
                submit_s=submit,
                gpus=draw(st.sampled_from((1, 1, 2, 3, 4, 8))),
                duration_s=seconds,
                deadline_s=submit + wait,
                max_workers=draw(st.none() | st.sampled_from((2, 4))),
            )
        )
    return found


def table(cluster: str, jobs: list[JobView], now: float = 0.0) -> Table:
    snapshot = Snapshot(now=now, cluster=Cluster.parse(cluster), jobs=tuple(jobs))
    return Table.from_snapshot(snapshot, Curves())


def admitted(cluster: str, jobs: list[JobSpec], policy: str = "elasticflow") -> list[JobView]:
    """The jobs that are promised when all come at once, one after the other."""
    admit = rule(policy_named(policy).admission)
    taken: list[JobView] = []
    for job in jobs:
        now = replace(job, submit_s=0.0, deadline_s=(job.deadline_s or 0.0) - job.submit_s)
        rows = table(cluster, taken)
        answer = admit(now, Curves().of(now)[0], list(rows.capacity), rows)
        if isinstance(answer, Admitted):
            taken.append(JobView(spec=now, phase=JobPhase.WAITING, waiting_since_s=0.0))
            taken = [replace(view, reserved=answer.reserved.get(view.spec.id, ())) for view in taken]
            check_feasible(table(cluster, taken), Terms(elastic=policy != "edf-admission"))
    return taken


def check_feasible(rows: Table, terms: Terms) -> None:
    """Nobody is late, everybody has a share that ends in time."""
    outlook = look_ahead(claims_of(rows, terms), terms)
    assert not outlook.late
    for row in range(len(rows)):
        assert outlook.shares[row].finish_s <= rows.deadline[row]


@COMMON
@given(strict_jobs(), st.sampled_from(CLUSTERS), st.sampled_from(("elasticflow", "edf-admission")))
def test_an_admitted_set_stays_feasible_after_any_admission(jobs: list[JobSpec], cluster: str, policy: str) -> None:
    admitted(cluster, jobs, policy)  # checks after each


@COMMON
@given(
    strict_jobs(most=9),
    st.lists(st.sampled_from((1, 3, 5, 6, 7)), min_size=9, max_size=9),
    st.sampled_from(("3x1", "1x3", "1x7", "7x1", "3x2", "2x3:A100,1x7:T4")),
    st.sampled_from(("elasticflow", "concertina")),
)
def test_promises_hold_and_a_deadline_far_away_is_one_beside_jobs_that_no_power_of_two_can_serve(
    jobs: list[JobSpec], fewest: list[int], cluster: str, policy: str
) -> None:
    where = Cluster.parse(cluster)
    jobs = [replace(job, min_workers=low, gpus=low, max_workers=None) for job, low in zip(jobs, fewest, strict=False)]
    assert simulate(jobs, cluster=where, policy=policy).summary.admitted_missed == 0
    known = admitted(cluster, jobs, policy)
    rows, last = table(cluster, known), replace(jobs[-1], id="last", deadline_s=1e9)
    admit, curve = rule(policy_named(policy).admission), Curves().of(last)[0]
    there = max(where.slots_of(kind) for kind in where.types) >= fewest[len(jobs) - 1]
    assert isinstance(admit(last, curve, list(rows.capacity), rows), Admitted) == there


@COMMON
@given(strict_jobs(), st.sampled_from(CLUSTERS), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_a_line_that_fills_most_jobs_in_once_answers_as_if_all_were_filled_in_anew(
    jobs: list[JobSpec], cluster: str, parts: list[float]
) -> None:
    rows = table(cluster, admitted(cluster, jobs[:-1]), now=30.0)
    counter = Counter(jobs[-1], Curves().of(jobs[-1])[0], rows, Terms())
    entries, plain = counter._eased(), Terms(attempts=0)
    line, beyond = Line(counter, entries), 30.0
    for part in sorted(parts):
        deadline = 30.0 + 20_000.0 * part
        assert line.takes(deadline, beyond) == (not counter._refusal(deadline, entries, plain))
        beyond = deadline


@COMMON
@given(strict_jobs(), st.integers(1, 12), st.integers(1, 3))
def test_adding_a_device_never_makes_a_promise_break(jobs: list[JobSpec], nodes: int, more: int) -> None:
    taken = admitted(f"{nodes}x1", jobs)
    check_feasible(table(f"{nodes + more}x1", taken), Terms())
    forgetful = [replace(view, reserved=()) for view in taken]  # as after an upgrade: no plan of before is known
    check_feasible(table(f"{nodes + more}x1", forgetful), Terms())


@COMMON
@given(
    strict_jobs(most=9),
    st.sampled_from(CLUSTERS),
    st.sampled_from(("elasticflow", "edf-admission")),
    st.sampled_from(("instant", "elasticflow", 9.0)),
    st.sampled_from(("best-fit", "buddy")),
)
def test_an_admitted_job_is_never_late(
    jobs: list[JobSpec], cluster: str, policy: str, overhead: str | float, placement: str
) -> None:
    result = simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, overhead=overhead, placement=placement)
    assert result.summary.admitted_missed == 0


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from((16, 32, 64)),
    st.sampled_from((0.8, 1.5, 4.0)),
    st.sampled_from(("itp", "philly", "modelarts")),
    st.sampled_from(((0.5, 1.5), (0.3, 0.9), (0.9, 1.1))),
    st.sampled_from(("instant", "elasticflow", "stop-resume", 60.0)),
)
def test_no_promise_breaks_on_generated_traces(
    seed: int, gpus: int, load: float, like: str, tightness: tuple[float, float], overhead: str | float
) -> None:
    tight, loose = tightness
    recipe = Recipe(
        jobs=90, seed=seed, gpus=gpus, load=load, like=like, deadlines=1.0, tight=tight, loose=loose, arrivals="poisson"
    )
    result = simulate(
        generate(recipe), cluster=Cluster.parse(f"{gpus // 8}x8"), policy="elasticflow", overhead=overhead
    )
    assert result.summary.admitted_missed == 0


@COMMON
@given(strict_jobs(), st.sampled_from(("2x2", "2x4", "3x2", "2x4:A100,2x2:T4")), st.data())
def test_with_a_node_in_reserve_no_promise_breaks_when_one_is_lost(
    jobs: list[JobSpec], cluster: str, data: st.DataObject
) -> None:
    where = Cluster.parse(cluster)
    lost = data.draw(st.sampled_from([node.id for node in where.nodes]))
    when = data.draw(st.integers(0, int(max(job.deadline_s or 0.0 for job in jobs))))
    policy = on_terms(policy_named("elasticflow"), reserve=reserve_of(where, 1))
    result = simulate(jobs, cluster=where, policy=policy, overhead=9.0, faults=[NodeLost(time_s=when, node=lost)])
    assert result.summary.admitted_missed == 0


def test_without_a_reserve_the_loss_of_a_node_can_break_a_promise_with_one_it_is_not_made() -> None:
    job = JobSpec(id="a", submit_s=0.0, gpus=4, duration_s=3600.0, deadline_s=4500.0)
    cluster, faults = Cluster.parse("2x2"), [NodeLost(time_s=300.0, node="n1")]
    policy = on_terms(policy_named("elasticflow"), reserve=reserve_of(cluster, 1))
    assert simulate([job], cluster=cluster, policy="elasticflow", faults=faults).summary.admitted_missed == 1
    assert simulate([job], cluster=cluster, policy=policy, faults=faults).summary.rejected == 1


ONE_AFTER_THE_OTHER = [
    JobSpec(id="j0", submit_s=0, gpus=3, duration_s=3158, deadline_s=2210.6),
    JobSpec(id="j1", submit_s=0, gpus=1, duration_s=60, deadline_s=24.0),
    JobSpec(id="j2", submit_s=0, gpus=1, duration_s=1441, deadline_s=2161.5),
]
"""The last is to begin in the moment in which the first one ends, give or take a rounding."""


@COMMON
@example(ONE_AFTER_THE_OTHER, "2x4", 139.0)
@given(strict_jobs(), st.sampled_from(CLUSTERS), st.floats(0.0, 5000.0))
def test_what_was_planned_can_still_be_done_as_planned_later(jobs: list[JobSpec], cluster: str, after: float) -> None:
    taken = admitted(cluster, jobs)
    rows = table(cluster, taken)
    plan = look_ahead(claims_of(rows, Terms()), Terms()).reserved(rows)
    seconds = min([after, *(runs[1][0] * 0.999 for runs in plan.values())])  # before the first of them changes
    later = [held_since(view, plan[view.spec.id], rows.types, seconds) for view in taken]
    entries = entries_of(claims_of(table(cluster, later, now=seconds), Terms()), Terms())
    filling = Filling(seconds, rows.capacity, 4, [scale_of(count) for count in rows.capacity])
    for entry in sorted(entries, key=lambda entry: -entry.row):  # in no order that a planner would choose
        share = filling.follow(entry.claim, entry.kind, entry.runs, entry.finish_s, entry.deadline)
        assert share is not None
        assert share.finish_s <= entry.finish_s + 1e-6


def held_since(view: JobView, plan: Reserved, types: tuple[str, ...], seconds: float) -> JobView:
    """The job after so many seconds on the first stretch of its plan."""
    _, kind, count = plan[0]
    if not count:
        return replace(view, reserved=plan)
    curve = Curves().of(view.spec)[0]
    done = curve.speed(types[kind], count) * max(seconds - ChangeCost().of(count), 0.0)
    return replace(
        view,
        phase=JobPhase.RUNNING,
        workers=((types[kind], count),),
        work_done=done,
        reserved=plan,
        waiting_since_s=None,
    )


@COMMON
@given(
    strict_jobs(),
    st.sampled_from(CLUSTERS),
    st.sampled_from(("elasticflow", "edf-admission", "edf-elastic")),
    st.data(),
)
def test_never_more_devices_than_exist_and_only_sizes_that_pack(
    jobs: list[JobSpec], cluster: str, policy: str, data: st.DataObject
) -> None:
    loose = [replace(job, deadline_s=None) if i % 4 == 3 else job for i, job in enumerate(jobs)]
    views = [JobView(spec=job, phase=JobPhase.WAITING, waiting_since_s=0.0) for job in loose]
    rows = table(cluster, views, now=data.draw(st.integers(0, 20_000)))
    found = policy_named(policy).allocate(rows)
    assert found.kind is not None
    for kind, capacity in enumerate(rows.capacity):
        assert found.workers[found.kind == kind].sum() <= capacity
    for count, job in zip(found.workers.tolist(), loose, strict=True):
        gang = policy == "edf-admission" and count == job.gpus
        assert gang or count == 0 or count & (count - 1) == 0


# -- fast code against a slow twin ---------------------------------------------------------------------------


def slow_fill(
    pieces: list[tuple[float, int]], curve: ScalingCurve, work: float, until: float, cost: ChangeCost
) -> tuple[int, float] | None:
    """(level, end) by walking through the pieces for each level in turn."""
    for exponent in range(5):
        level, speed_before = 1 << exponent, curve.speed("gpu", (1 << exponent) // 2)
        if curve.speed("gpu", level) <= speed_before:
            continue
        left, held, busy = work, 0, 0.0
        for (begin, free), (end, _) in zip(pieces, [*pieces[1:], (math.inf, 0)], strict=True):
            size = min(level, 1 << (free.bit_length() - 1)) if free else 0
            if size != held:
                held, busy = size, begin + cost.of(size)
            speed = curve.speed("gpu", size) if size else 0.0
            ready = max(begin, busy)
            if speed and ready + left / speed <= min(end, until):
                return exponent + 1, ready + left / speed
            if end >= until:
                break
            left -= speed * max(end - ready, 0.0)
    return None


@COMMON
@given(
    st.lists(st.tuples(st.integers(10, 300), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(20, 1500),
    st.integers(50, 3000),
    st.sampled_from((0.0, 5.0)),
)
def test_filling_finds_the_level_and_the_end_that_a_slow_walk_finds(
    stretches: list[tuple[int, int]], work: int, until: int, flat: float
) -> None:
    edges = np.cumsum([0, *(length for length, _ in stretches[:-1])]).astype(np.float64)
    pieces = [(float(edge), free) for edge, (_, free) in zip(edges, stretches, strict=True)]
    curve, cost = LawCurve(1), ChangeCost(flat_s=flat, doubling_s=1.0 if flat else 0.0)
    profile = profile_of(pieces)
    claim = Claim(float(work), [Ladder(curve, "gpu", (1, 8), scale_of(8), cost)])
    share = profile.fill(claim, 0, float(until))
    expected = slow_fill(pieces, curve, float(work), float(until), cost)
    assert (None if share is None else share.level) == (None if expected is None else expected[0])
    if share is not None and expected is not None:
        assert math.isclose(share.finish_s, expected[1])
        check_taken(pieces, profile, share)


def check_taken(before: list[tuple[float, int]], profile: Profile, share: Share) -> None:
    """Until the end something was taken where something was free, afterwards nothing."""
    after = profile.pieces()
    for begin, free in after:
        was = next(count for edge, count in reversed(before) if edge <= begin)
        if begin >= share.finish_s:
            assert free == was
        else:
            assert free == was - (min(1 << (share.level - 1), 1 << (was.bit_length() - 1)) if was else 0)


def profile_of(pieces: list[tuple[float, int]]) -> Profile:
    """A profile with these stretches."""
    profile = Profile(0.0, 9, len(pieces) + 2, scale_of(9))
    for begin, free in pieces:
        at = profile._split(begin) if begin else 0
        profile._free[at], profile._ranks[at] = free, free.bit_length()
    profile._look()
    return profile


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("fill",) * 9 + ("rush", "follow", "look")),
            st.integers(1, 900),
            st.integers(20, 1500),
            st.integers(0, 4),
        ),
        min_size=10,
        max_size=40,
    ),
    st.sampled_from((6, 24)),
    st.sampled_from((0.0, 5.0)),
)
def test_takings_that_are_written_late_leave_what_they_leave_if_written_at_once(
    calls: list[tuple[str, int, int, int]], devices: int, flat: float
) -> None:
    ladder = Ladder(LawCurve(1), "gpu", (1, 8), scale_of(16), ChangeCost(flat_s=flat, doubling_s=1.0 if flat else 0.0))
    quick, slow = (Profile(0.0, devices, 3, scale_of(devices)) for _ in range(2))
    for what, work, until, held in calls:
        # so that it looks at every stretch and writes what is taken at once
        slow._first, slow._start, slow._rises = 0, 0.0, False
        found = []
        for profile in (quick, slow):
            claim = Claim(float(work), [ladder], kind=0 if held else -1, rank=held, busy_s=2.0 if held else 0.0)
            if what == "fill":
                found.append(profile.fill(claim, 0, float(until)))
            elif what == "rush":
                found.append(profile.rush(claim, 0, float(until)))
            elif what == "follow":
                found.append(profile.follow(claim, 0, [(0.0, held), (float(work), 2)], 700.0, float(until)))
        assert found[:1] == found[1:]
        if what == "look":
            assert quick.pieces() == slow.pieces()
    assert quick.pieces() == slow.pieces()
