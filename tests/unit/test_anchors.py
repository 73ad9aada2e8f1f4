"""Ours against what other people's simulators found, job by job, under their assumptions.

What the peers assume is in `benchmarks/anchors.py`; the figures are in docs/results/simulator.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import anchors

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
pytestmark = pytest.mark.skipif(
    not (TRACES / "anchors").is_dir(), reason="the shared traces are not beside the repository"
)


@pytest.mark.parametrize("vc", ["ee9e8c", "b436b2"])
def test_fifo_ends_every_job_when_the_tiresias_authors_do(vc: str) -> None:
    found = anchors.tiresias_fifo(TRACES, vc)
    assert found.differing(seconds=1) == []


@pytest.mark.parametrize("vc", ["ee9e8c", "b436b2"])
def test_2d_las_has_the_tiresias_authors_mean_completion_time(vc: str) -> None:
    found = anchors.tiresias_las(TRACES, vc)
    assert found.mean_ours == pytest.approx(found.mean_theirs, rel=0.05)


def test_2d_las_with_their_late_sinking_ends_every_job_when_they_do() -> None:
    assert anchors.tiresias_las(TRACES, "ee9e8c", late=True).differing(seconds=1) == []


@pytest.mark.parametrize("trace", ["195job", "philly_103959", "cluster10", "elasticVpollux_e"])
def test_edf_meets_the_same_deadlines_as_in_elasticflows_simulator(trace: str) -> None:
    found = anchors.elasticflow(TRACES, trace, "edf")
    assert found.met_ours == found.met_theirs
    assert found.differing(seconds=61, share=0.05) == []  # their ends are rounded up to a slot of 60 s


@pytest.mark.parametrize("trace", ["195job", "philly_103959", "cluster10", "elasticVpollux_e"])
def test_tiresias_meets_as_many_deadlines_as_in_elasticflows_simulator(trace: str) -> None:
    found = anchors.elasticflow(TRACES, trace, "dlas-gpu")
    assert found.met_ours == pytest.approx(found.met_theirs, rel=0.05)
    assert found.mean_ours == pytest.approx(found.mean_theirs, rel=0.05)


@pytest.mark.parametrize("trace", ["195job", "philly_103959"])
def test_gandiva_with_all_their_oddities_ends_every_job_when_they_do(trace: str) -> None:
    found = anchors.gandiva_retold(TRACES, trace)
    assert found.met_ours == found.met_theirs
    assert found.differing(seconds=61) == []


def test_tiresias_on_pollux_has_its_mean_completion_time() -> None:
    found = anchors.pollux_tiresias(TRACES)
    assert found.mean_theirs == pytest.approx(3469.7, abs=0.05)
    assert found.mean_ours == pytest.approx(found.mean_theirs, rel=0.05)


def test_las_on_shockwaves_jobs_has_its_makespan() -> None:
    ours, theirs = anchors.shockwave_las(TRACES)
    assert theirs == pytest.approx(33207.7, abs=0.05)
    assert ours == pytest.approx(theirs, rel=0.05)
