"""Slots by name: which there are, which may be granted, which may still have a process on them. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from concertina.cluster.records import ENDED, JobSeen, JobState, NodePhase, NodeState


def slot_name(node: str, index: int) -> str:
    return f"{node}/{index}"


def node_of(slot: str) -> str:
    return slot.rpartition("/")[0]


def index_of(slot: str) -> int:
    return int(slot.rpartition("/")[2])


def place_of(slot: str) -> tuple[str, int]:
    """For sorting: by node, then by number."""
    return node_of(slot), index_of(slot)


def all_slots(nodes: Iterable[NodeState]) -> list[str]:
    return [slot_name(node.id, index) for node in nodes for index in range(node.slots)]


def usable(nodes: Iterable[NodeState]) -> list[str]:
    """Slots that may be granted: on nodes that are up, and not lent to somebody else."""
    return [
        slot_name(node.id, index)
        for node in nodes
        if node.phase is NodePhase.UP
        for index in range(node.slots)
        if index not in node.lent
    ]


def by_node(slots: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """How many on which node, by node."""
    found: dict[str, int] = {}
    for slot in slots:
        node = node_of(slot)
        found[node] = found.get(node, 0) + 1
    return tuple(sorted(found.items()))


def by_type(slots: Iterable[str], type_of: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """How many of which device type."""
    found: dict[str, int] = {}
    for slot in slots:
        kind = type_of[node_of(slot)]
        found[kind] = found.get(kind, 0) + 1
    return tuple(sorted(found.items()))


def keeper_is_over(state: JobState, seen: JobSeen | None, *, gone: bool) -> bool:
    """Whether no keeper of this job runs: it said so itself, or the backend knows that nothing of it is left."""
    said = seen is not None and seen.attempt == state.attempt and seen.activity in ENDED
    return state.attempt == 0 or gone or said


def occupied(state: JobState, seen: JobSeen | None, *, gone: bool = False) -> frozenset[str]:
    """Slots that may have a process of this job, granted or not.

    A keeper that has not read the newest order may still act on an older one.
    """
    if keeper_is_over(state, seen, gone=gone):
        return frozenset()
    if seen is None or seen.attempt < state.attempt:
        return frozenset((*state.slots, *state.releasing, *(seen.slots if seen else ())))
    if max(seen.heard, seen.order) >= state.order:
        return frozenset(seen.slots)
    return frozenset((*seen.slots, *state.slots, *state.releasing))


def in_order(slots: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(slots, key=place_of))


def counted(number: int, noun: str = "slot") -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`"""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
