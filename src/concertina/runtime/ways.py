"""From whom a newcomer gets the state where the members are on several hosts, and when. Pure.

Every newcomer is told who has the state and who else is new, so all come to the same plan without a word: the nearest
source first, several at once where lanes are free, in turns where they are not (`master/transfer_plan.py`). Reading
through memory that is shared takes no lane, so it waits for nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.core.formation import Formation
from concertina.master.topology import Lanes, Place
from concertina.master.transfer_plan import plan_transfers
from concertina.runtime.segments import host_of

SHARES = 60  # of the state, which sources divide among them
# A network card carries a stream to or from a newcomer beside what it carries for training, and one more for another.
LANES = Lanes(host=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one newcomer gets the state."""

    sources: tuple[tuple[int, int, int], ...]  # worker, and which of the shares: from, up to
    remote: bool  # over the network
    after: tuple[int, ...] = ()  # newcomers that get theirs before


def way_in(formation: Formation, newcomer: int, racks: Mapping[str, int]) -> Way | None:
    """None where all are on one host: then everybody reads whenever it likes. `racks` of hosts, as far as known."""
    desks = dict(zip(formation.members, formation.desks, strict=True))
    sources = {number: host_of(desk) for number, desk in formation.sources}
    joiners = {number: host_of(desks[number]) for number in formation.joiners}
    if len({*sources.values(), *joiners.values()}) < 2 or newcomer not in joiners:
        return None
    near = {number for number, host in joiners.items() if host in sources.values()}
    asking = near if newcomer in near else joiners.keys() - near
    plan = plan_transfers(
        {_name(number): _place(host, racks) for number, host in sources.items()},
        {_name(number): _place(joiners[number], racks) for number in asking},
        chunks=SHARES,
        lanes=LANES,
    )
    if newcomer in near:
        (nearest, *_) = plan.sources_of(_name(newcomer))
        return Way(sources=((int(nearest), 0, SHARES),), remote=False)
    before: set[int] = set()
    for transfers in plan.rounds:
        ours = tuple((int(t.source), t.first, t.end) for t in transfers if t.target == _name(newcomer))
        if ours:
            return Way(sources=ours, remote=True, after=tuple(sorted(before)))
        before |= {int(t.target) for t in transfers}
    raise AssertionError("every newcomer has its round")


def _place(host: str, racks: Mapping[str, int]) -> Place:
    rack = racks.get(host, 0)
    return Place(host=host, rack=str(rack) if rack else "")


def _name(number: int) -> str:
    return f"{number:09}"  # sorts as the number does
