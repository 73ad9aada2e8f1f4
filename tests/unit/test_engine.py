"""The engine on small clusters, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from concertina.core.cluster import Cluster
from concertina.core.errors import SimulationError, UnknownNameError
from concertina.core.job import JobPhase, JobSpec
from concertina.policies.base import Shares
from concertina.policies.fifo import FifoPolicy
from concertina.policies.scaling_curve import ThroughputRow, ThroughputTable
from concertina.policies.table import Table
from concertina.simulator.metrics import JobOutcome, Result
from concertina.simulator.noise import JobCancelled, JobCrashed, NodeLost, NodeReturned, Noise
from concertina.simulator.overhead import OverheadModel
from concertina.simulator.recorder import Record
from concertina.simulator.run import simulate

FULL = Record(spans=True, load=True, decisions=True)


def job(name: str, submit: float, gpus: int, seconds: float, **fields: object) -> JobSpec:
    return JobSpec(**{"id": name, "submit_s": submit, "gpus": gpus, "duration_s": seconds, **fields})  # type: ignore[arg-type]


def run(jobs: list[JobSpec], cluster: str = "1x4", **how: object) -> Result:
    return simulate(jobs, **{"cluster": Cluster.parse(cluster), "record": FULL, **how})  # type: ignore[arg-type]


def by_id(result: Result) -> dict[str, JobOutcome]:
    return {outcome.job_id: outcome for outcome in result.outcomes}


def test_fifo_lets_the_head_block_and_counts_the_wait() -> None:
    result = run([job("a", 0, 3, 100), job("b", 10, 4, 50), job("c", 20, 1, 5)])
    found = by_id(result)
    assert [found[x].start_s for x in "abc"] == [0, 100, 150]
    assert [found[x].end_s for x in "abc"] == [100, 150, 155]
    assert [found[x].queue_s for x in "abc"] == [0, 90, 130]
    assert result.summary.avg_jct_s == pytest.approx((100 + 140 + 135) / 3)
    assert result.summary.makespan_s == 155
    assert result.summary.utilization == pytest.approx((300 + 200 + 5) / (155 * 4))


def test_backfill_starts_what_does_not_delay_the_head() -> None:
    jobs = [job("a", 0, 3, 100), job("b", 10, 4, 50), job("long", 20, 1, 90), job("short", 21, 1, 60)]
    found = by_id(run(jobs, policy="backfill"))
    assert found["short"].start_s == 21
    assert found["b"].start_s == 100
    assert found["long"].start_s == 150


def test_backfill_lets_a_long_job_use_devices_the_head_will_not_need() -> None:
    jobs = [job("a", 0, 3, 100), job("b", 10, 3, 50), job("long", 20, 1, 900)]
    found = by_id(run(jobs, policy="backfill"))
    assert (found["long"].start_s, found["b"].start_s) == (20, 100)


def test_backfill_gives_spare_devices_to_one_long_job_only_once() -> None:
    jobs = [job("a", 0, 2, 100), job("b", 10, 3, 50), job("long", 20, 1, 900), job("longer", 20, 1, 901)]
    found = by_id(run(jobs, policy="backfill"))
    assert (found["long"].start_s, found["b"].start_s, found["longer"].start_s) == (20, 100, 150)


def test_srtf_preempts_the_longer_job_and_loses_none_of_its_work() -> None:
    found = by_id(run([job("a", 0, 4, 100), job("b", 10, 4, 20)], policy="srtf"))
    assert (found["b"].end_s, found["a"].end_s) == (30, 120)
    assert found["a"].preemptions == 1
    assert found["a"].device_s == 400


def test_tiresias_sinks_a_job_exactly_when_its_service_reaches_the_limit() -> None:
    found = by_id(run([job("a", 0, 4, 2000), job("b", 1, 4, 10)], policy="tiresias"))
    assert found["b"].start_s == 3250 / 4


def test_overhead_stops_progress_but_holds_the_devices() -> None:
    jobs = [job("a", 0, 4, 100), job("b", 10, 4, 20)]
    found = by_id(run(jobs, policy="srtf", overhead=5))
    assert found["b"].end_s == 10 + 5 + 20
    assert found["a"].end_s == 5 + 100 + 25 + 5  # launched, ran 5, preempted for 25, resumed
    assert found["a"].device_s == 4 * (10 + 5 + 95)


@pytest.mark.parametrize("launch", [0.0, 3.0])
def test_a_job_trains_on_while_it_grows(launch: float) -> None:
    rows = [
        ThroughputRow(model="m", batch_size=8, device_type="gpu", workers=n, iterations_per_s=float(n)) for n in (1, 2)
    ]
    jobs = [
        job("a", 0, 1, 0, work=100.0, model="m", batch_size=8),
        job("b", 10, 1, 0, work=20.0, model="m", batch_size=8),
    ]
    costs = OverheadModel(name="measured", launch_s=launch, grow_s=4.0)
    found = by_id(run(jobs, "1x2", policy="elastic-fifo", throughput=ThroughputTable(rows=tuple(rows)), overhead=costs))
    shared = 2 * (10 - launch) + 20 + launch  # on both, then on one at no cost, until b has come and gone
    assert found["b"].end_s == 30 + launch
    assert found["a"].end_s == pytest.approx(30 + launch + 4 + (100 - shared - 4) / 2)


def test_an_elastic_policy_runs_at_the_speed_of_the_curve() -> None:
    rows = [
        ThroughputRow(model="m", batch_size=8, device_type="gpu", workers=n, iterations_per_s=speed)
        for n, speed in ((1, 1.0), (2, 1.5), (4, 2.0))
    ]
    jobs = [
        job("a", 0, 1, 0, work=100.0, model="m", batch_size=8, deadline_s=60.0),
        job("b", 10, 1, 0, work=30.0, model="m", batch_size=8, deadline_s=40.0),
    ]
    result = run(jobs, policy="edf", throughput=ThroughputTable(rows=tuple(rows)))
    found = by_id(result)
    assert found["b"].end_s == pytest.approx(10 + 15)
    assert found["a"].end_s == pytest.approx(65)  # 20 until 10, nothing until 25, 80 more at 2 a second
    assert [found[x].deadline_met for x in "ab"] == [False, True]
    assert (result.summary.deadline_met, result.summary.admitted_missed) == (1, 1)
    assert result.summary.cluster_efficiency == pytest.approx(2.0 / 4)


def test_a_gap_makes_events_wait_for_the_next_round() -> None:
    found = by_id(run([job("a", 0, 4, 30), job("b", 10, 4, 20)], gap_s=60))
    assert (found["a"].end_s, found["b"].start_s) == (30, 60)


def test_with_ticks_rounds_happen_at_multiples_only() -> None:
    found = by_id(run([job("a", 5, 4, 30), job("b", 10, 4, 20)], tick_s=60))
    assert (found["a"].start_s, found["b"].start_s) == (60, 120)


def test_a_lost_node_stops_its_jobs_and_they_go_on_elsewhere() -> None:
    result = run(
        [job("a", 0, 4, 100), job("b", 0, 4, 100)],
        "2x4",
        faults=[NodeLost(time_s=40, node="n0"), NodeReturned(time_s=60, node="n0")],
        noise=Noise(lost_s=10),
    )
    found = by_id(result)
    assert found["b"].end_s == 100
    assert found["a"].end_s == 60 + 70  # 40 done, 10 lost
    assert found["a"].preemptions == 1
    assert [d.reason for d in result.decisions if d.action == "stop"] == ["node n0 was lost"]
    assert {point.devices for point in result.load} == {4, 8}


def test_jobs_wait_for_ever_if_their_nodes_never_come_back() -> None:
    result = run([job("a", 0, 8, 100)], "2x4", faults=[NodeLost(time_s=40, node="n0")])
    (outcome,) = result.outcomes
    assert (outcome.phase, outcome.end_s) == (JobPhase.WAITING, None)
    assert outcome.reason


def test_crashed_and_cancelled_jobs_free_their_devices() -> None:
    result = run(
        [job("a", 0, 4, 100), job("b", 1, 4, 100), job("c", 2, 4, 10)],
        faults=[JobCrashed(time_s=20, job_id="a"), JobCancelled(time_s=30, job_id="b")],
    )
    found = by_id(result)
    assert (found["a"].phase, found["a"].end_s) == (JobPhase.FAILED, 20)
    assert (found["b"].phase, found["b"].end_s) == (JobPhase.CANCELLED, 30)
    assert found["c"].end_s == 40
    assert result.summary.finished == 1


def test_a_job_cancelled_while_it_waits_never_starts() -> None:
    result = run([job("a", 0, 4, 50), job("b", 1, 4, 9)], faults=[JobCancelled(time_s=5, job_id="b")])
    assert by_id(result)["b"].start_s is None
    assert by_id(result)["b"].queue_s == 4


def test_a_job_larger_than_the_cluster_is_rejected_with_a_reason() -> None:
    result = run([job("a", 0, 5, 10), job("b", 0, 1, 10)])
    assert by_id(result)["a"].phase is JobPhase.REJECTED
    assert "asks for 5 devices" in by_id(result)["a"].reason
    assert (result.summary.rejected, result.summary.admitted) == (1, 1)


def test_no_jobs_is_an_empty_result() -> None:
    result = run([])
    assert result.outcomes == ()
    assert (result.summary.jobs, result.summary.makespan_s, result.summary.utilization) == (0, 0, 0)


def test_noise_changes_times_and_is_the_same_for_the_same_seed() -> None:
    jobs = [job(f"j{i}", float(i), 2, 100.0) for i in range(6)]
    plain, noisy = run(jobs), run(jobs, noise=Noise(step_time=0.1), seed=3)
    assert noisy.outcomes == run(jobs, noise=Noise(step_time=0.1), seed=3).outcomes
    assert noisy.outcomes != plain.outcomes
    assert noisy.outcomes != run(jobs, noise=Noise(step_time=0.1), seed=4).outcomes


def test_wrong_estimates_mislead_the_order_not_the_work() -> None:
    jobs = [job(f"j{i}", 0.0, 4, 100.0 + i) for i in range(8)]
    right = run(jobs, policy="srtf")
    wrong = run(jobs, policy="srtf", noise=Noise(estimate=1.0), seed=1)
    assert [o.start_s for o in wrong.outcomes] != [o.start_s for o in right.outcomes]
    assert sum(o.device_s for o in wrong.outcomes) == sum(o.device_s for o in right.outcomes)


def test_every_decision_has_a_reason_and_every_job_its_story() -> None:
    result = run([job("a", 0, 4, 100), job("b", 10, 4, 20)], policy="srtf")
    assert all(decision.reason for decision in result.decisions)
    story = [d.action for d in result.decisions if d.job_id == "a"]
    assert story == ["admit", "launch", "stop", "launch", "finished"]


def test_spans_tell_where_each_job_was() -> None:
    result = run([job("a", 0, 6, 100)], "2x4")
    (span,) = result.spans
    assert (span.start_s, span.end_s, span.workers, span.nodes) == (0, 100, 6, (("n0", 4), ("n1", 2)))


def test_moving_aside_costs_an_overhead_and_makes_the_newcomer_compact() -> None:
    """Two half-empty nodes: one job moves over, so that the newcomer gets a whole node."""
    jobs = [
        job("a", 0, 2, 10),
        job("b", 0, 2, 100),
        job("c", 0, 2, 10),
        job("d", 0, 2, 100),
        job("e", 20, 4, 10),
    ]
    result = run(jobs, "2x4", placement="buddy", overhead=3)
    found = by_id(result)
    (moved,) = [d.job_id for d in result.decisions if d.action == "move"]
    stayed = "b" if moved == "d" else "d"
    assert (found["e"].end_s, found[stayed].end_s, found[moved].end_s) == (33, 103, 106)
    assert [len(span.nodes) for span in result.spans if span.job_id == "e"] == [1]
    places = [(span.start_s, span.nodes) for span in result.spans if span.job_id == moved]
    assert [start for start, _ in places] == [0, 20]
    assert places[0][1] != places[1][1]
    assert found[moved].rescales == result.summary.rescales == 1


def test_attained_service_outlasts_a_preemption() -> None:
    """Two jobs sink through the queues in turns; limits at 812.5 s and 1800 s of four devices."""
    result = run([job("a", 0, 4, 2000), job("b", 1, 4, 2000)], policy="tiresias")
    starts = {name: [span.start_s for span in result.spans if span.job_id == name] for name in "ab"}
    assert starts == {"a": [0, 1625, 3600], "b": [812.5, 2612.5, 3800]}


def test_finish_time_fairness_is_one_for_a_job_alone() -> None:
    result = run([job("a", 0, 4, 100)])
    assert result.outcomes[0].fair_share == pytest.approx(1.0)


def test_finish_time_fairness_counts_who_competes() -> None:
    result = run([job("a", 0, 4, 100), job("b", 0, 4, 100)])
    first, second = result.outcomes
    assert first.fair_share == pytest.approx(0.5)  # twice the demand there are devices for
    assert second.fair_share == pytest.approx(200 / (100 * 1.5))


def test_a_policy_that_hands_out_more_than_there_is_is_caught() -> None:
    class Greedy(FifoPolicy):
        def allocate(self, table: Table) -> Shares:
            return Shares(workers=table.gpus + 4)

    with pytest.raises(SimulationError):
        run([job("a", 0, 4, 10)], policy=Greedy())


def test_unknown_names_are_refused() -> None:
    for how in ({"overhead": "free"}, {"placement": "anywhere"}, {"policy": "best"}):
        with pytest.raises(UnknownNameError):
            run([job("a", 0, 1, 1)], **how)


def test_a_fault_on_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(SimulationError, match="no node named"):
        run([job("a", 0, 1, 10)], faults=[NodeLost(time_s=1, node="n9")])
