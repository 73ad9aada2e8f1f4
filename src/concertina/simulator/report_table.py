"""A comparison as text: a table for people, objects for programs.

Every trace gets its table, one line per policy; the best figure of a column is bold where a difference can be
seen. `as_json` gives the objects of `simulate --json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from concertina.simulator.metrics import Result, Summary

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.1f} h"
    return f"{seconds / _DAY:.1f} d"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "-"


def _millis(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of the table."""

    title: str
    of: Callable[[Summary], float]
    write: Callable[[float], str]
    better: int = 0
    """1: more is better, -1: less is better, 0: neither."""
    deadlines: bool = False
    """Whether it says something only where jobs have deadlines."""
    weight: int = 9
    """The lightest columns are left out first where a screen is narrow."""


COLUMNS = (
    Column(title="done", weight=5, of=lambda s: s.finished, write=_count, better=1),
    Column(title="in time", of=lambda s: s.deadline_met, write=_count, better=1, deadlines=True),
    Column(title="broken", of=lambda s: s.admitted_missed, write=_count, better=-1, deadlines=True),
    Column(title="refused", weight=7, of=lambda s: s.rejected, write=_count, better=-1, deadlines=True),
    Column(title="JCT", of=lambda s: s.avg_jct_s, write=duration, better=-1),
    Column(title="99 %", weight=6, of=lambda s: s.p99_jct_s, write=duration, better=-1),
    Column(title="wait", of=lambda s: s.avg_queue_s, write=duration, better=-1),
    Column(title="makespan", weight=6, of=lambda s: s.makespan_s, write=duration, better=-1),
    Column(title="used", weight=8, of=lambda s: s.utilization, write=_percent, better=1),
    Column(title="rescales", weight=4, of=lambda s: s.rescales, write=_count),
    Column(title="ms/round", weight=2, of=lambda s: s.decision_ms_mean, write=_millis),
    Column(title="took", weight=3, of=lambda s: s.wall_s, write=duration),
)


def tables(results: Sequence[Result], *, width: int = 120) -> list[Table]:
    """One table for each trace, in the order in which they appear, with as many columns as there is room."""
    by_trace: dict[str, list[Result]] = {}
    for result in results:
        by_trace.setdefault(result.summary.trace, []).append(result)
    return [_table(name, found, width) for name, found in by_trace.items()]


def _table(name: str, results: Sequence[Result], width: int) -> Table:
    first = results[0]
    kinds = ", ".join(f"{first.cluster.slots_of(kind)} {kind}" for kind in first.cluster.types)
    with_deadlines = any(outcome.deadline_s is not None for outcome in first.outcomes)
    columns = [column for column in COLUMNS if with_deadlines or not column.deadlines]
    summaries = [result.summary for result in results]
    columns = _fitting(columns, summaries, width)
    title = Text(f"{name}: {first.summary.jobs:,} jobs on {kinds}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    best = [_best(column, summaries) for column in columns]
    for summary in summaries:
        cells = [column.write(column.of(summary)) for column in columns]
        table.add_row(
            summary.policy,
            *(Text(cell, style="bold" if cell == top else "") for cell, top in zip(cells, best, strict=True)),
        )
    return table


def _fitting(columns: list[Column], summaries: Sequence[Summary], width: int) -> list[Column]:
    """The heaviest columns for which there is room, in their order."""
    room = width - max(len("policy"), *(len(summary.policy) for summary in summaries)) - 4
    kept: list[Column] = []
    for column in sorted(columns, key=lambda column: -column.weight):
        need = 3 + max(len(column.title), *(len(column.write(column.of(summary))) for summary in summaries))
        if need <= room:
            room -= need
            kept.append(column)
    return [column for column in columns if column in kept]


def _best(column: Column, summaries: Sequence[Summary]) -> str | None:
    """The best figure as it is written; None where all are written alike."""
    values = [column.of(summary) for summary in summaries if math.isfinite(column.of(summary))]
    if not column.better or len({column.write(value) for value in values}) < 2:
        return None
    return column.write(max(values) if column.better > 0 else min(values))


LEGEND = (
    "done: jobs finished; in time: deadlines met; broken: admitted, but the deadline was missed; refused: at "
    "admission; JCT: mean time from submission to completion; 99 %: its 99th percentile; wait: mean time "
    "without devices; used: share of device time held by jobs; took: wall time of the simulation"
)


def as_json(summary: Summary) -> str:
    """One object on one line, with the keys that stay fixed. JSON knows no NaN: no figure is null."""
    return json.dumps(
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in summary.as_dict().items()
        }
    )
