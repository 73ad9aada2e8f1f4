"""What the main worker hands to newcomers is memory, too: for as long as they need it."""

from types import SimpleNamespace
from typing import Any, cast

from concertina.runtime.desk import Desk
from concertina.runtime.elastic import Elastic
from concertina.runtime.segments import Segment


def test_what_was_handed_over_goes_when_the_first_step_with_the_newcomers_counts() -> None:
    taken_down: list[Any] = []
    engine = SimpleNamespace(layout=SimpleNamespace(params=[SimpleNamespace(device="cpu")]), frozen=())
    membership = SimpleNamespace(take_down=lambda *things: taken_down.extend(things))
    elastic = Elastic(cast(Any, engine), cast(Any, membership), Desk.create(1, 64))
    before, handed = object(), Segment.create(1)
    elastic._previous, elastic._handed = cast(Any, before), handed
    elastic._forget_previous()
    elastic._forget_previous()  # as in every step after it
    assert taken_down == [before, handed]
    assert elastic._handed is None
