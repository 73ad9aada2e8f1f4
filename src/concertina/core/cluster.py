"""What the scheduler decides over: nodes and devices, a snapshot of the moment, and answers to it.

A *slot* is a place for one worker; an *allocation* says how many, a *placement* says which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.core.errors import InvalidClusterError
from concertina.core.job import JobView

_PART = re.compile(r"(?P<nodes>\d+)x(?P<slots>\d+)(?::(?P<type>[\w.\-]+))?(?:@(?P<rack>[\w.\-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine."""

    id: str
    device_type: str
    slots: int
    """Devices (or places for one worker) in it."""
    rack: str = ""
    """Nodes of one rack are nearer to one another than to the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All nodes, in a fixed order. The topology is a tree: cluster, device type, rack, node, slot."""

    nodes: tuple[Node, ...]
    types: tuple[str, ...] = field(init=False)
    """Device types in order of first appearance."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InvalidClusterError(seen="", needed="at least one node")
        if len({n.id for n in self.nodes}) < len(self.nodes):
            raise InvalidClusterError(seen=", ".join(n.id for n in self.nodes), needed="node ids that differ")
        if any(n.slots < 1 for n in self.nodes):
            raise InvalidClusterError(seen="a node without slots", needed="1 slot or more in each node")
        object.__setattr__(self, "types", tuple(dict.fromkeys(n.device_type for n in self.nodes)))

    @property
    def slots(self) -> int:
        """Devices in all."""
        return sum(n.slots for n in self.nodes)

    def slots_of(self, device_type: str) -> int:
        """Devices of one type."""
        return sum(n.slots for n in self.nodes if n.device_type == device_type)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read `16x8:A100,4x4:T4` (nodes x slots : type, optionally @rack); without a type it is `gpu`."""
        nodes: list[Node] = []
        for part in text.split(","):
            found = _PART.fullmatch(part.strip())
            if found is None:
                raise InvalidClusterError(
                    seen=text, needed="NODESxSLOTS[:TYPE[@RACK]], comma separated: 16x8:A100,4x4:T4"
                )
            start = len(nodes)
            nodes += [
                Node(
                    id=f"n{start + i}",
                    device_type=found["type"] or "gpu",
                    slots=int(found["slots"]),
                    rack=found["rack"] or "",
                )
                for i in range(int(found["nodes"]))
            ]
        return cls(nodes=tuple(nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a round may know. Whoever takes it sets `now`; nobody in a round reads a clock."""

    now: float
    cluster: Cluster
    jobs: tuple[JobView, ...]
    """Every job that has not ended, in order of submission."""
    down: frozenset[str] = frozenset()
    """Ids of nodes that are lost or drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """How many devices of which type each job shall hold. Jobs that are not named hold none."""

    workers: Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which nodes each job's devices are on: job id -> ((node id, devices), ...)."""

    nodes: Mapping[str, tuple[tuple[str, int], ...]]
