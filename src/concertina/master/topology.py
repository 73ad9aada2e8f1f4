"""Where workers are, and which links lie between two of them: Elan's topology tree (IV-2, fig. 9).

A tree of racks, hosts, sockets, PCIe switches and workers. What lies between two workers are the edges from each up to
where their paths meet. An edge carries both directions independently; `Lanes` says how many transfers fit on it.
"""

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum

from concertina.core.errors import UsageError

Path = tuple[str, ...]  # (rack, host, socket, switch, worker), or the beginning of one: a place in the tree
Link = tuple[str, Path]  # "up" or "down", and the lower end of the edge

WORKER_DEPTH = 5
UNLIMITED = 1 << 30


class Level(IntEnum):
    """Where two paths meet, nearest first."""

    SWITCH = 1
    SOCKET = 2
    HOST = 3
    RACK = 4
    REST = 5


class Via(StrEnum):
    PEER = "peer to peer"  # from device memory to device memory, below one PCIe switch
    SHARED_MEMORY = "shared memory"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker runs. What is not known stays empty, and counts as the same as with others that do not know."""

    host: str
    rack: str = ""
    socket: str = ""
    switch: str = ""

    def __post_init__(self) -> None:
        if not self.host:
            raise UsageError("a worker's place has no host, needed its name: transfers choose the nearest source by it")

    def path(self, worker: str) -> Path:
        return self.rack, self.host, self.socket, self.switch, worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How many transfers at once a link of each kind carries without one slowing the other, per direction."""

    worker_out: int = 1  # a source serves while it trains
    worker_in: int = 4  # chunks from several sources are what fills a newcomer's memory fastest
    switch: int = 1
    socket: int = 1  # the link on which Elan met contention
    host: int = 1  # network card
    rack: int = 4  # uplink

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UsageError(
                    f"{field.name} carries {getattr(self, field.name)} transfers at once, needed 1 or more"
                )

    def of(self, link: Link) -> int:
        direction, path = link
        if len(path) == WORKER_DEPTH:
            return self.worker_out if direction == "up" else self.worker_in
        if not path[-1]:
            return UNLIMITED  # not a real link: its place is not known
        return (self.rack, self.host, self.socket, self.switch)[len(path) - 1]


def meeting(a: Path, b: Path) -> Path:
    """The lowest place that both are below."""
    depth = 0
    while depth < WORKER_DEPTH - 1 and a[depth] == b[depth]:
        depth += 1
    return a[:depth]


def level(a: Path, b: Path) -> Level:
    return Level(WORKER_DEPTH - len(meeting(a, b)))


def via(a: Path, b: Path) -> Via:
    near = level(a, b)
    if near is Level.SWITCH and a[-2]:
        return Via.PEER
    return Via.SHARED_MEMORY if near <= Level.HOST else Via.NETWORK


def links(source: Path, target: Path) -> tuple[Link, ...]:
    """The links that a transfer occupies."""
    top = len(meeting(source, target))
    up = tuple(("up", source[:depth]) for depth in range(WORKER_DEPTH, top, -1))
    return up + tuple(("down", target[:depth]) for depth in range(top + 1, WORKER_DEPTH + 1))
