"""What a policy is: a frozen bag of parameters with two pure methods. The list of all of them is in `registry.py`.

To add one: a file named as in its paper, a frozen dataclass with `name` and `paper`, `allocate` and
`explain`, a line in `POLICIES` (policies/registry.py), a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from concertina.core.job import Reserved
from concertina.policies.placement import Spot
from concertina.policies.table import Floats, Ints, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a policy wants, row by row of the table it was handed: the allocation by columns."""

    workers: Ints
    """Devices for each job; 0: wait. A policy that only starts jobs hands `table.held` back and lists them in
    `starts`."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """Row -> device type: waiting jobs that get what they asked for, whatever `workers` says."""
    kind: Ints | None = None
    """Index of the device type for each job. None: the only type there is."""
    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Row -> devices by type, for jobs that shall hold several types at once."""
    spots: Mapping[int, tuple[Spot, ...]] = field(default_factory=dict)
    """Row -> nodes, for jobs the policy itself has placed; the others are placed after it."""
    moves: frozenset[int] = frozenset()
    """Rows to be placed anew although they keep their number of devices: closer together they are faster."""
    level: Ints | None = None
    stamp: Floats | None = None
    """Notes to find in the table of the next round. None: as they were."""
    reserved: Mapping[str, Reserved] | None = None
    """Job id -> what is planned for it; to be found there as well. None: as it was."""
    tried: int = 0
    """Jobs filled in beyond once each, where a promise was in danger: what the decision cost more than usual."""
    wake_s: float | None = None
    """Run a round at this time even if nothing happens before."""


class Policy(Protocol):
    """Shares out devices. Holds parameters, remembers nothing."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def paper(self) -> str:
        """Where it comes from."""
        ...

    @property
    def admission(self) -> str:
        """The admission rule it wants (see `admission.py`)."""
        ...

    def allocate(self, table: Table) -> Shares:
        """Say how many devices each job shall hold."""
        ...

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """Why this job goes from `before` to `after` devices (or, if both are equal, stays there)."""
        ...


def explainer_of(policy: Policy, table: Table) -> Callable[[int, int, int], str]:
    """`policy.explain` for many rows of one table: (row, before, after) -> why.

    A policy that has to look at all jobs in order to explain one has a method `explainer`, which looks once.
    """
    make: Callable[[Table], Callable[[int, int, int], str]] | None = getattr(policy, "explainer", None)
    return partial(policy.explain, table) if make is None else make(table)
