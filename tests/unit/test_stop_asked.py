"""Who asks for the end of training so that a worker's loss does not undo it; what newcomers rehearse."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from concertina.core.env import WorkerEnv
from concertina.runtime.boundary import Boundary
from concertina.runtime.newcomer import Newcomer
from concertina.runtime.session import Session


@pytest.mark.parametrize("follows", [True, False])
def test_a_newcomer_that_has_no_state_yet_asks_for_nothing_that_outlives_it(follows: bool) -> None:
    asked: list[int] = []
    session = Session(WorkerEnv.from_environ({}))
    boundary = SimpleNamespace(stop_asked=lambda: asked.append(1))
    loop = SimpleNamespace(follows=follows, engine=SimpleNamespace(rehearses=False), boundary=boundary)
    session._loop = cast(Any, loop)
    session.stop("goal")
    assert asked == ([] if follows else [1])


@pytest.mark.parametrize(
    ("turn", "agreement", "point", "counts_from"),
    [
        (2, None, 7, 8),  # before backward(): the round may have to be run again
        (2, object(), 8, 8),  # after it
        (None, object(), 8, 8),  # between two loops
        (None, None, 0, 1),
    ],
)
def test_a_stop_counts_from_the_round_that_asks_for_it(
    turn: int | None, agreement: object, point: int, counts_from: int
) -> None:
    boundary = object.__new__(Boundary)
    desk, engine = SimpleNamespace(stop_asked=0), SimpleNamespace(turn=turn, point=point)
    boundary._member = cast(
        Any, SimpleNamespace(desk=desk, engine=engine, elastic=SimpleNamespace(agreement=agreement))
    )
    boundary.stop_asked()
    assert desk.stop_asked == counts_from
    engine.point += 5
    boundary.stop_asked()
    assert desk.stop_asked == counts_from, "the first time counts"


def test_a_stream_is_not_rehearsed() -> None:
    newcomer = object.__new__(Newcomer)
    newcomer._rehearsed = False
    assert list(newcomer.rehearse(cast(Any, SimpleNamespace(feed=object())))) == []
    assert not newcomer._rehearsed, "a loader that comes later is"
