"""What a round answers: jobs taken or refused, and the actions that bring the cluster to what was decided.

Every one carries a reason, the same sentence in the log, the REST answer and the dashboard. A plan is applied
in its order: what gives devices back stands before what takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from concertina.core.cluster import Allocation, Placement
from concertina.core.job import Reserved

Nodes: TypeAlias = tuple[tuple[str, int], ...]
"""(node id, devices) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The job is taken."""

    job_id: str
    reason: str
    promised_s: float | None = None
    """The deadline that will be kept; None where none was promised."""
    reserved: Mapping[str, Reserved] = field(default_factory=dict)
    """Job id -> what is planned for this job and for others so that it can be kept."""
    work: int = field(default=0, compare=False)
    """What the answer took, in jobs filled in: counted, not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The job is refused: a value, not an error."""

    job_id: str
    reason: str
    earliest_s: float | None = None
    """The earliest deadline that could have been promised."""
    work: int = field(default=0, compare=False)
    """What the answer took, in jobs filled in: counted, not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Give devices to a job that has none."""

    job_id: str
    nodes: Nodes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Change the number of devices of a job that goes on running."""

    job_id: str
    before: Nodes
    nodes: Nodes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Change the devices of a job, not their number."""

    job_id: str
    before: Nodes
    nodes: Nodes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Take all devices from a job; it waits for its next turn."""

    job_id: str
    before: Nodes
    reason: str


Action: TypeAlias = Launch | Resize | Move | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one round decided. On a settled cluster there are no actions."""

    actions: tuple[Action, ...] = ()
    """In this order they bring the cluster to `allocation` and `placement`."""
    answers: tuple[Admitted | Rejected, ...] = ()
    allocation: Allocation = field(default_factory=lambda: Allocation(workers={}))
    placement: Placement = field(default_factory=lambda: Placement(nodes={}))
    notes: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Job id -> (level, stamp): to be kept and shown to the next round in `JobView`."""
    reserved: Mapping[str, Reserved] | None = None
    """Job id -> what is planned for it: likewise. None: as it was."""
    wake_s: float | None = None
    """Run the next round at this time even if nothing happens before."""
