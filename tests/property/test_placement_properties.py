"""Fast code against slow, obvious twins, and what buddy placement promises."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.cluster import Cluster
from concertina.policies.fill import take_in_order
from concertina.policies.placement import Placer
from concertina.policies.scaling_curve import concave_envelope

COMMON = settings(max_examples=150, deadline=None)


@COMMON
@given(st.lists(st.integers(1, 16), max_size=40), st.integers(0, 60))
def test_taking_in_order_equals_the_plain_loop(demand: list[int], free: int) -> None:
    expected, left = [], free
    for need in demand:
        expected.append(need <= left)
        left -= need if need <= left else 0
    assert take_in_order(np.asarray(demand, dtype=np.int64), free).tolist() == expected


@COMMON
@given(
    nodes=st.integers(1, 6),
    slots=st.sampled_from((2, 4, 8)),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40)), max_size=40),
)
def test_buddy_placement_never_refuses_a_power_of_two_that_fits(
    nodes: int, slots: int, steps: list[tuple[bool, int, int]]
) -> None:
    """Whatever was started and ended before: what fits by count gets the fewest nodes there can be."""
    rooms = Placer(Cluster.parse(f"{nodes}x{slots}"), migrate=True)
    held: dict[int, tuple[tuple[int, int], ...]] = {}
    for key, (start, power, which) in enumerate(steps):
        count = 2**power
        if start and count <= sum(rooms.free):
            placed = rooms.place(key, 0, count)
            for other, before, after in placed.moves:
                assert sorted(held[other]) == sorted(before)
                held[other] = after
            held[key] = placed.spots
            assert len(placed.spots) == max(1, count // slots)
        elif held:
            gone = sorted(held)[which % len(held)]
            rooms.release(gone, held.pop(gone))
        for job, spots in held.items():  # nobody lost devices, nobody was torn apart
            size = sum(count for _, count in spots)
            assert len(spots) == max(1, size // slots), job
        used = [sum(c for spots in held.values() for n, c in spots if n == node) for node in range(nodes)]
        assert rooms.free == [slots - count for count in used]


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


@COMMON
@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 1000.0), min_size=1, max_size=8))
def test_the_envelope_is_concave_and_nowhere_below(points: dict[int, float]) -> None:
    lifted = concave_envelope(points)
    assert all(lifted[x] >= points[x] * (1 - 1e-9) for x in points)
    xs = [0, *sorted(points)]
    ys = [0.0, *(lifted[x] for x in sorted(points))]
    slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
    assert all(b <= a + 1e-9 * max(1.0, abs(a)) for a, b in pairwise(slopes))
