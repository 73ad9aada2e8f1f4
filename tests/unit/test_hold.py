"""Who was started only just now is not stopped for somebody without a promise."""

from concertina.cluster.hold import Seat, held_until, steady

SLOTS = [f"n/{i}" for i in range(4)]


def seat(name: str, *numbers: int, promised: bool = False, held_s: float | None = None, fewest: int = 1) -> Seat:
    slots = tuple(f"n/{i}" for i in numbers)
    return Seat(id=name, slots=slots, fewest=fewest, promised=promised, held_s=held_s)


def test_a_job_that_was_just_started_stays_and_who_would_start_instead_waits() -> None:
    seats = [seat("old", 0, 1, 2), seat("new", 3, held_s=20.0), seat("next")]
    found = steady({"old": [("n", 3)], "next": [("n", 1)]}, seats, SLOTS, 10.0)
    assert found.targets == {"old": [("n", 3)], "new": (("n", 1),)}
    assert (found.stay, found.wait) == ({"new": 20.0}, {"next": "new"})


def test_when_its_time_is_over_the_plan_holds() -> None:
    seats = [seat("new", 3, held_s=10.0), seat("next")]
    assert steady({"next": [("n", 1)]}, seats, SLOTS[3:], 10.0).targets == {"next": [("n", 1)]}


def test_a_promise_gets_what_the_plan_gives_it() -> None:
    seats = [seat("new", 0, 1, 2, 3, held_s=20.0), seat("strict", promised=True)]
    found = steady({"strict": [("n", 4)]}, seats, SLOTS, 10.0)
    assert (found.targets, found.stay) == ({"strict": [("n", 4)]}, {})


def test_who_would_only_grow_grows_later() -> None:
    seats = [seat("grows", 0, 1), seat("new", 2, 3, held_s=20.0)]
    found = steady({"grows": [("n", 4)]}, seats, SLOTS, 10.0)
    assert found.targets == {"grows": (("n", 2),), "new": (("n", 2),)}
    assert found.wait == {"grows": "new"}


def test_it_makes_do_with_what_promises_leave_it_but_not_with_less_than_it_needs() -> None:
    for fewest, kept in ((1, {"new": (("n", 1),)}), (2, {})):
        seats = [seat("new", 2, 3, held_s=20.0, fewest=fewest), seat("strict", 0, 1, promised=True)]
        found = steady({"strict": [("n", 3)]}, seats, SLOTS, 10.0)
        assert found.targets == {"strict": [("n", 3)], **kept}


def test_a_start_on_several_nodes_is_put_off_as_a_whole() -> None:
    slots = ["a/0", "a/1", "b/0"]
    new = Seat(id="new", slots=("a/1",), fewest=1, promised=False, held_s=20.0)
    found = steady({"wide": [("a", 2), ("b", 1)]}, [new, seat("wide", fewest=3)], slots, 10.0)
    assert found.targets == {"new": (("a", 1),)}


def test_a_job_is_held_longer_where_a_start_costs_more() -> None:
    assert held_until(100.0, 5.0) == 115.0
    assert held_until(100.0, 20.0) == 140.0
