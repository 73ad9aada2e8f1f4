"""What a trace format is, and how a file's format is told from its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from concertina.core.job import JobSpec
from concertina.simulator.readers.problems import TraceError
from concertina.simulator.readers.row import Row

ParseRow = Callable[[Row], JobSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """One kind of file. `parser` gets the folder of the trace, for formats that need a second file."""

    name: str
    about: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    parser: Callable[[Path], ParseRow]
    id_column: str = ""
    """The column whose values must differ between jobs. Empty: jobs are named by their row."""
    gpus_column: str = "num_gpu"
    """The column to name when a job is larger than the cluster."""
    select_by: tuple[str, ...] = ()
    """Columns that split a file into several traces."""
    must_select: bool = False
    """Whether the rows of a file make no sense together: each value of `select_by` is a trace of its own."""
    cluster: Callable[[Sequence[JobSpec]], str]
    """The cluster to simulate when none is given."""
    throughput: tuple[str, ...] = ()
    """Where a fitting throughput table usually lies, seen from the trace's folder."""


def only_rows(parse: ParseRow) -> Callable[[Path], ParseRow]:
    """A parser for formats that need nothing but the row."""
    return lambda _folder: parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The columns of one kind of file: what recognition looks at."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def distance(self, header: Sequence[str]) -> int:
        """Columns that are missing plus columns nobody knows."""
        seen, needed = set(header), set(self.required)
        return len(needed - seen) + len(seen - needed - set(self.optional))

    def missing(self, header: Sequence[str]) -> tuple[str, ...]:
        """Required columns that the header lacks."""
        return tuple(column for column in self.required if column not in header)


def recognise(shapes: Sequence[Shape], *, source: str, header: Sequence[str], kind: str) -> Shape:
    """The shape whose columns fit best. Extra columns are fine, missing ones are not.

    The distance counts both, so that a file that lost one column of a rich format is not taken for a poorer
    one.
    """
    best = min(shapes, key=lambda shape: shape.distance(header))
    missing = best.missing(header)
    if not missing:
        return best
    if 2 * len(missing) > len(best.required):
        shown = f"{', '.join(header[:8])}{', ...' if len(header) > 8 else ''}"
        raise TraceError(
            source=source,
            seen=f"the columns {shown} are those of no known {kind}",
            needed=f"one of {', '.join(shape.name for shape in shapes)}",
            hint=f"the nearest, {best.name}, needs {', '.join(best.required)}",
        )
    raise TraceError(
        source=source,
        seen=f"row 0 (the header) lacks column {' and '.join(missing)}",
        needed=f"{', '.join(best.required)}, as it looks like format {best.name}",
        hint="add the column, or check that the first line is the header",
    )


def nodes_of_eight(jobs: Sequence[JobSpec], device_type: str) -> str:
    """The smallest power of two of 8-device nodes that holds the mean demand and the largest job."""
    first = min(job.submit_s for job in jobs)
    span = max(job.submit_s for job in jobs) - first
    device_s = sum(job.gpus * (job.duration_s or 0.0) for job in jobs)
    wanted = max(device_s / span if span > 0 else 0.0, max(job.gpus for job in jobs))
    nodes = 1
    while nodes * 8 < wanted:
        nodes *= 2
    return f"{nodes}x8:{device_type}"
