"""Who asks for the end of training so that a worker's loss does not undo it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from concertina.core.env import WorkerEnv
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
