"""What does a value depend on that it should not? Decided from the values that all runs had for it.

A hypothesis is a key: "the value depends on K" predicts equal values wherever K is equal. Runs at several worker
counts tell hypotheses apart, because they change one key and not the other; a hypothesis that any two turns refute is
out, and among the rest the one that explains the most wins.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from concertina.verify.records import Turn


class Dependence(Enum):
    """Hypotheses, from the most special to the one that explains almost anything."""

    RESTART = "whether its process has run this virtual worker's earlier turns"
    MAIN = "whether it runs on the worker of virtual worker 0"
    WORKERS = "the number of workers"
    WORKER = "which worker it runs on"
    HISTORY = "which turns its process has run before"


KEYS: dict[Dependence, Callable[[Turn], Hashable]] = {
    Dependence.RESTART: lambda t: t.own_history,
    Dependence.MAIN: lambda t: t.worker == 0,
    Dependence.WORKERS: lambda t: t.workers,
    Dependence.WORKER: lambda t: t.worker,
    Dependence.HISTORY: lambda t: t.history,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """One turn of one run, and the value it had."""

    turn: Turn
    value: Hashable


def explanations(observations: Sequence[Observation]) -> list[Dependence]:
    """The hypotheses that fit all observations and leave the least unexplained, the most special one first.

    Unexplained is a pair of turns that a hypothesis keeps apart although their values are equal.
    """
    pairs = [(a, b) for a, b in combinations(observations, 2) if a.turn.virtual == b.turn.virtual]
    unexplained = {h: _unexplained(KEYS[h], pairs) for h in Dependence}
    fitting = {h: count for h, count in unexplained.items() if count is not None}
    least = min(fitting.values(), default=0)
    return [h for h, count in fitting.items() if count == least]


def _unexplained(key: Callable[[Turn], Hashable], pairs: Sequence[tuple[Observation, Observation]]) -> int | None:
    """None if some pair refutes the hypothesis."""
    count = 0
    for a, b in pairs:
        same_key, same_value = key(a.turn) == key(b.turn), a.value == b.value
        if same_key and not same_value:
            return None
        count += not same_key and same_value
    return count
