"""why, eta and quote on small clusters, against numbers worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from concertina.core.cluster import Cluster, Snapshot
from concertina.core.errors import NoCurveError
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.base import Policy, Shares
from concertina.policies.fifo import FifoPolicy
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.questions import Band, Basis, Delay, QuestionError, eta, etas, quote, why
from concertina.questions.arrivals import arrivals
from concertina.questions.ask import World, world_of
from concertina.questions.forward import Pace
from concertina.questions.stand_in import StandIn
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import overhead_named

NOW = 1_000.0


def spec(name: str, gpus: int, seconds: float, submit: float = 0.0, **fields: object) -> JobSpec:
    return JobSpec(**{"id": name, "submit_s": submit, "gpus": gpus, "duration_s": seconds, **fields})  # type: ignore[arg-type]


def running(job: JobSpec, node: str = "n0", done: float = 0.0, **fields: object) -> JobView:
    view = JobView(
        spec=job,
        phase=JobPhase.RUNNING,
        workers=(("gpu", job.gpus),),
        placement=((node, job.gpus),),
        work_done=done,
        executed_s=done,
        service_s=done * job.gpus,
        first_start_s=job.submit_s,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def waiting(job: JobSpec) -> JobView:
    return JobView(spec=job, phase=JobPhase.WAITING, waiting_since_s=job.submit_s)


def snapshot(*jobs: JobView, cluster: str = "1x4", down: frozenset[str] = frozenset()) -> Snapshot:
    return Snapshot(now=NOW, cluster=Cluster.parse(cluster), jobs=jobs, down=down)


def basis(policy: str | Policy = "fifo", **fields: object) -> Basis:
    """Nothing is left to chance unless a test says so."""
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    plain = Basis(policy=chosen, curves=Curves(), overhead=overhead_named("instant"), noise=Noise())
    return replace(plain, **fields)  # type: ignore[arg-type]


class Spy:
    """fifo, which keeps what it was shown."""

    name, paper, admission = "spy", "none", "fits"

    def __init__(self) -> None:
        self.seen: list[Table] = []
        self.submits: list[float] = []

    def allocate(self, table: Table) -> Shares:
        self.seen.append(table)
        self.submits += table.submit.tolist()
        return FifoPolicy().allocate(table)

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        return "spied"


def exactly(seconds: float) -> Band:
    return Band(low_s=seconds, expected_s=seconds, high_s=seconds)


# -- eta -----------------------------------------------------------------------------------------------------


def test_a_running_job_ends_when_its_work_is_done_and_the_next_one_starts_then() -> None:
    there = snapshot(running(spec("a", 4, 100), done=40), waiting(spec("b", 2, 30, 10)), waiting(spec("c", 4, 5, 20)))
    found = etas(there, basis())
    assert (found["a"].start, found["a"].end) == (exactly(NOW), exactly(NOW + 60))
    assert (found["b"].start, found["b"].end) == (exactly(NOW + 60), exactly(NOW + 90))
    assert (found["c"].start, found["c"].end) == (exactly(NOW + 90), exactly(NOW + 95))
    assert eta(there, "b", basis()) == found["b"]
    assert found["b"].runs == 1


def test_a_rescale_that_the_policy_will_make_is_paid_for() -> None:
    there = snapshot(running(spec("long", 4, 900), done=0), waiting(spec("short", 4, 50, 10)))
    found = etas(there, basis("srtf", overhead=overhead_named(5)))
    assert found["short"].end == exactly(NOW + 55)
    assert found["long"].end == exactly(NOW + 55 + 5 + 900)


def test_a_job_that_can_never_run_has_no_end_in_sight() -> None:
    there = snapshot(waiting(spec("wide", 8, 10)), cluster="2x4", down=frozenset({"n1"}))
    found = eta(there, "wide", basis())
    assert math.isinf(found.start.expected_s)
    assert math.isinf(found.end.low_s)
    assert found.reason == "it does not end if nothing changes"


@pytest.mark.parametrize("policy", ["concertina", "elasticflow", "elastic-tiresias", "tiresias"])
def test_a_job_that_no_device_is_left_for_is_told_so_at_once(policy: str) -> None:
    """Below its fair share the policy looks at it again every five minutes, and nothing else ever happens."""
    there = snapshot(waiting(spec("late", 1, 10, submit=NOW - 1000.0)), cluster="1x4", down=frozenset({"n0"}))
    course = world_of(there, basis(policy), 1e9).run(draw=None, until=["late"])
    assert course.rows < 1000
    assert course.ends == {}


def test_a_job_on_a_lost_node_starts_again_elsewhere_with_what_it_has_done() -> None:
    there = snapshot(running(spec("a", 4, 100), "n1", done=40), cluster="2x4", down=frozenset({"n1"}))
    found = eta(there, "a", basis(overhead=overhead_named("concertina")))
    assert found.end == exactly(NOW + 5.1 + 60)


def test_an_elastic_job_goes_on_with_what_a_lost_node_leaves_it() -> None:
    job = running(replace(spec("a", 4, 100), max_workers=2))
    job = replace(job, workers=(("gpu", 2),), placement=(("n0", 1), ("n1", 1)))
    there = snapshot(job, cluster="2x1", down=frozenset({"n1"}))
    found = eta(there, "a", basis("elasticflow", overhead=overhead_named(50)))
    assert found.start.expected_s == NOW
    assert found.end == exactly(NOW + 100 * 4 * 0.8**2)


def test_jobs_that_were_not_looked_at_go_through_admission_first() -> None:
    new = JobView(spec=spec("new", 2, 10, NOW), phase=JobPhase.SUBMITTED)
    huge = JobView(spec=spec("huge", 64, 10, NOW), phase=JobPhase.SUBMITTED)
    found = etas(snapshot(new, huge), basis())
    assert found["new"].end == exactly(NOW + 10)
    assert math.isinf(found["huge"].end.expected_s)
    assert found["huge"].reason == "asks for 64 devices of one type; the cluster has 4"


def test_without_places_only_numbers_count() -> None:
    view = replace(running(spec("a", 4, 100), done=40), placement=())
    spy = Spy()
    found = etas(snapshot(view, waiting(spec("b", 4, 10, 5))), basis(policy=spy))
    assert found["b"].end == exactly(NOW + 70)
    assert all(table.rooms is None for table in spy.seen)
    etas(snapshot(running(spec("a", 4, 100))), basis(policy=spy))
    assert spy.seen[-1].rooms is not None


def test_noise_makes_a_band_that_is_the_same_for_the_same_seed() -> None:
    there = snapshot(running(spec("a", 4, 10_000)))
    noisy = basis(noise=Noise(step_time=0.1))
    found = eta(there, "a", noisy)
    assert found.runs == noisy.runs
    assert NOW + 8_000 < found.end.low_s < found.end.expected_s < found.end.high_s < NOW + 12_500
    assert found == eta(there, "a", noisy)
    assert found != eta(there, "a", replace(noisy, seed=1))


def test_newcomers_like_those_of_the_past_make_a_preempted_job_end_later() -> None:
    there = snapshot(running(spec("long", 4, 3_000)))
    past = tuple(spec(f"p{i}", 4, 50, 100.0 * i) for i in range(11))
    alone, crowded = eta(there, "long", basis("srtf")), eta(there, "long", basis("srtf", past=past))
    assert alone.end == exactly(NOW + 3_000)
    assert NOW + 5_000 < crowded.end.low_s <= crowded.end.high_s < NOW + 7_000  # half of the time is theirs
    assert eta(there, "long", basis("fifo", past=past)).end == exactly(NOW + 3_000)


# -- quote ---------------------------------------------------------------------------------------------------


def test_a_quote_says_when_a_job_would_start_and_end_and_that_nobody_minds() -> None:
    found = quote(snapshot(running(spec("a", 4, 100), done=40)), spec("new", 2, 30), basis())
    assert found.taken
    assert (found.start, found.end) == (exactly(NOW + 60), exactly(NOW + 90))
    assert found.delays == ()
    assert found.earliest_s is None  # fifo promises nothing
    assert found.reason == "it fits on the cluster"


def test_a_quote_names_whom_it_would_displace_and_by_how_much() -> None:
    there = snapshot(running(spec("a", 2, 900)), running(spec("b", 2, 500)))
    found = quote(there, spec("new", 4, 50), basis("srtf"))
    assert found.end == exactly(NOW + 50)
    assert found.delays == (
        Delay(job_id="a", before_s=NOW + 900, after_s=NOW + 950),
        Delay(job_id="b", before_s=NOW + 500, after_s=NOW + 550),
    )
    assert [delay.by_s for delay in found.delays] == [50, 50]


def test_a_job_that_can_not_run_is_refused_with_the_reason_and_no_times() -> None:
    found = quote(snapshot(), spec("new", 16, 30), basis())
    assert (found.taken, found.start, found.end, found.runs) == (False, None, None, 0)
    assert found.reason == "asks for 16 devices of one type; the cluster has 4"


def test_a_promise_is_quoted_early_and_to_the_newcomer_it_can_be_made() -> None:
    there = snapshot(running(spec("a", 4, 5_000, deadline_s=NOW + 4_300), done=1_000))
    rules = basis("elasticflow")
    free = quote(snapshot(), spec("new", 4, 1_000), rules)
    busy = quote(there, spec("new", 4, 1_000), rules)
    assert free.earliest_s is not None
    assert busy.earliest_s is not None
    assert NOW + 1_000 < free.earliest_s < busy.earliest_s
    asked = quote(there, spec("new", 4, 1_000, deadline_s=busy.earliest_s), rules)
    assert asked.taken
    assert asked.end is not None
    assert asked.end.expected_s <= busy.earliest_s
    refused = quote(there, spec("new", 4, 1_000, deadline_s=NOW + 300), rules)
    assert not refused.taken
    assert refused.earliest_s is not None
    assert refused.end is not None
    assert refused.end.expected_s <= refused.earliest_s
    assert "could be promised" in refused.reason


def test_a_quote_counts_from_now_whatever_the_submission_says() -> None:
    spy = Spy()
    assert quote(snapshot(), spec("new", 4, 30, submit=7.0), basis(policy=spy)).end == exactly(NOW + 30)
    assert {one.submit_s for table in spy.seen for one in table.specs} <= {NOW}
    assert spy.submits == [NOW]


# -- why -----------------------------------------------------------------------------------------------------


def test_why_names_who_holds_what_a_job_waits_for() -> None:
    there = snapshot(
        running(spec("a", 3, 100)), waiting(spec("b", 4, 10, 1)), waiting(spec("c", 2, 10, 2)), cluster="1x4"
    )
    assert why(there, "b", basis()).startswith(
        "it waits: it needs 4 gpu and 1 of 4 are free, the others are held by a (3); "
    )
    assert ", and 1 job submitted earlier waits too; " in why(there, "c", basis())


def test_why_counts_those_it_does_not_name() -> None:
    held = [running(spec(f"r{i}", 1, 100), "n0") for i in range(4)]
    found = why(snapshot(*held, waiting(spec("w", 1, 10, 5))), "w", basis())
    assert "held by r0 (1), r1 (1) and 2 other jobs; " in found


def test_why_says_that_a_job_about_to_start_is_held_by_nothing() -> None:
    found = why(snapshot(waiting(spec("a", 2, 10))), "a", basis())
    assert found.startswith("nothing: it goes from 0 to 2 devices in this round (")


def test_why_tells_lost_nodes_from_busy_ones() -> None:
    there = snapshot(waiting(spec("wide", 8, 10)), cluster="2x4", down=frozenset({"n1"}))
    assert "it needs 8 gpu at once and only 4 can be used (1 node lost, drained or reclaimed)" in why(
        there, "wide", basis()
    )


def test_why_answers_while_a_job_is_still_listed_on_a_lost_node() -> None:
    lost = running(spec("lost", 4, 100), "n1")
    there = snapshot(lost, running(spec("a", 4, 100)), waiting(spec("w", 2, 10)), cluster="2x4", down=frozenset({"n1"}))
    assert "it needs 2 gpu and 0 of 4 are free" in why(there, "w", basis())


def test_why_tells_free_devices_that_are_kept_for_others() -> None:
    there = snapshot(running(spec("a", 2, 100)), waiting(spec("head", 4, 10, 1)), waiting(spec("c", 2, 10, 2)))
    assert "it needs 2 gpu and 2 of 4 are free, but not for it; " in why(there, "c", basis())


def test_why_of_a_job_that_runs_or_is_not_yet_admitted() -> None:
    new = JobView(spec=spec("huge", 64, 10, NOW), phase=JobPhase.SUBMITTED)
    there = snapshot(running(spec("a", 2, 100)), new)
    assert why(there, "a", basis()).startswith("it runs on 2 devices; ")
    refusal = "asks for 64 devices of one type; the cluster has 4"
    assert why(there, "huge", basis()) == f"it is not yet admitted and would be refused: {refusal}"


# -- questions that make no sense ----------------------------------------------------------------------------


def test_a_job_nobody_knows_is_answered_with_the_nearest() -> None:
    there = snapshot(running(spec("train-7", 1, 10)), running(spec("other", 1, 10)))
    for ask in (why, eta):
        with pytest.raises(QuestionError, match=r"no job 'train-1' among the 2 .* nearest are train-7"):
            ask(there, "train-1", basis())


def test_a_quote_for_an_id_that_is_taken_is_refused() -> None:
    with pytest.raises(QuestionError, match="a job 'a' is there already; ask with an id of its own"):
        quote(snapshot(running(spec("a", 1, 10))), spec("a", 1, 10), basis())


def test_a_quote_for_a_job_without_a_known_speed_says_what_is_missing() -> None:
    unknown = JobSpec(id="new", submit_s=0.0, gpus=1, model="gpt", batch_size=8, work=10.0)
    with pytest.raises(NoCurveError, match="no throughput for model 'gpt'"):
        quote(snapshot(), unknown, basis())


@pytest.mark.parametrize("fields", [{"runs": 0}, {"budget_ms": 0.0}, {"window_s": 0.0}, {"gap_s": -1.0}])
def test_a_basis_that_can_not_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(QuestionError, match="needed 1 or more, above 0, above 0, 0 or more"):
        basis(**fields)
    with pytest.raises(QuestionError, match="placement is 'any', needed one of best-fit"):
        basis(placement="any")


# -- parts ---------------------------------------------------------------------------------------------------


def test_a_band_is_the_middle_of_ten_and_knows_of_runs_that_never_end() -> None:
    assert Band.of([float(i) for i in range(19)]) == Band(low_s=1.0, expected_s=9.0, high_s=17.0)
    assert Band.of([1.0, 2.0, math.inf]) == Band(low_s=1.0, expected_s=2.0, high_s=math.inf)
    assert Band.of([1.0, 1.0, 1.0, 1.0, math.inf]).high_s == math.inf
    assert Band.of([7.0]) == exactly(7.0)


def test_newcomers_are_the_last_window_again_from_a_random_moment() -> None:
    past = [spec(f"p{i}", 1, 60, 100.0 * i, deadline_s=100.0 * i + 500) for i in range(11)]
    found = arrivals(past, NOW, 500.0, NOW + 1_000, 99, random.Random(0))
    assert len(found) == 10  # one every 100 s
    gaps = [b.submit_s - a.submit_s for a, b in pairwise(found)]
    assert gaps == pytest.approx([100.0] * 9)
    assert NOW < found[0].submit_s <= NOW + 100
    assert all(job.deadline_s == pytest.approx(job.submit_s + 500) for job in found)
    assert len({job.id for job in found}) == 10
    assert {job.id.split()[0] for job in found} == {"p6", "p7", "p8", "p9", "p10"}
    assert arrivals(past, NOW, 500.0, NOW + 1_000, 99, random.Random(1)) != found


def test_a_short_past_counts_for_as_long_as_it_is() -> None:
    past = [spec(f"p{i}", 1, 60, 900 + 20.0 * i) for i in range(6)]
    found = arrivals(past, NOW, 86_400.0, NOW + 200, 99, random.Random(0))
    assert 10 <= len(found) <= 12
    assert arrivals(past[:4], NOW, 86_400.0, NOW + 200, 99, random.Random(0)) == ()


def test_of_too_many_newcomers_the_largest_stay() -> None:
    past = [spec(f"p{i}", 1 + i % 2, 60, 100.0 * i) for i in range(11)]
    found = arrivals(past, NOW, 1_000.0, NOW + 1_000, 5, random.Random(0))
    assert len(found) == 5
    assert {job.gpus for job in found} == {2}
    assert [job.submit_s for job in found] == sorted(job.submit_s for job in found)


def test_rounds_stand_closer_at_first() -> None:
    pace = Pace(rounds=4, span_s=1_600.0)
    assert [pace.following(t) for t in (0.0, 99.9, 100.0, 400.0, 900.0)] == [100.0, 100.0, 400.0, 900.0, 1_600.0]
    later = [pace.following(t) for t in (1_600.0, 1_650.0, 2_300.0, 2_990.0)]
    assert later == [2_300.0, 2_300.0, 3_000.0, 3_000.0]  # not further apart for ever


def test_few_rounds_give_about_the_same_ends_and_none_in_the_past() -> None:
    draw = random.Random(3)
    jobs = [running(spec(f"r{i}", 1, draw.uniform(100, 2_000)), f"n{i // 4}") for i in range(16)]
    jobs += [waiting(spec(f"w{i}", 1, draw.uniform(100, 2_000), 1.0 + i)) for i in range(48)]
    there = snapshot(*jobs, cluster="4x4")
    exact = world_of(there, basis(), 1_000.0)
    assert exact.pace is None
    rough = World(snapshot=there, basis=basis(), pace=Pace(rounds=3, span_s=6_000.0), run_ms=1.0)
    right, about = (world.run(draw=None, until=()).ends for world in (exact, rough))
    wrong = sorted(abs(about[name] - end) / (end - NOW) for name, end in right.items())
    assert wrong[len(wrong) // 2] < 0.05
    assert min(about.values()) > NOW


def test_between_two_rounds_the_order_of_the_last_one_goes_on() -> None:
    """Shortest first, as the policy did: first in, first out would end the short ones late."""
    jobs = [waiting(spec(f"w{i}", 4, 1_000 - 20 * i, float(i))) for i in range(40)]
    for policy in ("srtf", "fifo"):
        exact, rough = (
            World(snapshot=snapshot(*jobs), basis=basis(policy), pace=pace, run_ms=1.0).run(draw=None, until=())
            for pace in (None, Pace(rounds=2, span_s=20_000.0))
        )
        assert rough.rows < exact.rows / 4
        assert rough.ends == pytest.approx(exact.ends)


def test_the_stand_in_gives_elastic_jobs_the_size_the_policy_gave() -> None:
    stand_in = StandIn(gang=False)
    there = snapshot(
        *(running(spec(f"r{i}", 2, 100), f"n{i}") for i in range(3)), waiting(spec("w", 8, 50)), cluster="4x2"
    )
    table = Table.from_snapshot(there, Curves())
    stand_in.learn(table)
    assert (stand_in.queue, stand_in.size) == ([3], 2)
    (change,) = stand_in.starts(table, lambda key: key)
    assert (change.row, change.after) == (3, 2)
    assert stand_in.queue == []
    gang = StandIn(gang=True)
    gang.learn(table)
    assert list(gang.starts(table, lambda key: key)) == []  # 8 at once or nothing


def test_many_jobs_are_answered_with_few_rounds() -> None:
    there = snapshot(*(waiting(spec(f"w{i}", 1, 100 + i, float(i))) for i in range(200)))
    assert world_of(there, basis(), 1.0).pace is not None
    assert world_of(there, basis("elasticflow"), 100.0).pace is not None
    course = world_of(there, basis("elasticflow"), 100.0).run(draw=None, until=())
    assert course.rows < 200 * 40
    assert len(course.ends) == 200


def test_a_forward_run_that_has_used_up_its_time_looks_once() -> None:
    jobs = [spec(f"j{i}", 1, 3600.0, submit=NOW, deadline_s=NOW + 4300.0, max_workers=1) for i in range(12)]
    pressed = snapshot(*map(waiting, jobs))
    dear = world_of(pressed, basis("elasticflow"), 1e9).run(draw=None, until=())
    cheap = replace(world_of(pressed, basis("elasticflow"), 1e9), run_ms=0.1).run(draw=None, until=())
    assert dear.rows > 10 * cheap.rows
    assert cheap.ends.keys() == dear.ends.keys()
