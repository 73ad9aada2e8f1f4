"""Which slots are taken from whom when nodes go or somebody else wants slots back. Pure.

`lend` chooses slots to give away: free ones first, then from jobs without a promise before those with one, from the
largest share first. Only when all are at their fewest a job is stopped: of those without a promise the one that loses
least, else the one with most time to spare, so that the same promise does not pay every time. `evict` takes from jobs
what they may not use any more.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from concertina.cluster.records import NodePhase, NodeState
from concertina.cluster.slots import counted, in_order, index_of, listed, node_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A job as far as taking slots from it goes."""

    id: str
    slots: tuple[str, ...]
    fewest: int = 1
    promised: bool = False
    slack_s: float = 0.0  # of a promised job: how much earlier than promised it would be done with what it has
    loss_s: float = 0.0  # work that would have to be done again if it were stopped


@dataclass(slots=True)
class _Rest:
    """What a holder has left while slots are chosen."""

    holder: Holder
    slots: list[str] = field(default_factory=list)


def lend(wanted: int, usable: Sequence[str], holders: Iterable[Holder], busy: Collection[str]) -> tuple[str, ...]:
    """`wanted` slots out of those usable, in the order in which they are taken; all there are if there are fewer.

    `busy` are slots that may have a process, of whomever.
    """
    rests = [_Rest(holder, list(in_order(s for s in holder.slots if s in set(usable)))) for holder in holders]
    granted = {slot for rest in rests for slot in rest.slots}
    free = [slot for slot in in_order(usable) if slot not in granted]
    taken = sorted(free, key=lambda slot: slot in busy)[:wanted]
    while len(taken) < wanted and any(rest.slots for rest in rests):
        rest = _next(rests)
        taken.append(rest.slots.pop())
        if len(rest.slots) < rest.holder.fewest:  # it stops: what it has left is as good as free
            while rest.slots and len(taken) < wanted:
                taken.append(rest.slots.pop())
            rest.slots.clear()
    return tuple(taken)


def _next(rests: Sequence[_Rest]) -> _Rest:
    """From whom the next slot is taken."""
    able = [rest for rest in rests if len(rest.slots) > rest.holder.fewest]
    if able:
        return min(able, key=lambda rest: (rest.holder.promised, -len(rest.slots), rest.holder.id))
    left = [rest for rest in rests if rest.slots]
    return min(left, key=lambda rest: _cost_of_stopping(rest.holder))


def _cost_of_stopping(holder: Holder) -> tuple[bool, float, float, str]:
    return holder.promised, -holder.slack_s if holder.promised else 0.0, holder.loss_s, holder.id


def take_back(number: int, lent: Sequence[str]) -> tuple[str, ...]:
    """What stays lent when `number` slots are given again (0: all): the last ones come back first."""
    return tuple(lent[: max(len(lent) - number, 0)]) if number else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One job that may not keep what it has."""

    job: str
    slots: tuple[str, ...]  # it keeps; empty: it waits
    reason: str


def evict(holders: Iterable[Holder], nodes: Mapping[str, NodeState]) -> list[Eviction]:
    """Jobs with slots on nodes that are lost or drained, or with slots lent to somebody else."""
    found = []
    for holder in holders:
        lost = [slot for slot in holder.slots if _why(slot, nodes)]
        if not lost:
            continue
        kept = tuple(slot for slot in holder.slots if slot not in set(lost))
        why = _sentence(lost, nodes)
        if len(kept) >= holder.fewest:
            found.append(Eviction(job=holder.id, slots=kept, reason=f"{why}; it goes on with {counted(len(kept))}"))
        else:
            needs = f"it needs {counted(holder.fewest)} and waits, its state kept"
            found.append(Eviction(job=holder.id, slots=(), reason=f"{why}; {needs}"))
    return found


def _why(slot: str, nodes: Mapping[str, NodeState]) -> str:
    """Why a slot may not be used; empty if it may."""
    node = nodes.get(node_of(slot))
    if node is None or node.phase is NodePhase.LOST:
        return f"node {node_of(slot)} is lost"
    if node.phase is NodePhase.DRAINED:
        return f"node {node_of(slot)} is drained"
    return "reclaimed" if index_of(slot) in node.lent or index_of(slot) >= node.slots else ""


def _sentence(lost: Sequence[str], nodes: Mapping[str, NodeState]) -> str:
    reasons = dict.fromkeys(_why(slot, nodes) for slot in lost)
    reclaimed = sum(_why(slot, nodes) == "reclaimed" for slot in lost)
    others = [reason for reason in reasons if reason != "reclaimed"]
    if reclaimed:
        others.append(f"{counted(reclaimed)} {'was' if reclaimed == 1 else 'were'} reclaimed for somebody else")
    return listed(others, most=4)
