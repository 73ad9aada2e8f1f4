"""Workers -> speed. Tables of measured throughput, the law of diminishing returns, envelopes, interpolation.

Speed is in iterations of the job's global batch per second. Readers find the numbers, this module uses them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One measured figure."""

    model: str
    batch_size: int
    """Global batch size (over all workers)."""
    device_type: str
    workers: int
    iterations_per_s: float
    nodes: int | None = None
    """Nodes the workers were spread over. None: as few as possible (compact)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """Measured figures, as a reader found them."""

    rows: tuple[ThroughputRow, ...]
    name: str = ""
