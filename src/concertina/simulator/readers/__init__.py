"""Readers of job traces and throughput tables, each format told by its columns.

`read_trace` and `read_throughput` are the way in; `registry.FORMATS` lists what is understood.
"""

from concertina.simulator.readers.plain import write_trace
from concertina.simulator.readers.problems import BadRowsError, RowProblem, TraceError
from concertina.simulator.readers.throughput import Throughput, read_throughput
from concertina.simulator.readers.trace import Trace, fit_to, read_trace

__all__ = [
    "BadRowsError",
    "RowProblem",
    "Throughput",
    "Trace",
    "TraceError",
    "fit_to",
    "read_throughput",
    "read_trace",
    "write_trace",
]
