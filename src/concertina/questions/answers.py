"""What questions are answered with: plain values, each with a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from concertina.policies.table import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A time that is not known exactly, absolute and in seconds like everything in a snapshot."""

    low_s: float
    """One run in ten is earlier."""
    expected_s: float
    """The middle one. Infinite: not in sight."""
    high_s: float
    """One run in ten is later."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Band:
        """The band of several runs, where infinite means: it did not come to that.

        Of nine runs the first and the last: the next one would be outside on each side once in ten times.
        """
        ordered = np.sort(np.asarray(times, dtype=np.float64))
        low, middle, high = (_quantile(ordered, part) for part in (0.1, 0.5, 0.9))
        return cls(low_s=low, expected_s=middle, high_s=high)


def _quantile(ordered: Floats, part: float) -> float:
    """Interpolated between neighbours, unless one of them is infinite."""
    at = min(max(part * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    below, above = float(ordered[math.floor(at)]), float(ordered[math.ceil(at)])
    if math.isinf(above):
        return above if at - math.floor(at) >= 0.5 or math.isinf(below) else below
    return below + (above - below) * (at - math.floor(at))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eta:
    """When a job is expected to get devices and to end."""

    job_id: str
    start: Band
    """When it next holds devices; the present for a job that runs."""
    end: Band
    runs: int
    """How many runs of the simulator this rests on."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """A job that ends later because of another."""

    job_id: str
    before_s: float
    """When it would end without."""
    after_s: float
    """When it ends with; infinite: not in sight."""

    @property
    def by_s(self) -> float:
        """How much later."""
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What would happen if a job were submitted now."""

    job_id: str
    taken: bool
    """Whether it would be taken as it is asked for, its deadline included."""
    earliest_s: float | None
    """The earliest deadline that can be promised, near enough; None: this policy (or this cluster) promises none."""
    start: Band | None
    end: Band | None
    """Expected times if it is taken, with the deadline asked for or else with `earliest_s`; None: it can not run."""
    delays: tuple[Delay, ...]
    """The jobs that would end later, the longest delay first."""
    runs: int
    reason: str
    """Why it would be taken or refused."""
