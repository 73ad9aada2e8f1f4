"""Fast code against slow, obvious twins, and what buddy placement promises."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster
from concertina.policies.fill import take_in_order
from concertina.policies.placement import Placer

COMMON = settings(max_examples=150, deadline=None)


@COMMON
@given(st.lists(st.integers(1, 16), max_size=40), st.integers(0, 60))
def test_taking_in_order_equals_the_plain_loop(demand: list[int], free: int) -> None:
    expected, left = [], free
    for need in demand:
        expected.append(need <= left)
        left -= need if need <= left else 0
    assert take_in_order(np.asarray(demand, dtype=np.int64), free).tolist() == expected


Held = dict[int, tuple[tuple[int, int], ...]]


def check_compact(rooms: Placer, held: Held, slots: int) -> None:
    """Nobody lost devices, nobody was torn apart, and the books are right."""
    used = [0] * len(rooms.slots)
    for job, spots in held.items():
        assert len(spots) == max(1, sum(count for _, count in spots) // slots), job
        for node, count in spots:
            used[node] += count
    assert rooms.free == [slots - count for count in used]


def place_compactly(rooms: Placer, held: Held, key: int, count: int, slots: int) -> None:
    """Place a job that fits by number; it has to be as compact as can be, and so has everyone after
    moving."""
    before = dict(held)
    placed = rooms.place(key, 0, count)
    for other, old, new in placed.moves:
        assert sorted(before[other]) == sorted(old)
        held[other] = new
    held[key] = placed.spots
    check_compact(rooms, held, slots)


@COMMON
@given(
    nodes=st.integers(2, 6),
    slots=st.sampled_from((2, 4, 8)),
    first=st.lists(st.sampled_from((1, 1, 1, 2, 2, 4, 8)), min_size=4, max_size=40),
    gone=st.lists(st.booleans(), min_size=40, max_size=40),
    then=st.lists(st.sampled_from((1, 2, 4, 8, 16, 32)), min_size=1, max_size=6),
)
def test_buddy_placement_never_refuses_a_power_of_two_that_fits(
    nodes: int, slots: int, first: list[int], gone: list[bool], then: list[int]
) -> None:
    """Fill the cluster, tear holes into it, and ask again: what fits by number is placed compactly."""
    rooms = Placer(Cluster.parse(f"{nodes}x{slots}"), migrate=True)
    held: Held = {}
    for key, count in enumerate(first):
        if count <= sum(rooms.free):
            place_compactly(rooms, held, key, count, slots)
    for key, leaves in zip(sorted(held), gone, strict=False):
        if leaves:
            rooms.release(key, held.pop(key))
    for key, count in enumerate(then, start=100):
        if count <= sum(rooms.free):
            place_compactly(rooms, held, key, count, slots)


@COMMON
@given(
    racks=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    asks=st.lists(st.integers(1, 12), max_size=12),
    roomiest=st.booleans(),
)
def test_any_number_that_is_free_can_be_placed(racks: list[int], asks: list[int], roomiest: bool) -> None:
    text = ",".join(f"{count}x4:A@r{i}" for i, count in enumerate(racks))
    rooms = Placer(Cluster.parse(text), roomiest=roomiest)
    for key, count in enumerate(asks):
        if count <= sum(rooms.free):
            before = sum(rooms.free)
            placed = rooms.place(key, 0, count)
            assert sum(c for _, c in placed.spots) == count
            assert len({node for node, _ in placed.spots}) == len(placed.spots)
            assert sum(rooms.free) == before - count
