"""What the page shows is binned from the result without losing what a person would look for."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase
from concertina.simulator import report_data
from concertina.simulator.metrics import JobOutcome, LoadPoint, Span
from concertina.simulator.report_data import IDLE, Grid, TimeAxis


def _outcome(job: str, **fields: object) -> JobOutcome:
    given: dict[str, object] = {
        "job_id": job, "user": "", "gpus": 1, "submit_s": 0.0, "start_s": 0.0, "end_s": 10.0,
        "deadline_s": None,
        "soft": False, "phase": JobPhase.FINISHED, "queue_s": 0.0, "device_s": 10.0, "rescales": 0,
        "preemptions": 0, "workers_last": 1, "alone_s": 10.0, "fair_share": 1.0, "reason": "done", **fields,
    }  # fmt: skip
    return JobOutcome(**given)  # type: ignore[arg-type]


def _point(time: float, used: int, waiting: int = 0, devices: int = 8) -> LoadPoint:
    return LoadPoint(time_s=time, devices=devices, used=used, running=used, waiting=waiting, efficiency=0.0)


def _span(job: str, start: float, end: float, *nodes: tuple[str, int]) -> Span:
    return Span(job_id=job, start_s=start, end_s=end, workers=sum(n for _, n in nodes), device_type="gpu", nodes=nodes)


def _cells(grid: Grid) -> list[list[int]]:
    raw = zlib.decompress(base64.b64decode(grid["cells"]))
    kind = "<i2" if grid["bytes"] == 2 else "<i4"
    found: list[list[int]] = np.frombuffer(raw, dtype=kind).reshape(grid["rows"], grid["columns"]).tolist()
    return found


AXIS = TimeAxis(start_s=0.0, end_s=40.0, bins=4)


def test_load_is_averaged_over_time_not_over_points() -> None:
    points = [_point(0, 0), _point(9, 8), _point(10, 4), _point(30, 0)]
    curve = report_data.load_curve(points, AXIS)
    assert curve["used"] == pytest.approx([0.8, 4.0, 4.0, 0.0])
    assert curve["time_s"] == [5.0, 15.0, 25.0, 35.0]


def test_a_short_queue_is_not_lost_between_two_bins() -> None:
    points = [_point(0, 0, 3), _point(1, 0, 0), _point(21, 0, 50), _point(22, 0, 0)]
    curve = report_data.load_curve(points, AXIS)
    assert curve["waiting_max"] == [3, 0, 50, 0]
    assert curve["waiting"] == pytest.approx([0.3, 0.0, 5.0, 0.0])


def test_the_average_adds_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 40, 500))
    times[0] = 0.0
    values = rng.integers(0, 9, 500)
    curve = report_data.load_curve([_point(t, int(v)) for t, v in zip(times, values, strict=True)], AXIS)
    area = float(np.sum(values * np.diff(np.append(times, 40.0))))
    assert sum(curve["used"]) * AXIS.step_s == pytest.approx(area, rel=1e-4)


def test_the_grid_shows_who_held_each_device() -> None:
    spans = [_span("a", 0, 20, ("n0", 2)), _span("b", 20, 40, ("n0", 1)), _span("c", 10, 40, ("n1", 1))]
    grid = report_data.device_grid(Cluster.parse("2x2"), spans, {"a": 0, "b": 1, "c": 2}, AXIS)
    assert _cells(grid) == [[0, 0, 1, 1], [0, 0, IDLE, IDLE], [IDLE, 2, 2, 2], [IDLE] * 4]
    assert grid["labels"] == ["n0.0", "n0.1", "n1.0", "n1.1"]


def test_a_job_that_changes_keeps_the_slots_it_has() -> None:
    spans = [
        _span("a", 0, 10, ("n0", 1)),
        _span("b", 0, 20, ("n0", 1)),
        _span("b", 20, 30, ("n0", 2)),
        _span("b", 30, 40, ("n0", 1)),
        _span("c", 30, 40, ("n0", 1)),
        _span("d", 0, 20, ("n1", 1)),
        _span("e", 0, 30, ("n1", 1)),
        _span("e", 30, 40, ("n1", 1)),
    ]
    grid = report_data.device_grid(Cluster.parse("2x2"), spans, {name: i for i, name in enumerate("abcde")}, AXIS)
    assert _cells(grid) == [[0, IDLE, 1, 1], [1, 1, 1, 2], [3, 3, IDLE, IDLE], [4, 4, 4, 4]]


def test_a_bin_belongs_to_the_job_that_held_it_longest_and_is_idle_below_half() -> None:
    times = {"a": (0, 4), "b": (4, 10), "c": (10, 17), "d": (17, 20), "e": (20, 24)}
    spans = [_span(job, start, end, ("n0", 1)) for job, (start, end) in times.items()]
    grid = report_data.device_grid(Cluster.parse("1x1"), spans, {name: i for i, name in enumerate(times)}, AXIS)
    assert _cells(grid) == [[1, 2, IDLE, IDLE]]


def test_many_devices_share_rows() -> None:
    cluster = Cluster.parse("128x8")
    grid = report_data.device_grid(cluster, [_span("a", 0, 40, ("n5", 8))], {"a": 0}, AXIS)
    assert (grid["rows"], grid["devices_per_row"], grid["labels"][5]) == (128, 8, "n5.0 - n5.7")
    assert [row for row, cells in enumerate(_cells(grid)) if cells != [IDLE] * 4] == [5]


def test_numbers_above_the_small_range_survive() -> None:
    number = {f"j{i}": i for i in range(40_000)}
    grid = report_data.device_grid(Cluster.parse("1x1"), [_span("j39999", 0, 40, ("n0", 1))], number, AXIS)
    assert _cells(grid) == [[39_999] * 4]


def test_the_distribution_goes_from_the_shortest_to_the_longest() -> None:
    found = report_data.distribution([_outcome(str(i), end_s=float(i)) for i in range(1, 1001)])
    assert (found["jct_s"][0], found["jct_s"][-1]) == (1.0, 1000.0)
    assert (found["share"][0], found["share"][-1]) == (0.0, 1.0)
    assert len(found["share"]) == report_data.QUANTILES


def test_no_finished_job_has_no_distribution() -> None:
    assert report_data.distribution([_outcome("a", phase=JobPhase.REJECTED, end_s=None)])["jct_s"] == []


def test_every_job_with_a_deadline_is_counted_once() -> None:
    outcomes = [
        _outcome("met", deadline_s=10.0),
        _outcome("late", deadline_s=9.0),
        _outcome("refused", deadline_s=9.0, phase=JobPhase.REJECTED, end_s=None),
        _outcome("failed", deadline_s=90.0, phase=JobPhase.FAILED),
        _outcome("none"),
    ]
    assert report_data.deadlines(outcomes) == {"met": 1, "late": 1, "rejected": 1, "unfinished": 1, "none": 1}


def test_the_jobs_that_waited_longest_are_named() -> None:
    outcomes = [_outcome(f"j{i}", queue_s=float(i), deadline_s=8.0) for i in range(50)]
    named = report_data.worst(outcomes)
    assert [job["job"] for job in named] == [f"j{i}" for i in range(49, 49 - report_data.NAMED, -1)]
    assert named[0]["late_s"] == 2.0
