"""Which devices: best fit, racks, spreading, and moves that undo fragmentation."""

from __future__ import annotations

import pytest

from concertina.core.cluster import Cluster
from concertina.core.errors import SimulationError
from concertina.policies.placement import Placer


def placer(text: str = "2x8", **how: bool) -> Placer:
    return Placer(Cluster.parse(text), **how)


def test_best_fit_takes_the_fullest_node_that_has_room() -> None:
    rooms = placer("3x8")
    rooms.take(1, ((0, 2),))
    rooms.take(2, ((1, 6),))
    assert rooms.place(3, 0, 2).spots == ((1, 2),)
    assert rooms.place(4, 0, 4).spots == ((0, 4),)


def test_first_fit_takes_the_first_node_that_has_room() -> None:
    rooms = placer("3x8")
    rooms.take(1, ((0, 2),))
    rooms.take(2, ((1, 6),))
    assert rooms.compact(0, 2, first_fit=True) == ((0, 2),)
    assert rooms.compact(0, 8, first_fit=True) == ((2, 8),)


def test_large_jobs_take_whole_nodes_and_one_rest() -> None:
    rooms = placer("4x8")
    rooms.take(1, ((0, 4),))
    assert rooms.place(2, 0, 20).spots == ((1, 8), (2, 8), (0, 4))


def test_whole_nodes_come_from_one_rack_if_one_has_enough() -> None:
    rooms = placer("3x8:A@left,2x8:A@right")
    assert rooms.place(1, 0, 16).spots == ((3, 8), (4, 8))
    assert rooms.place(2, 0, 24).spots == ((0, 8), (1, 8), (2, 8))


def test_what_does_not_fit_closely_is_spread_over_the_roomiest_nodes() -> None:
    rooms = placer("3x4")
    rooms.take(1, ((0, 1),))
    rooms.take(2, ((1, 2),))
    rooms.take(3, ((2, 3),))
    assert rooms.place(4, 0, 4).spots == ((0, 3), (1, 1))


def test_roomiest_ignores_packing() -> None:
    rooms = placer("2x4", roomiest=True)
    rooms.take(1, ((0, 2),))
    assert rooms.place(2, 0, 2).spots == ((1, 2),)


def test_a_small_job_moves_aside_for_a_node_that_becomes_whole() -> None:
    rooms = placer("2x4", migrate=True)
    rooms.take(1, ((0, 2),))
    rooms.take(2, ((1, 2),))
    placed = rooms.place(3, 0, 4)
    assert placed.spots == ((0, 4),)
    assert placed.moves == ((1, ((0, 2),), ((1, 2),)),)
    assert rooms.free == [0, 0]


def test_many_jobs_move_if_one_is_not_enough() -> None:
    rooms = placer("4x4", migrate=True)
    for key in range(4):
        rooms.take(key, ((key, 2),))
    placed = rooms.place(9, 0, 8)
    assert [count for _, count in placed.spots] == [4, 4]
    assert len(placed.moves) == 2


def test_types_are_kept_apart() -> None:
    rooms = placer("1x8:A100,1x8:T4")
    assert rooms.place(1, 1, 4).spots == ((1, 4),)
    with pytest.raises(SimulationError, match="too many"):
        rooms.place(2, 1, 5)


def test_giving_back_more_than_was_taken_is_a_defect() -> None:
    rooms = placer()
    rooms.take(1, ((0, 2),))
    rooms.release(1, ((0, 2),))
    with pytest.raises((SimulationError, KeyError)):
        rooms.release(1, ((0, 2),))


def test_a_node_that_is_down_has_no_room() -> None:
    rooms = placer("2x8")
    rooms.set_up(0, False)
    assert rooms.place(1, 0, 8).spots == ((1, 8),)
    with pytest.raises(SimulationError, match="jobs"):
        rooms.set_up(1, False)
    rooms.set_up(0, True)
    assert rooms.place(2, 0, 8).spots == ((0, 8),)


def test_a_copy_is_tried_on_without_changing_the_original() -> None:
    rooms = placer("1x8")
    rooms.copy().take(5, ((0, 8),))
    assert rooms.free == [8]
