"""What of a result a person can see: bins, quantiles and counts small enough for a page.

A screen has about a thousand columns, so neither fifteen thousand jobs nor a hundred thousand load points are
drawn one by one. Everything here is arithmetic on a `Result`; how it looks is the page's business.
"""

from __future__ import annotations

import base64
import heapq
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase
from concertina.simulator.metrics import JobOutcome, LoadPoint, Result, Span

COLUMNS = 1600
"""Bins of time in the picture of the devices."""
ROWS = 128
"""Most rows in it; where there are more devices, neighbours share one."""
BINS = 500
"""Bins of time of the curves."""
QUANTILES = 200
"""Points of a distribution."""
NAMED = 12
"""Jobs named in the list of those that fared worst."""
IDLE = -1

Floats = NDArray[np.float64]


class Grid(TypedDict):
    """Which job holds which devices: `cells` is a matrix of numbers, -1 for idle.

    Little-endian, deflated, in base64: neighbours are mostly equal, so it shrinks to a tenth.
    """

    start_s: float
    step_s: float
    rows: int
    columns: int
    devices_per_row: int
    labels: list[str]
    bytes: int
    """Of one cell: 2 or 4."""
    cells: str


class Curve(TypedDict):
    """Values at the middle of each bin."""

    time_s: list[float]
    used: list[float]
    waiting: list[float]
    waiting_max: list[int]
    devices: list[float]


class Deadlines(TypedDict):
    """Jobs with a deadline, by what became of them."""

    met: int
    late: int
    rejected: int
    unfinished: int
    none: int


class Worst(TypedDict):
    """One job of the list of those that fared worst."""

    job: str
    gpus: int
    queue_s: float
    jct_s: float | None
    late_s: float | None
    rescales: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """Equal bins from the first submission to the last end."""

    start_s: float
    end_s: float
    bins: int

    @property
    def step_s(self) -> float:
        """Width of one bin."""
        return (self.end_s - self.start_s) / self.bins


def time_axis(results: Sequence[Result], bins: int) -> TimeAxis:
    """One axis for all policies of a trace, so that pictures can be compared by eye."""
    starts = [outcome.submit_s for result in results for outcome in result.outcomes]
    ends = [outcome.end_s for result in results for outcome in result.outcomes if outcome.end_s is not None]
    start = min(starts, default=0.0)
    return TimeAxis(start_s=start, end_s=max((*ends, start + 1.0)), bins=bins)


def busy_until(results: Sequence[Result], share: float = 0.1) -> float:
    """The last moment at which a job waited or that share of the devices was in use, under any policy.

    What follows is a few long jobs in an empty cluster.
    """
    return max(
        (
            after.time_s
            for result in results
            for point, after in pairwise(result.load)
            if point.waiting or point.used >= share * point.devices
        ),
        default=0.0,
    )


def load_curve(points: Sequence[LoadPoint], axis: TimeAxis) -> Curve:
    """Means over time for each bin, and the most jobs that waited at any moment of it."""
    if not points:
        return {"time_s": [], "used": [], "waiting": [], "waiting_max": [], "devices": []}
    times = np.array([point.time_s for point in points])
    edges = np.linspace(axis.start_s, axis.end_s, axis.bins + 1)
    waiting = np.array([point.waiting for point in points], dtype=np.float64)
    return {
        "time_s": [_short(t) for t in (edges[:-1] + edges[1:]) / 2],
        "used": _means(times, np.array([p.used for p in points], dtype=np.float64), edges),
        "waiting": _means(times, waiting, edges),
        "waiting_max": [int(value) for value in _maxima(times, waiting, edges)],
        "devices": _means(times, np.array([p.devices for p in points], dtype=np.float64), edges),
    }


def _means(times: Floats, values: Floats, edges: Floats) -> list[float]:
    """Mean of a step function over each bin; before its first step it has its first value."""
    widths = np.diff(times)
    area = np.concatenate(([0.0], np.cumsum(values[:-1] * widths)))
    at = np.clip(np.searchsorted(times, edges, side="right") - 1, 0, len(times) - 1)
    total = area[at] + values[at] * (edges - times[at])
    return [_short(value) for value in np.diff(total) / np.diff(edges)]


def _maxima(times: Floats, values: Floats, edges: Floats) -> Floats:
    """Largest value of a step function in each bin, the one it enters with included."""
    first = np.searchsorted(times, edges[:-1], side="left")
    entering = values[np.clip(np.searchsorted(times, edges[:-1], side="right") - 1, 0, len(times) - 1)]
    padded = np.append(values, -np.inf)
    inside = np.maximum.reduceat(padded, np.minimum(first, len(values)))
    after = np.searchsorted(times, edges[1:], side="left")
    return np.where(after > first, np.maximum(inside, entering), entering)


def _short(value: float) -> float:
    """Five digits are more than a screen shows."""
    return float(f"{value:.6g}")


def distribution(outcomes: Sequence[JobOutcome]) -> dict[str, list[float]]:
    """Completion times at evenly spaced shares of the finished jobs."""
    times = np.array([jct for outcome in outcomes if (jct := outcome.jct_s) is not None])
    if not len(times):
        return {"share": [], "jct_s": []}
    shares = np.linspace(0.0, 1.0, min(QUANTILES, max(len(times), 2)))
    return {
        "share": [_short(share) for share in shares],
        "jct_s": [_short(value) for value in np.quantile(times, shares)],
    }


def deadlines(outcomes: Sequence[JobOutcome]) -> Deadlines:
    """What became of the jobs with a deadline."""
    counts: Deadlines = {"met": 0, "late": 0, "rejected": 0, "unfinished": 0, "none": 0}
    for outcome in outcomes:
        if outcome.deadline_s is None:
            counts["none"] += 1
        elif outcome.phase is JobPhase.REJECTED:
            counts["rejected"] += 1
        elif outcome.jct_s is None:
            counts["unfinished"] += 1
        elif outcome.deadline_met:
            counts["met"] += 1
        else:
            counts["late"] += 1
    return counts


def worst(outcomes: Sequence[JobOutcome]) -> list[Worst]:
    """The jobs that waited longest."""
    found = heapq.nlargest(NAMED, outcomes, key=lambda outcome: (outcome.queue_s, outcome.job_id))
    return [
        {
            "job": outcome.job_id,
            "gpus": outcome.gpus,
            "queue_s": _short(outcome.queue_s),
            "jct_s": outcome.jct_s,
            "late_s": (
                None
                if outcome.deadline_s is None or outcome.end_s is None
                else _short(outcome.end_s - outcome.deadline_s)
            ),
            "rescales": outcome.rescales,
            "reason": outcome.reason,
        }
        for outcome in found
    ]


def device_grid(cluster: Cluster, spans: Sequence[Span], number: Mapping[str, int], axis: TimeAxis) -> Grid:
    """Which job held each group of devices for most of each bin; `number` gives each job its number."""
    per_row = math.ceil(cluster.slots / ROWS)
    cells = _holders(cluster, spans, number, axis, per_row)
    return {
        "start_s": axis.start_s,
        "step_s": axis.step_s,
        "rows": len(cells),
        "columns": axis.bins,
        "devices_per_row": per_row,
        "labels": _row_labels(cluster, per_row),
        "bytes": cells.itemsize,
        "cells": base64.b64encode(zlib.compress(cells.tobytes(), 6)).decode("ascii"),
    }


def _holders(
    cluster: Cluster, spans: Sequence[Span], number: Mapping[str, int], axis: TimeAxis, per_row: int
) -> NDArray[np.signedinteger]:
    """By row of devices and bin of time, the number of the job that held most; IDLE where half was held by nobody."""
    rows = math.ceil(cluster.slots / per_row)
    best = np.zeros((rows, axis.bins))
    held = np.zeros((rows, axis.bins))
    cells = np.full((rows, axis.bins), IDLE, dtype="<i2" if len(number) < 32_768 else "<i4")
    step = axis.step_s
    for slot, start, end, job in _slot_spans(cluster, spans):
        first = max(int((start - axis.start_s) / step), 0)
        last = min(int((end - axis.start_s) / step), axis.bins - 1)
        if end <= start or first > last:
            continue
        cover = np.full(last - first + 1, step)
        cover[0] -= max(start - axis.start_s - first * step, 0.0)
        cover[-1] -= max(axis.start_s + (last + 1) * step - end, 0.0)
        row, columns = slot // per_row, slice(first, last + 1)
        held[row, columns] += cover
        wins = cover > best[row, columns]
        best[row, columns] = np.where(wins, cover, best[row, columns])
        cells[row, columns] = np.where(wins, number[job], cells[row, columns])
    capacity = np.full((rows, 1), per_row * step)
    capacity[-1] = (cluster.slots - per_row * (rows - 1)) * step
    cells[held < capacity / 2] = IDLE
    return cells


def _row_labels(cluster: Cluster, per_row: int) -> list[str]:
    names = [f"{node.id}.{slot}" for node in cluster.nodes for slot in range(node.slots)]
    firsts = names[::per_row]
    if per_row == 1:
        return firsts
    lasts = [names[min(i + per_row, len(names)) - 1] for i in range(0, len(names), per_row)]
    return [f"{first} - {last}" for first, last in zip(firsts, lasts, strict=True)]


def _slot_spans(cluster: Cluster, spans: Sequence[Span]) -> list[tuple[int, float, float, str]]:
    """(slot, start, end, job) for every device a span holds: a job keeps its slots of a node where it can."""
    offset: dict[str, int] = {}
    total = 0
    for node in cluster.nodes:
        offset[node.id] = total
        total += node.slots
    slots_of = {node.id: range(offset[node.id], offset[node.id] + node.slots) for node in cluster.nodes}
    free_at = [-math.inf] * total
    last_job = [""] * total
    found = []
    for span in sorted(spans, key=lambda span: span.start_s):
        for node_id, count in span.nodes:
            order = sorted(
                slots_of[node_id],
                key=lambda slot: (free_at[slot] > span.start_s, last_job[slot] != span.job_id, slot),
            )
            for slot in order[:count]:
                free_at[slot], last_job[slot] = span.end_s, span.job_id
                found.append((slot, span.start_s, span.end_s, span.job_id))
    return found
