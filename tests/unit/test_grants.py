"""Slots by name: nobody is given what somebody may still use, and the plan is reached once keepers obey."""

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.cluster.grants import Holding, grant
from concertina.cluster.slots import by_node, node_of


def held(*slots: str, occupied: tuple[str, ...] | None = None, fewest: int = 1) -> Holding:
    return Holding(granted=slots, occupied=frozenset(slots if occupied is None else occupied), fewest=fewest)


FOUR = ("n/0", "n/1", "n/2", "n/3")


def test_a_job_keeps_the_slots_it_has() -> None:
    assert grant({"a": [("n", 3)]}, {"a": held("n/1", "n/3")}, FOUR) == {"a": ("n/0", "n/1", "n/3")}


def test_a_slot_goes_to_another_job_only_when_its_keeper_has_left_it() -> None:
    plan = {"a": [("n", 2)], "b": [("n", 2)]}
    first = grant(plan, {"a": held(*FOUR), "b": held()}, FOUR)
    assert first == {"a": ("n/0", "n/1"), "b": ()}
    leaving = {"a": held("n/0", "n/1", occupied=FOUR[:3]), "b": held()}
    assert grant(plan, leaving, FOUR) == {"a": ("n/0", "n/1"), "b": ("n/3",)}


def test_a_part_is_given_only_if_it_is_enough_to_run() -> None:
    holdings = {"a": held("n/0", "n/1", occupied=FOUR[:3]), "b": held(fewest=2)}
    assert grant({"a": [("n", 2)], "b": [("n", 2)]}, holdings, FOUR)["b"] == ()


def test_a_job_may_have_again_what_it_has_not_left_yet() -> None:
    holdings = {"a": held("n/0", occupied=("n/0", "n/1")), "b": held()}
    assert grant({"a": [("n", 2)], "b": [("n", 1)]}, holdings, ("n/0", "n/1", "n/2"))["a"] == ("n/0", "n/1")


def test_of_two_slots_the_one_with_a_process_is_kept() -> None:
    assert grant({"a": [("n", 1)]}, {"a": held("n/0", "n/1", occupied=("n/1",))}, FOUR)["a"] == ("n/1",)


def test_nobody_is_stopped_only_because_its_new_place_is_not_free_yet() -> None:
    holdings = {"a": held("x/0", "x/1"), "b": held(occupied=("y/0", "y/1"))}
    found = grant({"a": [("y", 2)]}, holdings, ("x/0", "x/1", "y/0", "y/1"))
    assert found["a"] == ("x/0", "x/1")


def test_two_jobs_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    usable = ("x/0", "x/1", "y/0", "y/1")
    plan = {"a": [("y", 2)], "b": [("x", 2)]}
    holdings = {"a": held("x/0", "x/1", fewest=2), "b": held("y/0", "y/1", fewest=2)}
    for _ in range(8):
        holdings = {job: held(*slots, fewest=2) for job, slots in grant(plan, holdings, usable).items()}
    assert {job: by_node(h.granted) for job, h in holdings.items()} == {"a": (("y", 2),), "b": (("x", 2),)}


SIZES = {"x": 3, "y": 2, "z": 1}
ALL = [f"{node}/{i}" for node, count in SIZES.items() for i in range(count)]


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, list[tuple[str, int]]], dict[str, Holding], list[str]]:
    """A plan that fits, jobs that hold and occupy slots apart from one another, and slots that may not be used."""
    usable = draw(st.lists(st.sampled_from(ALL), unique=True))
    owner = {slot: draw(st.sampled_from(["", "a", "b", "c"])) for slot in ALL}
    granted = {slot: draw(st.booleans()) for slot in ALL}
    plan: dict[str, list[tuple[str, int]]] = {}
    for node in SIZES:
        room = sum(node_of(slot) == node for slot in usable)
        for job in "abc":
            count = draw(st.integers(0, room))
            room -= count
            if count:
                plan.setdefault(job, []).append((node, count))
    holdings = {}
    for job in "abc":
        mine = [slot for slot in ALL if owner[slot] == job]
        most = sum(count for _, count in plan.get(job, ()))
        holdings[job] = Holding(
            granted=tuple(slot for slot in mine if granted[slot] and slot in usable),
            occupied=frozenset(slot for slot in mine if not granted[slot] or draw(st.booleans())),
            fewest=draw(st.integers(1, max(most, 1))),
        )
    return plan, holdings, usable


@settings(max_examples=400, deadline=None)
@given(situations())
def test_no_slot_is_ever_in_two_hands(
    situation: tuple[dict[str, list[tuple[str, int]]], dict[str, Holding], list[str]],
) -> None:
    plan, holdings, usable = situation
    found = grant(plan, holdings, usable)
    assert found.keys() == holdings.keys()
    for job, slots in found.items():
        assert set(slots) <= set(usable), "a slot that may not be used"
        assert len(slots) in (0, *range(holdings[job].fewest, len(ALL) + 1)), "too few to run on"
        for other, theirs in holdings.items():
            if other != job:
                assert not set(slots) & {*theirs.granted, *theirs.occupied, *found[other]}, (job, other)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_repeated_it_reaches_the_plan_and_stays_there(
    situation: tuple[dict[str, list[tuple[str, int]]], dict[str, Holding], list[str]],
) -> None:
    plan, holdings, usable = situation
    for _ in range(12):
        found = grant(plan, holdings, usable)
        holdings = {
            job: Holding(granted=slots, occupied=frozenset(slots), fewest=holdings[job].fewest)
            for job, slots in found.items()  # every keeper obeys at once
        }
    assert {job: list(by_node(h.granted)) for job, h in holdings.items()} == {
        job: sorted(plan.get(job, [])) for job in holdings
    }
    assert grant(plan, holdings, usable) == {job: h.granted for job, h in holdings.items()}
