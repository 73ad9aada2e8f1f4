"""Throughput tables of ElasticFlow, Gavel and Shockwave, Pollux, Rubick, and ours, told by their columns.

A figure of 0 or NaN means that the configuration did not run (too large for the memory, as a rule): left
out and counted. Device types are written in capitals, whatever the file does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import ThroughputRow, ThroughputTable
from concertina.simulator.readers.format import Shape, recognise
from concertina.simulator.readers.gavel import batch_size
from concertina.simulator.readers.pollux import read_step_times, read_validation, shape_of, speeds
from concertina.simulator.readers.problems import (
    BadRowsError,
    RowProblem,
    RowRuleError,
    RowUnusableError,
    TraceError,
)
from concertina.simulator.readers.row import Row
from concertina.simulator.readers.rubick import curve_name
from concertina.simulator.readers.source import Sheet, read_sheet

T = TypeVar("T")

_ELASTICFLOW = Shape(
    name="elasticflow", required=("gpu_type", "model", "global_batch_size", "num_gpus", "iterations_per_s")
)
_GAVEL = Shape(name="gavel", required=("gpu_type", "consolidated", "model", "batch_size", "num_gpus", "steps_per_s"))
_POLLUX = Shape(name="pollux", required=("model", "placement", "local_bsz", "step_time_s", "sync_time_s"))
_RUBICK = Shape(
    name="rubick",
    required=("model", "exec_plan", "placement", "iter_time_s"),
    optional=("forward", "overlap_sync", "optimize"),
)
_PLAIN = Shape(
    name="concertina",
    required=("model", "batch_size", "device_type", "workers", "iterations_per_s"),
    optional=("nodes",),
)
TABLES = (_ELASTICFLOW, _GAVEL, _POLLUX, _RUBICK, _PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A table and what of its file was not used."""

    table: ThroughputTable
    format: str
    skipped: tuple[RowProblem, ...] = ()
    left_out: tuple[RowProblem, ...] = ()


def read_throughput(path: Path, jobs: Iterable[JobSpec] = (), *, skip_bad_rows: bool = False) -> Throughput:
    """Read a table. Pollux's step times are interpolated to the batch sizes of `jobs`; others need none."""
    if not path.exists():
        raise TraceError(source=str(path), seen="no such file", needed="a table of measured speeds")
    sheet = read_sheet(path)
    shape = recognise(TABLES, source=sheet.source, header=sheet.header, kind="throughput table")
    bad: list[RowProblem] = [sheet.cut_short] if sheet.cut_short else []
    left_out: list[RowProblem] = []
    if shape is _POLLUX:
        rows = _pollux_rows(sheet, path.parent, jobs, bad)
    elif shape is _RUBICK:
        rows = _rubick_rows(_usable(sheet, _rubick_cell, bad, left_out))
    else:
        rows = list(_usable(sheet, _PARSERS[shape.name], bad, left_out))
    if bad and not skip_bad_rows:
        raise BadRowsError(source=sheet.source, problems=bad)
    if not rows:
        seen = "no model and batch size of the trace" if shape is _POLLUX else "no usable row"
        raise TraceError(source=sheet.source, seen=seen, needed="at least one throughput figure")
    return Throughput(
        table=ThroughputTable(rows=tuple(rows), name=sheet.source),
        format=shape.name,
        skipped=tuple(bad),
        left_out=tuple(left_out),
    )


def _usable(sheet: Sheet, parse: Callable[[Row], T], bad: list[RowProblem], left_out: list[RowProblem]) -> Iterator[T]:
    where = {column: index for index, column in enumerate(sheet.header)}
    for number, cells in sheet.rows:
        row = Row(number, cells, where)
        try:
            row.check_width()
            yield parse(row)
        except RowRuleError as error:
            bad.append(error.problem)
        except RowUnusableError as error:
            left_out.append(error.problem)


def _speed(row: Row, column: str) -> float:
    if row.text(column).lower() == "nan":
        row.unusable(column, "NaN: the configuration did not run", "more than 0")
    value = row.number_of(column, unit="per second")
    return value if value > 0 else row.unusable(column, "0: the configuration did not run", "more than 0")


def _elasticflow_row(row: Row) -> ThroughputRow:
    return ThroughputRow(
        model=row.text("model"),
        batch_size=row.count_of("global_batch_size"),
        device_type=row.text("gpu_type").upper(),
        workers=row.count_of("num_gpus"),
        iterations_per_s=_speed(row, "iterations_per_s"),
    )


def _gavel_row(row: Row) -> ThroughputRow:
    """Not consolidated means: on more nodes than needed; how many is not said, so 2 is the honest least."""
    workers = row.count_of("num_gpus")
    compact = row.count_of("consolidated", least=0) == 1
    if not compact and workers == 1:
        row.unusable("consolidated", "one device, not consolidated", "two devices or more to spread")
    return ThroughputRow(
        model=row.text("model"),
        batch_size=batch_size(row),
        device_type=row.text("gpu_type").upper(),
        workers=workers,
        iterations_per_s=_speed(row, "steps_per_s"),
        nodes=None if compact else 2,
    )


def _plain_row(row: Row) -> ThroughputRow:
    return ThroughputRow(
        model=row.text("model"),
        batch_size=row.count_of("batch_size"),
        device_type=row.text("device_type"),
        workers=row.count_of("workers"),
        iterations_per_s=_speed(row, "iterations_per_s"),
        nodes=row.count_of("nodes") if row.optional("nodes") else None,
    )


_PARSERS: dict[str, Callable[[Row], ThroughputRow]] = {
    "elasticflow": _elasticflow_row,
    "gavel": _gavel_row,
    "concertina": _plain_row,
}


def _pollux_rows(sheet: Sheet, folder: Path, jobs: Iterable[JobSpec], bad: list[RowProblem]) -> list[ThroughputRow]:
    try:
        measured = read_step_times(sheet, folder)
        validation = read_validation(folder)
    except RowRuleError as error:
        bad.append(error.problem)
        return []
    pairs = sorted({(job.model, job.batch_size) for job in jobs if job.model and job.batch_size})
    return [row for model, batch in pairs for row in speeds(measured, validation, model, batch)]


def _rubick_cell(row: Row) -> tuple[str, int, int, float]:
    workers, nodes = shape_of(row, "placement")
    name = curve_name(row.text("model"), row.text("exec_plan"))
    return name, workers, nodes, 1 / _speed(row, "iter_time_s")


def _rubick_rows(cells: Iterable[tuple[str, int, int, float]]) -> list[ThroughputRow]:
    """Averaged over placements with as many nodes; the fewest nodes measured are a count's compact form."""
    speeds_of: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for model, workers, nodes, speed in cells:
        speeds_of[model, workers][nodes].append(speed)
    return [
        ThroughputRow(
            model=model,
            batch_size=1,
            device_type="A800",
            workers=workers,
            iterations_per_s=_harmonic_mean(found),
            nodes=None if nodes == min(by_nodes) else nodes,
        )
        for (model, workers), by_nodes in sorted(speeds_of.items())
        for nodes, found in sorted(by_nodes.items())
    ]


def _harmonic_mean(values: Sequence[float]) -> float:
    return len(values) / math.fsum(1 / value for value in values)
