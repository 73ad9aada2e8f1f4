"""What goes otherwise than planned: step times that vary, estimates that are wrong, nodes and jobs that fail.

Every draw is a function of the seed and of what it is drawn for, not of the order of events, so that two
policies meet the same luck.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TypeAlias

from concertina.core.errors import SimulationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far reality is from the tables. All zero: not at all."""

    step_time: float = 0.0
    """Coefficient of variation of a job's step time from one stretch of running to the next (log-normal)."""
    estimate: float = 0.0
    """Coefficient of variation of the estimated work against the true work (log-normal, mean 1)."""
    lost_s: float = 0.0
    """Seconds of progress a job loses with a node."""

    def __post_init__(self) -> None:
        for name in ("step_time", "estimate", "lost_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SimulationError(f"noise {name} is {value!r}, needed a finite number, 0 or more")

    def speed_factor(self, seed: int, job: str, stretch: int) -> float:
        """What the job's speed is multiplied with in its n-th stretch of running."""
        if not self.step_time:
            return 1.0
        return 1.0 / _lognormal(random.Random(f"{seed}/speed/{job}/{stretch}"), self.step_time)

    def estimate_factor(self, seed: int, job: str) -> float:
        """What the job's work is multiplied with to give what is believed."""
        if not self.estimate:
            return 1.0
        return _lognormal(random.Random(f"{seed}/estimate/{job}"), self.estimate)


def _lognormal(draw: random.Random, variation: float) -> float:
    """A factor with mean 1 and this coefficient of variation."""
    sigma2 = math.log1p(variation * variation)
    return math.exp(draw.gauss(-sigma2 / 2, math.sqrt(sigma2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone; the jobs on it lose all their devices."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturned:
    """A node is back."""

    time_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCrashed:
    """A job ended by itself before its work was done."""

    time_s: float
    job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled:
    """A job was taken back by its user."""

    time_s: float
    job_id: str


Fault: TypeAlias = NodeLost | NodeReturned | JobCrashed | JobCancelled
