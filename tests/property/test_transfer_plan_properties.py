"""What every transfer plan keeps to, on generated clusters, and the number of rounds against trying everything."""

from collections import Counter
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.master.topology import Lanes, Link, Place, level, links
from concertina.master.transfer_plan import TransferPlan, fewest_rounds, plan_transfers

COMMON = settings(max_examples=200, deadline=None)
Places = dict[str, Place]

names = st.sampled_from(("", "0", "1"))
places = st.builds(Place, rack=names, host=st.sampled_from(("g", "h")), socket=names, switch=names)
widths = st.integers(1, 3)
lanes_of_all_kinds = st.builds(
    Lanes, worker_out=widths, worker_in=widths, switch=widths, socket=widths, host=widths, rack=widths
)


def some(prefix: str, least: int, most: int) -> st.SearchStrategy[Places]:
    return st.lists(places, min_size=least, max_size=most).map(
        lambda found: {f"{prefix}{i}": place for i, place in enumerate(found)}
    )


def used_links(plan: TransferPlan, where: Places) -> list[Counter[Link]]:
    return [
        Counter(
            link for t in transfers for link in links(where[t.source].path(t.source), where[t.target].path(t.target))
        )
        for transfers in plan.rounds
    ]


@COMMON
@given(some("e", 1, 8), some("n", 0, 10), lanes_of_all_kinds, st.integers(1, 9), st.integers(1, 5))
def test_everyone_is_served_once_from_the_nearest_level_and_no_link_carries_too_much(
    existing: Places, newcomers: Places, lanes: Lanes, chunks: int, most: int
) -> None:
    plan = plan_transfers(existing, newcomers, chunks=chunks, lanes=lanes, most_sources=most)
    where = existing | newcomers
    got: dict[str, list[tuple[int, int, int]]] = {n: [] for n in newcomers}
    for number, transfers in enumerate(plan.rounds):
        assert transfers, "a round without a transfer"
        for t in transfers:
            assert t.source in existing
            got[t.target].append((t.first, t.end, number))
            target = newcomers[t.target].path(t.target)
            nearest = min(level(place.path(worker), target) for worker, place in existing.items())
            assert t.level == nearest == level(existing[t.source].path(t.source), target)
    for newcomer, parts in got.items():
        parts.sort()
        assert [c for first, end, _ in parts for c in range(first, end)] == list(range(chunks)), newcomer
        assert all(first < end for first, end, _ in parts)
        assert len({number for _, _, number in parts}) == 1
        sources = plan.sources_of(newcomer)
        assert len(set(sources)) == len(sources) <= most
    for used in used_links(plan, where):
        assert all(count <= lanes.of(link) for link, count in used.items())
    assert len(plan.rounds) == fewest_rounds(existing, newcomers, lanes)


@COMMON
@given(some("e", 1, 8), some("n", 1, 10), lanes_of_all_kinds)
def test_sources_that_are_neighbours_differ_by_one_transfer_at_most(
    existing: Places, newcomers: Places, lanes: Lanes
) -> None:
    plan = plan_transfers(existing, newcomers, lanes=lanes, most_sources=1)
    count = Counter(t.source for transfers in plan.rounds for t in transfers)
    for a, b in combinations(existing, 2):
        if existing[a] == existing[b]:
            assert abs(count[a] - count[b]) <= 1


def can_be_done(rounds: int, waiting: list[tuple[str, Place]], existing: Places, lanes: Lanes) -> bool:
    """Tries every nearest source and every round for each newcomer."""
    used: list[Counter[Link]] = [Counter() for _ in range(rounds)]

    def place_from(k: int) -> bool:
        if k == len(waiting):
            return True
        target = waiting[k][1].path(waiting[k][0])
        paths = [place.path(worker) for worker, place in existing.items()]
        nearest = min(level(path, target) for path in paths)
        for path in (p for p in paths if level(p, target) == nearest):
            for busy in used:
                on_the_way = links(path, target)
                if all(busy[link] < lanes.of(link) for link in on_the_way):
                    busy.update(on_the_way)
                    if place_from(k + 1):
                        return True
                    busy.subtract(on_the_way)
                if not any(busy.values()):
                    break  # the empty rounds are all alike
        return False

    return place_from(0)


@settings(max_examples=250, deadline=None)
@given(some("e", 1, 4), some("n", 1, 5), st.builds(Lanes, worker_out=st.integers(1, 2), host=st.integers(1, 2)))
def test_no_plan_has_fewer_rounds_when_everything_is_tried(existing: Places, newcomers: Places, lanes: Lanes) -> None:
    rounds = len(plan_transfers(existing, newcomers, lanes=lanes).rounds)
    assert rounds == 1 or not can_be_done(rounds - 1, sorted(newcomers.items()), existing, lanes)
