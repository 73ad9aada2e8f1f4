"""What a job specification accepts, how its phases follow one another, and how clusters are written."""

from __future__ import annotations

import pytest

from concertina.core.cluster import Cluster, Node
from concertina.core.errors import ConcertinaError, IllegalMoveError, InvalidClusterError, InvalidJobError
from concertina.core.job import MOVES, JobPhase, JobSpec, JobView, check_move


def job(**fields: object) -> JobSpec:
    return JobSpec(**{"id": "a", "submit_s": 0.0, "gpus": 1, "duration_s": 10.0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("submit_s", -1.0),
        ("submit_s", float("nan")),
        ("duration_s", float("inf")),
        ("deadline_s", -5.0),
        ("gpus", 0),
        ("batch_size", 0),
        ("min_workers", 0),
        ("id", ""),
    ],
)
def test_a_job_with_an_impossible_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidJobError) as caught:
        job(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ConcertinaError)


def test_a_job_needs_work_or_a_duration() -> None:
    with pytest.raises(InvalidJobError, match="iterations or a duration"):
        job(duration_s=None)


def test_least_workers_may_not_exceed_most() -> None:
    with pytest.raises(InvalidJobError, match="min_workers"):
        job(min_workers=4, max_workers=2)


def test_soft_needs_a_deadline() -> None:
    with pytest.raises(InvalidJobError, match="soft"):
        job(soft=True)
    assert job(soft=True, deadline_s=5.0).soft


def test_phases_move_only_as_the_table_says() -> None:
    check_move("a", (JobPhase.SUBMITTED, JobPhase.WAITING), JobPhase.RUNNING)
    with pytest.raises(IllegalMoveError, match="submitted -> waiting") as caught:
        check_move("a", (JobPhase.SUBMITTED, JobPhase.WAITING), JobPhase.REJECTED)
    assert caught.value.wanted == "rejected"


def test_every_end_has_no_way_out() -> None:
    assert {phase for phase in MOVES if phase.is_end} == {
        JobPhase.REJECTED,
        JobPhase.FINISHED,
        JobPhase.CANCELLED,
        JobPhase.FAILED,
    }


def test_a_view_counts_workers_over_all_types() -> None:
    view = JobView(spec=job(), phase=JobPhase.RUNNING, workers=(("A100", 4), ("T4", 2)))
    assert view.worker_count == 6


def test_a_cluster_is_read_from_text() -> None:
    cluster = Cluster.parse("2x8:A100@left,1x4:T4")
    assert cluster.types == ("A100", "T4")
    assert (cluster.slots, cluster.slots_of("T4")) == (20, 4)
    assert [node.id for node in cluster.nodes] == ["n0", "n1", "n2"]
    assert cluster.nodes[0].rack == "left"


@pytest.mark.parametrize("text", ["", "8", "x8", "2x8:A 100", "2x8,,1x4", "0x8", "2x0"])
def test_a_cluster_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidClusterError):
        Cluster.parse(text)


def test_node_ids_differ() -> None:
    with pytest.raises(InvalidClusterError, match="differ"):
        Cluster(nodes=(Node(id="a", device_type="x", slots=1), Node(id="a", device_type="x", slots=1)))
