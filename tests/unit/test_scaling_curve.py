"""Workers to speed: the law, tables, envelopes, interpolation and refusal."""

from __future__ import annotations

import pytest

from concertina.core.errors import NoCurveError
from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import (
    Curves,
    ScalingCurve,
    ThroughputRow,
    ThroughputTable,
    law,
)


def row(workers: int, speed: float, *, nodes: int | None = None, kind: str = "A100") -> ThroughputRow:
    return ThroughputRow(
        model="m", batch_size=64, device_type=kind, workers=workers, iterations_per_s=speed, nodes=nodes
    )


def spec(**fields: object) -> JobSpec:
    base = {"id": "j", "submit_s": 0.0, "gpus": 2, "model": "m", "batch_size": 64, "work": 100.0}
    return JobSpec(**{**base, **fields})  # type: ignore[arg-type]


def test_the_law_keeps_four_fifths_at_every_doubling() -> None:
    assert law(1) == 1.0
    assert law(2) == pytest.approx(1.6)
    assert law(8) == pytest.approx(8 * 0.8**3)


def test_a_curve_interpolates_between_and_refuses_outside() -> None:
    curve = ScalingCurve(points={"A100": {2: 10.0, 4: 16.0}})
    assert curve.speed("A100", 3) == pytest.approx(13.0)
    assert curve.speed("A100", 1) == 0.0
    assert curve.speed("A100", 8) == 0.0
    assert curve.speed("T4", 2) == 0.0
    assert curve.counts("A100") == (2, 4)


def test_the_fastest_count_is_the_smallest_of_equals_within_the_limit() -> None:
    curve = ScalingCurve(points={"A100": {1: 5.0, 2: 9.0, 4: 9.0, 8: 7.0}})
    assert curve.fastest("A100", 8) == 2
    assert curve.fastest("A100", 1) == 1
    assert curve.fastest("A100", 0) == 0


def test_spread_speeds_are_used_where_they_were_measured() -> None:
    table = ThroughputTable(rows=(row(4, 20.0), row(4, 12.0, nodes=2)))
    curve, work = Curves(table).of(spec())
    assert work == 100.0
    assert curve.speed("A100", 4) == 20.0
    assert curve.speed("A100", 4, 1) == 20.0
    assert curve.speed("A100", 4, 2) == 12.0


def test_a_count_measured_only_spread_counts_as_compact_on_the_fewest_nodes() -> None:
    table = ThroughputTable(rows=(row(8, 30.0, nodes=2), row(8, 20.0, nodes=4)))
    curve, _ = Curves(table).of(spec())
    assert curve.speed("A100", 8) == 30.0


def test_a_job_without_a_table_follows_the_law_through_its_duration() -> None:
    curve, work = Curves().of(spec(duration_s=50.0, gpus=4))
    assert work == 50.0
    assert curve.speed("anything", 4) == pytest.approx(1.0)
    assert curve.speed("anything", 8) == pytest.approx(1.6)


def test_a_job_nothing_is_known_about_is_refused_with_what_the_table_has() -> None:
    table = ThroughputTable(rows=(row(1, 3.0),))
    with pytest.raises(NoCurveError, match="batch sizes 64"):
        Curves(table).of(spec(batch_size=128))
    with pytest.raises(NoCurveError, match="pass a throughput table"):
        Curves(table).of(spec(model="other"))
