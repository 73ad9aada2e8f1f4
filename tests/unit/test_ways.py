"""From whom newcomers on several hosts get the state: the nearest, several at once, in turns if they would collide."""

from collections.abc import Mapping

from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement
from concertina.runtime.ways import SHARES, Way, way_in


def formation(sources: Mapping[int, str], joiners: Mapping[int, str]) -> Formation:
    """Workers by number, with their hosts; an empty one where nobody speaks of hosts."""
    everybody = {**sources, **joiners}
    desks = {n: f"{n}/fd/4" + (f"@{host}:4000/{n}/1" if host else "") for n, host in everybody.items()}
    return Formation(
        generation=2,
        members=tuple(everybody),
        placement=VirtualPlacement.blocks(len(everybody), len(everybody)),
        desks=tuple(desks.values()),
        joiners=tuple(joiners),
        sources=tuple((n, desks[n]) for n in sources),
    )


def test_on_one_host_nothing_is_planned() -> None:
    assert way_in(formation({0: "", 1: ""}, {2: ""}), 2, {}) is None
    assert way_in(formation({0: "a", 1: "a"}, {2: "a", 3: "a"}), 3, {}) is None


def test_a_source_on_the_same_host_is_nearest_and_waits_for_nobody() -> None:
    told = formation({0: "a", 1: "b"}, {2: "b", 3: "c", 4: "b"})
    for newcomer in (2, 4):
        assert way_in(told, newcomer, {}) == Way(sources=((1, 0, SHARES),), remote=False)


def test_from_another_host_two_members_send_a_half_each() -> None:
    told = formation({0: "a", 1: "b", 2: "b"}, {3: "c"})
    assert way_in(told, 3, {}) == Way(sources=((0, 0, SHARES // 2), (1, SHARES // 2, SHARES)), remote=True)


def test_a_source_in_the_same_rack_is_nearer_than_the_rest() -> None:
    told = formation({0: "a", 1: "b", 2: "c"}, {3: "d"})
    assert way_in(told, 3, {"a": 5, "b": 7, "c": 5, "d": 7}) == Way(sources=((1, 0, SHARES),), remote=True)
    unknown = way_in(told, 3, {"d": 7})
    assert unknown is not None
    assert len(unknown.sources) == 2  # nobody is known to be near


def test_a_member_serves_one_newcomer_after_the_other() -> None:
    told = formation({0: "a"}, {1: "b", 2: "c", 3: "a"})
    assert way_in(told, 1, {}) == Way(sources=((0, 0, SHARES),), remote=True)
    assert way_in(told, 2, {}) == Way(sources=((0, 0, SHARES),), remote=True, after=(1,))


def test_all_newcomers_come_to_the_same_plan() -> None:
    told = formation({0: "a", 1: "a", 2: "b"}, {n: "cde"[n % 3] for n in range(3, 9)})
    ways = {n: way_in(told, n, {}) for n in told.joiners}
    turns = {n: len(way.after) for n, way in ways.items() if way is not None}
    assert len(turns) == len(told.joiners)
    for n, way in ways.items():
        assert way is not None
        assert sorted(way.after) == sorted(m for m in turns if turns[m] < turns[n])
        assert way.sources[0][1] == 0
        assert way.sources[-1][2] == SHARES
