"""The terms on which deadlines are promised: margins, what a change costs, the reserve, quotas.

Parameters and the arithmetic on them; nothing here knows jobs or tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from concertina.core.cluster import Cluster
from concertina.core.errors import UsageError
from concertina.policies.filling import ChangeCost

EVERYBODY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a promise allows for."""

    cost: ChangeCost = field(default_factory=ChangeCost)
    spare_s: float = 90.0
    """Seconds kept free before a deadline: workers may once be started anew at the worst moment."""
    spare_share: float = 0.03
    """Part of the time to the deadline kept free: noise, further changes."""
    defended: float = 0.8
    """Part of the spare that a new promise must leave to the old ones."""
    headroom: float = 0.08
    """How much slower than expected a job may turn out and still be in time on all devices it can use."""
    elastic: bool = True
    """Whether jobs run on other numbers of devices than they asked for."""
    give_up: bool = True
    """Whether a job that can not be in time any more waits for those that can."""
    attempts: int = 3
    """How many other arrangements are tried before a promise is given up or refused."""
    fewer: tuple[int, ...] = (1, 2, 3, 8)
    """If all arrangements leave a job late: plan as if so many devices were not there. More devices can lead
    the filling astray; what was possible without them still is."""
    effort: int = 8000
    """Jobs that a decision or an answer may fill in for other arrangements than the first, so that many promises that
    can not be kept any more do not hold everybody up. Counted, not timed: it is the same on every machine."""
    halvings: int = 6
    """How closely the earliest deadline is looked for that could be promised."""
    reserve: tuple[tuple[str, int], ...] = ()
    """(device type, devices) that no promise may rely on, so that they can be lost (see `reserve_of`)."""
    quotas: tuple[tuple[str, int], ...] = ()
    """(user, devices) that the promised jobs of a user may ask for together; user `*` is everybody else."""

    def __post_init__(self) -> None:
        for who, count in (*self.reserve, *self.quotas):
            if count < 0:
                raise UsageError(f"{count} devices for {who or 'users without a name'}: needed 0 or more")

    def quota(self, user: str) -> int | None:
        """Devices that this user's promised jobs may ask for; None: any number."""
        return dict(self.quotas).get(user, dict(self.quotas).get(EVERYBODY))

    def kept_back(self, types: Sequence[str]) -> list[int]:
        """The reserve by type."""
        return [dict(self.reserve).get(kind, 0) for kind in types]

    def due(self, now: float, deadline: float, part: float = 1.0) -> float:
        """When a job must be done to be in time with this part of the spare left."""
        return deadline - part * (self.spare_s + self.spare_share * max(deadline - now, 0.0))

    def deadline(self, now: float, finish: float) -> float:
        """The earliest deadline that can be promised to a job that can be done at `finish`."""
        return (finish + self.spare_s - self.spare_share * now) / (1.0 - self.spare_share)


def reserve_of(cluster: Cluster, nodes: int) -> tuple[tuple[str, int], ...]:
    """The devices of any `nodes` nodes: for each type of its largest ones, since nobody knows which are lost."""
    if not 0 <= nodes < len(cluster.nodes):
        there = len(cluster.nodes)
        raise UsageError(f"a reserve of {nodes} nodes on a cluster of {there}: needed 0 to {there - 1}")
    sizes = {kind: [node.slots for node in cluster.nodes if node.device_type == kind] for kind in cluster.types}
    return tuple((kind, sum(sorted(slots)[-nodes:])) for kind, slots in sizes.items()) if nodes else ()
