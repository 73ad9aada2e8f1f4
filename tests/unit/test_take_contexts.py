"""A newcomer that is let in takes the contexts of its virtual workers, or leaves if nobody can give them any more."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from concertina.runtime import follow as module
from concertina.runtime.fabric import PeersLost
from concertina.runtime.follow import Follower


class Desk:
    """Of the member that had the virtual worker: its last record is there, and final after so many looks; 0: never."""

    def __init__(self, final_at: int) -> None:
        self.left = final_at

    def context(self, v: int, point: int) -> tuple[bytes, bool]:
        self.left -= 1
        return b"context", self.left == 0


def newcomer(desk: Desk, lost: set[int]) -> tuple[Any, list[int]]:
    taken: list[int] = []
    contexts = SimpleNamespace(unpack=lambda v, record, feeds: taken.append(v), resident=0, apart=False)
    return SimpleNamespace(
        _engine=SimpleNamespace(point=3, order=(1,), contexts=contexts),
        _elastic=SimpleNamespace(feeds=lambda: ()),
        _seen=SimpleNamespace(desks={7: desk}),
        _membership=SimpleNamespace(lost=frozenset(lost)),
    ), taken


def take(made: Any) -> None:
    generation = SimpleNamespace(fabric=SimpleNamespace(lost=()))  # of those who train from here on
    Follower._take_contexts(cast(Follower, made), cast(Any, generation))


@pytest.mark.parametrize("lost", [set(), {5}], ids=["nobody is lost", "a worker that we read nothing from"])
def test_contexts_that_are_not_final_yet_are_waited_for(lost: set[int]) -> None:
    made, taken = newcomer(Desk(3), lost)
    take(made)
    assert taken == [1]


def test_what_a_lost_member_has_left_is_taken() -> None:
    made, taken = newcomer(Desk(1), {7})
    take(made)
    assert taken == [1]


def test_a_leaver_that_is_lost_before_its_contexts_are_final_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.5)  # half an hour, in which everybody would wait for this newcomer
    made, _ = newcomer(Desk(0), {7})
    with pytest.raises(PeersLost) as raised:
        take(made)
    assert raised.value.workers == (7,)
