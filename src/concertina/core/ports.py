"""The edges of the scheduler, as protocols. Live backends and the simulator stand behind the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from concertina.core.cluster import Snapshot
from concertina.core.job import JobSpec
from concertina.core.plan import Action


class Clock(Protocol):
    """Seconds that only rise."""

    def now(self) -> float:
        """The time."""
        ...


class Backend(Protocol):
    """What carries out a plan."""

    def apply(self, actions: Sequence[Action]) -> None:
        """Start, resize, move and stop jobs, in this order."""
        ...

    def observe(self) -> Snapshot:
        """What is there now."""
        ...


class JobStore(Protocol):
    """Where submitted jobs are kept."""

    def add(self, job: JobSpec) -> None:
        """Keep a job."""
        ...

    def jobs(self) -> Sequence[JobSpec]:
        """All jobs, in order of submission."""
        ...
