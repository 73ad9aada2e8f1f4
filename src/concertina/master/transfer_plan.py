"""Who sends its state to whom, and when: sources for newcomers over the topology tree (Elan IV-3, fig. 9). Pure.

Every newcomer is served from the nearest level at which there is a source, in one round, by one or several sources at
once. Transfers that would meet on a link that cannot carry both are in different rounds. There are as few rounds as
can be, and that is not luck: below its meeting place a newcomer has no sources beside it, so at that place all sources
are as good as each other, and a round is a flow through the tree. If all newcomers together fit R rounds' worth of
lanes (`_fits`, which no plan can do without), the whole flow can be cut into R rounds: one part is the flow divided
by R, each edge rounded down or up (`_Rounds.cut`), which a tree always allows, and what is left fits R - 1 rounds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from concertina.core.batch_scaling import split_evenly
from concertina.core.errors import UsageError
from concertina.master.topology import WORKER_DEPTH, Lanes, Level, Link, Path, Place, Via, level, links, via

MOST_SOURCES = 4  # connections a newcomer reads from at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """`source` sends the chunks from `first` up to, not including, `end` to `target`."""

    source: str
    target: str
    via: Via
    level: Level
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Rounds one after another; the transfers of one round at the same time."""

    rounds: tuple[tuple[Transfer, ...], ...]
    reason: str

    def sources_of(self, newcomer: str) -> tuple[str, ...]:
        return tuple(t.source for transfers in self.rounds for t in transfers if t.target == newcomer)


def plan_transfers(
    existing: Mapping[str, Place],
    newcomers: Mapping[str, Place],
    *,
    chunks: int = 1,
    lanes: Lanes | None = None,
    most_sources: int = MOST_SOURCES,
) -> TransferPlan:
    """The same for the same input, in whatever order it is given."""
    _check(existing, newcomers, chunks, most_sources)
    if not newcomers:
        return TransferPlan(rounds=(), reason="nobody is new")
    lanes = lanes or Lanes()
    tree = _Tree.of(existing, newcomers)
    pairs = _Rounds(tree, lanes, fewest_rounds(existing, newcomers, lanes)).cut()
    busy: Counter[Path] = Counter()
    rounds = tuple(_with_more_sources(now, tree, lanes, min(most_sources, chunks), chunks, busy) for now in pairs)
    return TransferPlan(rounds=rounds, reason=_reason(rounds, len(newcomers)))


def fewest_rounds(existing: Mapping[str, Place], newcomers: Mapping[str, Place], lanes: Lanes | None = None) -> int:
    """No plan that uses the nearest level for everybody has fewer rounds."""
    _check(existing, newcomers)
    tree, lanes = _Tree.of(existing, newcomers), lanes or Lanes()
    low, high = 0, len(newcomers)  # one newcomer per round always fits
    while low < high:
        middle = (low + high) // 2
        if _fits(tree, lanes, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _check(existing: Mapping[str, Place], newcomers: Mapping[str, Place], chunks: int = 1, most: int = 1) -> None:
    if newcomers and not existing:
        raise UsageError(
            f"{len(newcomers)} newcomers and no worker that has the state; needed one, or start from a checkpoint"
        )
    both = sorted(existing.keys() & newcomers.keys())
    if both:
        raise UsageError(f"{', '.join(both)} cannot be a newcomer and have the state already; give each worker once")
    if chunks < 1 or most < 1:
        raise UsageError(f"{chunks} chunks from up to {most} sources at once, needed 1 or more of both")


# -- the tree ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tree:
    """The part of the topology that matters: paths of sources, and newcomers by where they meet their sources."""

    sources: tuple[Path, ...]
    below: Mapping[Path, tuple[Path, ...]]  # place -> places directly below that hold sources
    count: Mapping[Path, int]  # place -> sources below
    waiting: Mapping[Path, tuple[Path, ...]]  # meeting place -> newcomers served from there, neighbours together
    wanted: Mapping[Path, int]  # place -> newcomers that are served from there or from a place below

    @classmethod
    def of(cls, existing: Mapping[str, Place], newcomers: Mapping[str, Place]) -> "_Tree":
        sources = tuple(sorted(place.path(worker) for worker, place in existing.items()))
        count = Counter(path[:depth] for path in sources for depth in range(WORKER_DEPTH + 1))
        below: dict[Path, list[Path]] = {}
        for place in sorted(count):
            if place:
                below.setdefault(place[:-1], []).append(place)
        waiting: dict[Path, list[Path]] = {}
        wanted: Counter[Path] = Counter()
        for path in sorted(place.path(worker) for worker, place in newcomers.items()):
            depth = max(d for d in range(WORKER_DEPTH) if d == 0 or path[:d] in count)
            waiting.setdefault(path[:depth], []).append(path)
            wanted.update(path[:d] for d in range(depth + 1))
        return cls(
            sources,
            {place: tuple(children) for place, children in below.items()},
            count,
            {place: tuple(paths) for place, paths in waiting.items()},
            wanted,
        )


def _fits(tree: _Tree, lanes: Lanes, rounds: int) -> bool:
    """Whether all newcomers fit if every link had `rounds` times its lanes."""
    down = Counter(
        p[:d] for place, paths in tree.waiting.items() for p in paths for d in range(len(place) + 1, WORKER_DEPTH + 1)
    )
    if any(load > rounds * lanes.of(("down", place)) for place, load in down.items()):
        return False
    return all(left >= 0 for left in _supply(tree, lanes, rounds).values())


def _supply(tree: _Tree, lanes: Lanes, rounds: int) -> dict[Path, int]:
    """How much can leave each place upwards in `rounds` rounds, after those who are served from there; below 0 if it
    is short already."""
    found: dict[Path, int] = {}
    for place in sorted(tree.count, key=len, reverse=True):
        if len(place) == WORKER_DEPTH:
            found[place] = rounds * lanes.worker_out
        else:
            arrives = sum(min(found[c], rounds * lanes.of(("up", c))) for c in tree.below[place])
            found[place] = arrives - len(tree.waiting.get(place, ()))
    return found


# -- rounds ------------------------------------------------------------------------------------------------------


class _Rounds:
    """Cuts the flow of all transfers into rounds, one source for every newcomer."""

    def __init__(self, tree: _Tree, lanes: Lanes, rounds: int) -> None:
        self._tree = tree
        self._rounds = rounds
        self._left = {place: list(paths) for place, paths in tree.waiting.items()}  # newcomers not served yet
        self._flow = self._share_out(lanes)  # place -> transfers that still have to leave it upwards

    def _share_out(self, lanes: Lanes) -> dict[Path, int]:
        """The whole flow, from the root down: always from the child whose sources have least to do."""
        supply = _supply(self._tree, lanes, self._rounds)
        flow: dict[Path, int] = dict.fromkeys(self._tree.count, 0)
        for place, children in sorted(self._tree.below.items(), key=lambda item: (len(item[0]), item[0])):
            room = {c: min(supply[c], self._rounds * lanes.of(("up", c))) for c in children}
            for _ in range(flow[place] + len(self._left.get(place, ()))):
                free = [c for c in children if flow[c] < room[c]]
                least = min(free, key=lambda c: ((flow[c] + self._tree.wanted[c]) / self._tree.count[c], c))
                flow[least] += 1
        return flow

    def cut(self) -> list[list[tuple[Path, Path]]]:
        """(source, newcomer) pairs, round by round."""
        made = []
        for left in range(self._rounds, 0, -1):
            pairs: list[tuple[Path, Path]] = []
            self._arriving((), 0, left, pairs)
            made.append(sorted(pairs, key=lambda pair: pair[1]))
        return made

    def _arriving(self, place: Path, leaving: int, left: int, pairs: list[tuple[Path, Path]]) -> list[Path]:
        """The sources whose transfers of this round leave `place` upwards; pairs up those who meet there.

        With `left` rounds to go, this round gets one `left`-th of every edge's flow, rounded down or up.
        """
        if len(place) == WORKER_DEPTH:
            return [place] * leaving
        children = self._tree.below[place]
        loads = [self._flow[c] for c in children]
        waiting = self._left.get(place, [])
        served = min(-(-len(waiting) // left), sum(-(-load // left) for load in loads) - leaving)
        arrived: list[Path] = []
        for child, part in zip(children, _rounded(loads, left, served + leaving), strict=True):
            self._flow[child] -= part
            arrived += self._arriving(child, part, left, pairs)
        for newcomer in _pick(waiting, len(place), served, left):
            waiting.remove(newcomer)
            pairs.append((arrived.pop(0), newcomer))
        return arrived


def _rounded(loads: Sequence[int], left: int, total: int) -> list[int]:
    """Each load divided by `left`, rounded down or up so that they sum to `total`; up where most would be lost."""
    parts = [load // left for load in loads]
    by_loss = sorted(range(len(loads)), key=lambda i: (-(loads[i] % left), i))
    short = total - sum(parts)
    for i in by_loss[:short]:
        parts[i] += 1
    assert 0 <= short <= sum(load % left > 0 for load in loads), (loads, left, total)
    return parts


def _pick(waiting: Sequence[Path], depth: int, total: int, left: int) -> list[Path]:
    """`total` of the newcomers below a place, so that each link down gets its `left`-th, rounded down or up."""
    if depth == WORKER_DEPTH:
        return list(waiting[:total])
    parts = [list(group) for _, group in groupby(waiting, key=lambda path: path[depth])]
    counts = _rounded([len(part) for part in parts], left, total)
    return [p for part, count in zip(parts, counts, strict=True) for p in _pick(part, depth + 1, count, left)]


# -- several sources at once -------------------------------------------------------------------------------------


def _with_more_sources(
    pairs: Sequence[tuple[Path, Path]], tree: _Tree, lanes: Lanes, most: int, chunks: int, busy: Counter[Path]
) -> tuple[Transfer, ...]:
    """Lanes that are free in this round go to further sources of the same level, one newcomer after another."""
    used: Counter[Link] = Counter(link for pair in pairs for link in links(*pair))
    busy.update(source for source, _ in pairs)
    chosen = {newcomer: [source] for source, newcomer in pairs}
    meets = {path: place for place, paths in tree.waiting.items() for path in paths}
    asking = sorted(chosen)
    while asking:
        still = []
        for newcomer in asking:
            free = [
                source
                for source in tree.sources
                if source[: len(meets[newcomer])] == meets[newcomer]
                and source not in chosen[newcomer]
                and all(used[link] < lanes.of(link) for link in links(source, newcomer))
            ]
            if free and len(chosen[newcomer]) < most:
                source = min(free, key=lambda s: (busy[s], s))
                chosen[newcomer].append(source)
                used.update(links(source, newcomer))
                busy[source] += 1
                still.append(newcomer)
        asking = still
    return tuple(t for newcomer in sorted(chosen) for t in _shares(newcomer, chosen[newcomer], chunks))


def _shares(newcomer: Path, sources: Sequence[Path], chunks: int) -> list[Transfer]:
    shares, first = [], 0
    for source, size in zip(sources, split_evenly(chunks, len(sources)), strict=True):
        shares.append(
            Transfer(
                source=source[-1],
                target=newcomer[-1],
                via=via(source, newcomer),
                level=level(source, newcomer),
                first=first,
                end=first + size,
            )
        )
        first += size
    return shares


def _reason(rounds: Sequence[Sequence[Transfer]], newcomers: int) -> str:
    ways = {t.target: t.via for transfers in rounds for t in transfers}
    kinds = Counter(ways.values())
    how = ", ".join(f"{kinds[kind]} by {kind}" for kind in Via if kinds[kind])
    return f"{_many(newcomers, 'newcomer')} in {_many(len(rounds), 'round')} from the nearest sources: {how}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
