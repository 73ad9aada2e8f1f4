"""The table fits the screen, marks the best, and the JSON has exactly the keys that stay fixed."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.simulator.metrics import Result
from concertina.simulator.report_table import as_json, duration, tables
from concertina.simulator.run import simulate

KEYS = [
    "trace",
    "policy",
    "jobs",
    "finished",
    "admitted",
    "rejected",
    "deadline_met",
    "admitted_missed",
    "avg_jct_s",
    "p50_jct_s",
    "p99_jct_s",
    "avg_queue_s",
    "makespan_s",
    "utilization",
    "cluster_efficiency",
    "rescales",
    "rounds",
    "decision_ms_mean",
    "decision_ms_p95",
    "decision_ms_max",
    "wall_s",
]


def _result(*, deadline: float | None = 60.0, **changes: float) -> Result:
    jobs = [JobSpec(id="a", submit_s=0, gpus=2, duration_s=50, deadline_s=deadline)]
    result = simulate(jobs, cluster=Cluster.parse("1x2:T4"), trace="t")
    return replace(result, summary=replace(result.summary, **changes))  # type: ignore[arg-type]


def _drawn(*results: Result, width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard", legacy_windows=False)
    for table in tables(results, width=width):
        console.print(table)
    return out.getvalue()


def test_json_has_exactly_the_documented_keys_in_order() -> None:
    assert list(json.loads(as_json(_result().summary))) == KEYS


def test_json_has_no_nan() -> None:
    text = as_json(_result(avg_jct_s=float("nan"), p99_jct_s=float("inf")).summary)
    assert json.loads(text)["avg_jct_s"] is None
    assert json.loads(text)["p99_jct_s"] is None


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_nothing_is_cut_off_on_a_narrow_screen(width: int) -> None:
    drawn = _drawn(_result(), _result(avg_jct_s=7000.0, makespan_s=1e7), width=width)
    assert "…" not in drawn
    assert "JCT" in drawn


def test_a_wide_screen_shows_every_figure() -> None:
    drawn = _drawn(_result(), width=160)
    assert all(title in drawn for title in ("in time", "broken", "refused", "makespan", "rescales", "took"))
    assert "t: 1 jobs on 2 T4" in drawn


def test_columns_about_deadlines_are_shown_only_where_there_are_some() -> None:
    assert "refused" not in _drawn(_result(deadline=None), width=160)


def test_the_best_figure_is_bold_where_a_difference_can_be_seen() -> None:
    drawn = _drawn(_result(avg_jct_s=7000.0), _result(avg_jct_s=60.0), width=160)
    assert re.search(r"\x1b\[1m *60 s", drawn)
    assert not re.search(r"\x1b\[1m *117 min", drawn)


def test_equal_figures_are_not_bold() -> None:
    drawn = _drawn(_result(avg_jct_s=60.1), _result(avg_jct_s=60.2), width=160)
    assert "60 s" in drawn
    assert not re.search(r"\x1b\[1m *60 s", drawn)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.25, "0.25 s"),
        (119, "119 s"),
        (3600, "60 min"),
        (7200, "2.0 h"),
        (864_000, "10.0 d"),
        (float("nan"), "-"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
