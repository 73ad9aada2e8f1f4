"""A trace made ready: the cluster it runs on, the speeds of its jobs, and a note of all that was left out.

What a user does not say is taken from the trace: its format implies a cluster, and a throughput table that
lies near it is used. Whatever was decided so is said in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from concertina.core.cluster import Cluster
from concertina.core.errors import NoCurveError
from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import Curves, ThroughputTable
from concertina.simulator.generate import PREFIX, synthetic_trace
from concertina.simulator.readers import RowProblem, Trace, TraceError, fit_to, read_throughput, read_trace
from concertina.simulator.readers.select import expand
from concertina.simulator.readers.source import read_sheet

_NAMED = 3
"""Rows named in a note; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a policy is tried on."""

    name: str
    jobs: tuple[JobSpec, ...]
    cluster: Cluster
    throughput: ThroughputTable | None = None
    notes: tuple[str, ...] = ()


def load_scenarios(
    sources: Sequence[str],
    *,
    cluster: str | None = None,
    throughput: Path | None = None,
    skip_bad_rows: bool = False,
) -> list[Scenario]:
    """All traces that the sources name, ready to be run; `column=*` names several."""
    expanded = [one for source in sources for one in _expanded(source)]
    scenarios = [
        load_scenario(source, cluster=cluster, throughput=throughput, skip_bad_rows=skip_bad_rows)
        for source in expanded
    ]
    return _with_distinct_names(scenarios, expanded)


def _expanded(source: str) -> list[str]:
    if source.startswith(PREFIX) or "=*" not in source:
        return [source]
    return expand(source, read_sheet(Path(source.rpartition("#")[0])))


def _with_distinct_names(scenarios: list[Scenario], sources: Sequence[str]) -> list[Scenario]:
    """Files of one name in different folders are told apart by the folder, what is left by a number."""
    names = [scenario.name for scenario in scenarios]
    folders = ["" if source.startswith(PREFIX) else Path(source).absolute().parent.name for source in sources]
    longer = [
        f"{folder}/{name}" if folder and names.count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]
    final = [
        f"{name} ({longer[: i + 1].count(name)})" if longer.count(name) > 1 else name for i, name in enumerate(longer)
    ]
    return [replace(scenario, name=name) for scenario, name in zip(scenarios, final, strict=True)]


def load_scenario(
    source: str,
    *,
    cluster: str | None = None,
    throughput: Path | None = None,
    skip_bad_rows: bool = False,
) -> Scenario:
    """Read one trace and join it with its cluster and its throughput table."""
    trace = synthetic_trace(source) if source.startswith(PREFIX) else read_trace(source, skip_bad_rows=skip_bad_rows)
    notes: list[str] = []
    table = _table(trace, throughput, skip_bad_rows, notes)
    where = Cluster.parse(_typed(cluster or trace.cluster, trace, table))
    if cluster is None:
        notes.append(f"cluster {trace.cluster}, as the trace implies (another: --cluster)")
    trace = fit_to(trace, where, skip_bad_rows=skip_bad_rows)
    jobs, unknown, by_law = _with_speed(trace, where, table)
    _note_rows(notes, "skipped", trace.skipped)
    _note_rows(notes, "left out", (*trace.left_out, *unknown))
    if by_law:
        notes.append(f"{by_law} jobs are not in the table at their size: duration and scaling law instead")
    return Scenario(name=trace.name, jobs=jobs, cluster=where, throughput=table, notes=tuple(notes))


def _table(trace: Trace, given: Path | None, skip_bad_rows: bool, notes: list[str]) -> ThroughputTable | None:
    path = given or trace.throughput
    if path is None:
        return None
    found = read_throughput(path, trace.jobs, skip_bad_rows=skip_bad_rows)
    if given is None:
        notes.append(f"throughput from {path.name}, found near the trace (another: --throughput)")
    _note_rows(notes, f"skipped in {path.name}", found.skipped)
    if found.left_out:
        notes.append(f"{len(found.left_out)} figures of {path.name} not used, first: {found.left_out[0]}")
    return found.table


def _note_rows(notes: list[str], what: str, rows: Sequence[RowProblem]) -> None:
    if rows:
        named = "; ".join(str(row) for row in rows[:_NAMED])
        more = "; ..." if len(rows) > _NAMED else ""
        notes.append(f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} {what}: {named}{more}")


def _typed(text: str, trace: Trace, table: ThroughputTable | None) -> str:
    """`16x8` without a device type means the type the trace implies, or the only one in the table."""
    Cluster.parse(text)  # so that a mistake is shown as it was typed
    kind = trace.device_type
    types = sorted({row.device_type for row in table.rows}) if table else []
    if kind == "gpu" and len(types) == 1:
        kind = types[0]
    typed = ",".join(_with_type(part, kind) for part in text.split(","))
    there = Cluster.parse(typed).types
    if types and not set(there) & set(types):
        raise TraceError(
            source=table.name if table else "",
            seen=f"throughput of {', '.join(types)} alone",
            needed=f"figures for {', '.join(there)}, the devices of the cluster",
            hint=f"try --cluster with one of {', '.join(types)}, or another --throughput",
        )
    return typed


def _with_type(part: str, kind: str) -> str:
    if ":" in part or kind == "gpu":
        return part
    size, at, rack = part.partition("@")
    return f"{size}:{kind}{at}{rack}"


def _with_speed(
    trace: Trace, cluster: Cluster, table: ThroughputTable | None
) -> tuple[tuple[JobSpec, ...], tuple[RowProblem, ...], int]:
    """Jobs with a known speed; rows without; how many jobs lean on their duration for want of a figure."""
    curves = Curves(table)
    kept: list[JobSpec] = []
    unknown: list[RowProblem] = []
    by_law = 0
    for row, job in zip(trace.rows, trace.jobs, strict=True):
        if _knows_speed(curves, job, cluster):
            kept.append(job)
        elif job.duration_s is not None:
            kept.append(replace(job, work=None))
            by_law += 1
        else:
            seen = f"{job.gpus} devices for {job.model}, batch {job.batch_size}: no throughput known"
            needed = "a figure for it" if table else "a throughput table (--throughput)"
            unknown.append(RowProblem(row=row, column=trace.gpus_column, seen=seen, needed=needed))
    if not kept:
        raise TraceError(
            source=trace.name,
            seen=f"no job with a known speed, first: {unknown[0]}",
            needed="a duration for each job, or a throughput table that has its model",
            hint="pass one with --throughput",
        )
    return tuple(kept), tuple(unknown), by_law


def _knows_speed(curves: Curves, job: JobSpec, cluster: Cluster) -> bool:
    try:
        curve, _ = curves.of(job)
    except NoCurveError:
        return False
    return any(curve.speed(kind, job.gpus) > 0 for kind in job.device_types or cluster.types)
