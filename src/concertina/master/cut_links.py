"""Whom a job lets go when workers cannot reach each other, though the master hears all of them. Pure.

Every worker tells with its signs of life whom it cannot reach and for how long, and for how long it has waited for
others. A job whose members do not all reach each other stands still. So the fewest are let go that must be for all the
others to reach each other: of two that are cut from each other only, the one that is less needed; a host that is cut
from several, and not these. Links that are up, however slow whoever is behind them, are never a reason.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from concertina.master.machine_types import Pending, Phase, Stage, State, StuckFound

MOST_BRANCHES = 4000  # of the search for the fewest; what is best by then will do

Pair = tuple[int, int]  # the smaller number first
Graph = Mapping[int, frozenset[int]]  # worker -> those that it is cut from
Cost = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Complaint:
    """What one worker says of others."""

    waits_s: float  # for which it has waited for them
    cut: Mapping[int, float]  # worker -> seconds since when it cannot be reached


def cut_off(state: State, told: Mapping[int, Complaint], limit_s: float) -> list[StuckFound]:
    """Whom to end, and why; `told` by all workers that are heard and not already being ended.

    Nobody, as long as no link has been down for `limit_s` that somebody waits for. Then links count, too, that have
    been down for half as long: the ends of one cable notice by turns.
    """
    if state.phase not in (Phase.STARTING, Phase.TRAINING, Phase.REGROUPING) or state.exits or state.interrupted:
        return []
    down = _down(state, told)
    if not any(seconds >= limit_s for seconds in down.values()):
        return []
    pairs = {pair for pair, seconds in down.items() if seconds >= limit_s / 2}
    return [
        _finding(n, {pair: down[pair] for pair in pairs})
        for n in whom_to_let_go(pairs, _order(state), _newcomers(state))
    ]


def _down(state: State, told: Mapping[int, Complaint]) -> dict[Pair, float]:
    """Links that somebody waits for, and for how many seconds they have been down and waited for."""
    newcomers = _newcomers(state)
    concerned = set(_order(state)) & told.keys()
    waited = max((told[n].waits_s for n in concerned), default=0.0)
    down: dict[Pair, float] = {}
    for n in concerned:
        for other, seconds in told[n].cut.items():
            if other in concerned and other != n:
                pair = (min(n, other), max(n, other))
                held_up = seconds if newcomers & set(pair) else min(seconds, waited)  # nobody waits for newcomers yet
                down[pair] = max(down.get(pair, 0.0), held_up)
    return down


def _order(state: State) -> tuple[int, ...]:
    """Who has to reach each other, the most needed first: the state and its contexts are with the members."""
    pending = state.pending if _is_built(state.pending) else None
    more = () if pending is None else pending.members
    return tuple(n for n in dict.fromkeys((*state.members, *more)) if n in state.workers)


def _newcomers(state: State) -> frozenset[int]:
    """Without the state, until they have changed over."""
    pending = state.pending
    if pending is None or not _is_built(pending):
        return frozenset()
    return frozenset(n for n in pending.joiners if n not in pending.switched)


def _is_built(pending: Pending | None) -> bool:
    return pending is not None and pending.stage is not Stage.STARTING


def _finding(worker: int, down: Mapping[Pair, float]) -> StuckFound:
    cut = {n: seconds for pair, seconds in down.items() if worker in pair for n in pair if n != worker}
    others, seconds = ", ".join(map(str, sorted(cut))), max(cut.values())
    return StuckFound(worker, f"worker {worker} and worker {others} have not reached each other for {seconds:.1f} s")


# -- the fewest ------------------------------------------------------------------------------------------------------


def whom_to_let_go(pairs: Collection[Pair], order: tuple[int, ...], newcomers: Collection[int] = ()) -> tuple[int, ...]:
    """The fewest without whom no pair is left: of them those with the fewest members, then the last in `order`."""
    return _Search(order, newcomers).best(_graph(pairs))


class _Search:
    """For a smallest vertex cover, by branching on the worker with the most cut links."""

    def __init__(self, order: tuple[int, ...], newcomers: Collection[int]) -> None:
        self._place = {n: place for place, n in enumerate(order)}
        self._newcomers = frozenset(newcomers)
        self._branches = 0
        self._found: frozenset[int] = frozenset()

    def best(self, graph: Graph) -> tuple[int, ...]:
        self._found = frozenset(graph)  # all of them: too many, but without a pair left
        self._branch(graph, frozenset())
        return tuple(sorted(self._found, key=self._place.__getitem__))

    def _cost(self, gone: frozenset[int]) -> Cost:
        places = sorted(-self._place[n] for n in gone)
        return len(gone - self._newcomers), len(gone & self._newcomers), tuple(places)

    def _branch(self, graph: Graph, gone: frozenset[int]) -> None:
        self._branches += 1
        if not graph:
            self._found = min(self._found, gone, key=self._cost)
            return
        if self._cost(gone)[:2] > self._cost(self._found)[:2] or self._branches > MOST_BRANCHES:
            return
        n = max(graph, key=lambda n: (len(graph[n]), n in self._newcomers, self._place[n]))
        for more in (frozenset({n}), graph[n]):  # either it goes, or all that it is cut from do
            self._branch(_without(graph, more), gone | more)


def _graph(pairs: Collection[Pair]) -> Graph:
    workers = {n for pair in pairs for n in pair}
    return {n: frozenset(m for pair in pairs if n in pair for m in pair if m != n) for n in workers}


def _without(graph: Graph, gone: Collection[int]) -> Graph:
    left = {n: others - frozenset(gone) for n, others in graph.items() if n not in gone}
    return {n: others for n, others in left.items() if others}
