"""From a plan (how many slots on which node) to slots by name, never one that somebody may still use. Pure.

A job keeps slots it has. A slot is given only when no other job was granted it and no other keeper may have a process
on it. What can not be given yet is left for the next round: rounds are repeated until the plan is reached.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from concertina.cluster.slots import by_node, in_order, node_of

Nodes = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one job has."""

    granted: tuple[str, ...] = ()
    occupied: frozenset[str] = frozenset()  # may have a process of it, granted or not
    fewest: int = 1


def grant(
    plan: Mapping[str, Nodes], holdings: Mapping[str, Holding], usable: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """The slots that each job shall have now, for every job in `holdings`. Earlier jobs choose first.

    Nobody who is to have slots loses those it has before it can have the others, except where all wait for one
    another: then one steps back.
    """
    usable = frozenset(usable)
    found = _once(plan, holdings, usable, stepping_back="")
    settled = all(set(found[job]) == set(held.granted) for job, held in holdings.items())
    coming = any(held.occupied - set(held.granted) for held in holdings.values())
    if not settled or coming:
        return found
    stuck = [job for job in holdings if _holds_elsewhere(plan.get(job, ()), found[job])]
    return _once(plan, holdings, usable, stepping_back=stuck[0]) if stuck else found


def _once(
    plan: Mapping[str, Nodes], holdings: Mapping[str, Holding], usable: frozenset[str], *, stepping_back: str
) -> dict[str, tuple[str, ...]]:
    granted = {slot for held in holdings.values() for slot in held.granted}
    free = in_order(usable - granted)
    users: dict[str, set[str]] = {}
    for job, held in holdings.items():
        for slot in held.occupied:
            users.setdefault(slot, set()).add(job)
    taken: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    for job, held in holdings.items():
        nodes = plan.get(job, ())
        mine = [slot for slot in free if slot not in taken and users.get(slot, set()) <= {job}]
        slots = _wanted(nodes, held, mine, usable)
        if job != stepping_back:
            slots |= _stay(held, slots, _count(nodes), usable)
        found[job] = in_order(slots) if len(slots) >= max(held.fewest, 1) else ()
        taken |= slots
    return found


def _wanted(nodes: Nodes, held: Holding, mine: Sequence[str], usable: frozenset[str]) -> set[str]:
    """Slots where the plan wants them: those it has, then those it had, then others that are free."""
    has = [slot for slot in in_order(held.granted) if slot in usable]
    has.sort(key=lambda slot: slot not in held.occupied)
    had = [slot for slot in mine if slot in held.occupied]
    other = [slot for slot in mine if slot not in held.occupied]
    found: set[str] = set()
    for node, count in nodes:
        found |= set([slot for slot in (*has, *had, *other) if node_of(slot) == node][:count])
    return found


def _stay(held: Holding, slots: Set[str], wanted: int, usable: frozenset[str]) -> set[str]:
    """Slots to hold on to although the plan wants others: until those are free."""
    spare = [slot for slot in in_order(held.granted) if slot in usable and slot not in slots]
    return set(spare[: max(min(wanted, len(held.granted)) - len(slots), 0)])


def _count(nodes: Nodes) -> int:
    return sum(count for _, count in nodes)


def _holds_elsewhere(nodes: Nodes, slots: Iterable[str]) -> bool:
    """Whether it has slots where the plan wants none, or fewer, of it."""
    wanted = dict(nodes)
    return any(count > wanted.get(node, 0) for node, count in by_node(slots))
