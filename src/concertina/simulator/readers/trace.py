"""A trace, and the way to it: a file (or a part of one) in, jobs and a count of what was left out back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from concertina.core.cluster import Cluster
from concertina.core.errors import InvalidJobError
from concertina.core.job import JobSpec
from concertina.simulator.readers import registry
from concertina.simulator.readers.format import TraceFormat
from concertina.simulator.readers.problems import (
    BadRowsError,
    RowProblem,
    RowRuleError,
    RowUnusableError,
    TraceError,
)
from concertina.simulator.readers.row import Row
from concertina.simulator.readers.select import Selection, parse_source
from concertina.simulator.readers.source import Sheet, read_sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs, and all that the file they come from implies."""

    name: str
    """Short: the file's name without its ending, with the selection."""
    format: str
    jobs: tuple[JobSpec, ...]
    """In the order of the file."""
    rows: tuple[int, ...]
    """The row of each job in the file, from 1."""
    skipped: tuple[RowProblem, ...] = ()
    """Rows that break the rules of the format: skipped because that was asked for."""
    left_out: tuple[RowProblem, ...] = ()
    """Rows that the format allows but that hold nothing to schedule."""
    gpus_column: str = "num_gpu"
    cluster: str = "16x8"
    """The cluster to simulate when none is given."""
    throughput: Path | None = None
    """A throughput table that was found near the trace and belongs to it."""

    @property
    def device_type(self) -> str:
        """The type of the first nodes of the implied cluster."""
        return Cluster.parse(self.cluster).types[0]


def read_trace(source: str, *, skip_bad_rows: bool = False) -> Trace:
    """Read `FILE` or `FILE#column=value,...`.

    Rows that break the rules of their format raise `BadRowsError`, or are skipped and counted if that is
    asked for.
    """
    selection = parse_source(source)
    sheet = read_sheet(selection.path)
    fmt = registry.format_of(sheet)
    selection.check(sheet, fmt)
    kept, bad, left_out = _read_rows(sheet, fmt, selection)
    if bad and not skip_bad_rows:
        raise BadRowsError(source=sheet.source, problems=bad)
    if not kept:
        raise TraceError(
            source=sheet.source,
            seen=f"no usable row{f' for #{selection.text}' if selection.text else ''}"
            + (f" ({len(bad) + len(left_out)} left out, first: {(bad or left_out)[0]})" if bad or left_out else ""),
            needed="at least one job",
            hint="choose other values after #" if selection.text else "check that this is the file you meant",
        )
    jobs = tuple(job for _, job in kept)
    if selection.shift:
        jobs = shift_to_zero(jobs)
    return Trace(
        name=selection.name,
        format=fmt.name,
        jobs=jobs,
        rows=tuple(number for number, _ in kept),
        skipped=tuple(bad),
        left_out=tuple(left_out),
        gpus_column=fmt.gpus_column,
        cluster=fmt.cluster(jobs),
        throughput=_near(selection.path.parent, fmt),
    )


def _read_rows(
    sheet: Sheet, fmt: TraceFormat, selection: Selection
) -> tuple[list[tuple[int, JobSpec]], list[RowProblem], list[RowProblem]]:
    parse = fmt.parser(selection.path.parent)
    kept: list[tuple[int, JobSpec]] = []
    bad: list[RowProblem] = []
    left_out: list[RowProblem] = []
    first_row: dict[str, int] = {}
    for row in _selected(sheet, selection, bad):
        try:
            job = parse(row)
        except RowRuleError as error:
            bad.append(error.problem)
            continue
        except RowUnusableError as error:
            left_out.append(error.problem)
            continue
        except InvalidJobError as error:
            bad.append(RowProblem(row=row.number, column=error.field, seen=repr(error.seen), needed=error.needed))
            continue
        before = first_row.setdefault(job.id, row.number)
        if before != row.number:
            seen = f"{job.id!r} was already used in row {before}"
            bad.append(RowProblem(row=row.number, column=fmt.id_column, seen=seen, needed="ids that differ"))
        elif selection.max_gpus is None or job.gpus <= selection.max_gpus:
            kept.append((row.number, job))
        if selection.first is not None and len(kept) == selection.first:
            break
    if sheet.cut_short:
        bad.append(sheet.cut_short)
    return kept, bad, left_out


def _selected(sheet: Sheet, selection: Selection, bad: list[RowProblem]) -> Iterator[Row]:
    where = {column: index for index, column in enumerate(sheet.header)}
    wanted = [(where[column], value) for column, value in selection.values]
    for number, cells in sheet.rows:
        row = Row(number, cells, where)
        try:
            row.check_width()
        except RowRuleError as error:
            bad.append(error.problem)
            continue
        if all(cells[at].strip() == value for at, value in wanted):
            yield row


def _near(folder: Path, fmt: TraceFormat) -> Path | None:
    return next((folder / name for name in fmt.throughput if (folder / name).is_file()), None)


def shift_to_zero(jobs: Sequence[JobSpec]) -> tuple[JobSpec, ...]:
    """The same jobs on a clock that starts with the first submission."""
    start = min(job.submit_s for job in jobs)
    return tuple(
        replace(
            job,
            submit_s=job.submit_s - start,
            deadline_s=None if job.deadline_s is None else job.deadline_s - start,
        )
        for job in jobs
    )


def fit_to(trace: Trace, cluster: Cluster, *, skip_bad_rows: bool = False) -> Trace:
    """The trace without jobs too large for the cluster; an error unless skipping was asked for."""
    most = max(cluster.slots_of(device_type) for device_type in cluster.types)
    too_large = [
        RowProblem(
            row=row,
            column=trace.gpus_column,
            seen=f"job {job.id!r} asks for {job.gpus} devices",
            needed=f"at most {most}, the devices of one type in the cluster",
        )
        for row, job in zip(trace.rows, trace.jobs, strict=True)
        if job.gpus > most
    ]
    if not too_large:
        return trace
    if not skip_bad_rows:
        hint = "give a larger --cluster, or pass --skip-bad-rows to leave such jobs out and count them"
        raise BadRowsError(source=trace.name, problems=too_large, hint=hint)
    fitting = [(r, j) for r, j in zip(trace.rows, trace.jobs, strict=True) if j.gpus <= most]
    if not fitting:
        raise TraceError(source=trace.name, seen=str(too_large[0]), needed="at least one job that fits")
    return replace(
        trace,
        rows=tuple(row for row, _ in fitting),
        jobs=tuple(job for _, job in fitting),
        skipped=(*trace.skipped, *too_large),
    )
