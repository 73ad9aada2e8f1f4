"""Every format there is. Adding one: write its file, add it here, give it a row in the tests."""

from __future__ import annotations

from concertina.simulator.readers.chronus import CHRONUS
from concertina.simulator.readers.elasticflow import ARTIFACT, ITP, ITP_RAW
from concertina.simulator.readers.format import Shape, TraceFormat, recognise
from concertina.simulator.readers.gavel import GAVEL, SHOCKWAVE
from concertina.simulator.readers.philly import PHILLY
from concertina.simulator.readers.plain import PLAIN
from concertina.simulator.readers.pollux import POLLUX
from concertina.simulator.readers.problems import TraceError
from concertina.simulator.readers.rubick import RUBICK
from concertina.simulator.readers.source import Sheet
from concertina.simulator.readers.throughput import TABLES
from concertina.simulator.readers.tiresias import TIRESIAS

FORMATS: dict[str, TraceFormat] = {
    fmt.name: fmt
    for fmt in (ITP, ITP_RAW, ARTIFACT, PHILLY, CHRONUS, GAVEL, POLLUX, RUBICK, SHOCKWAVE, TIRESIAS, PLAIN)
}

_SHAPES = tuple(Shape(name=fmt.name, required=fmt.required, optional=fmt.optional) for fmt in FORMATS.values())


def format_of(sheet: Sheet) -> TraceFormat:
    """The format whose columns the sheet has."""
    table = next((shape for shape in TABLES if not shape.missing(sheet.header)), None)
    if table is not None:
        raise TraceError(
            source=sheet.source,
            seen=f"a throughput table ({table.name})",
            needed="a job trace",
            hint="pass this file with --throughput",
        )
    fmt = FORMATS[recognise(_SHAPES, source=sheet.source, header=sheet.header, kind="trace").name]
    if not sheet.rows and sheet.cut_short is None:
        raise TraceError(source=sheet.source, seen="a header without rows", needed="at least one job")
    return fmt
