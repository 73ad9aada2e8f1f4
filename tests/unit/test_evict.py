"""From whom slots are taken, and with which words."""

import pytest

from concertina.cluster.evict import Eviction, Holder, evict, lend, take_back
from concertina.cluster.records import NodePhase, NodeState

SLOTS = [f"n/{i}" for i in range(6)]


def holder(name: str, *numbers: int, **fields: object) -> Holder:
    return Holder(id=name, slots=tuple(f"n/{i}" for i in numbers), **fields)  # type: ignore[arg-type]


def test_free_slots_go_first_and_those_that_still_have_a_process_last() -> None:
    assert lend(2, SLOTS, [holder("a", 0, 1, 2)], busy={"n/0", "n/1", "n/2", "n/3"}) == ("n/4", "n/5")
    assert lend(3, SLOTS, [holder("a", 0, 1, 2)], busy={"n/3"})[:3] == ("n/4", "n/5", "n/3")


def test_jobs_without_a_promise_give_before_those_with_one_and_the_largest_first() -> None:
    jobs = [holder("promised", 0, 1, 2, promised=True), holder("small", 3), holder("large", 4, 5)]
    assert lend(1, SLOTS, jobs, busy=SLOTS) == ("n/5",)
    assert lend(2, SLOTS, jobs, busy=SLOTS) == ("n/5", "n/2")  # all others are at their fewest


def test_nobody_goes_below_its_fewest_while_somebody_else_can_give() -> None:
    jobs = [holder("rigid", 0, 1, 2, 3, fewest=4), holder("elastic", 4, 5)]
    assert lend(1, SLOTS, jobs, busy=SLOTS) == ("n/5",)


def test_who_loses_least_is_stopped_when_there_is_no_other_way() -> None:
    jobs = [holder("a", 0, 1, fewest=2, loss_s=50), holder("b", 2, 3, fewest=2, loss_s=5), holder("c", 4, 5, fewest=2)]
    kept = [holder("p", 0, 1, fewest=2, promised=True, loss_s=0), *jobs[1:]]
    assert set(lend(2, SLOTS, jobs, busy=SLOTS)) == {"n/4", "n/5"}
    assert set(lend(4, SLOTS, kept, busy=SLOTS)) == {"n/2", "n/3", "n/4", "n/5"}


def test_of_promised_jobs_the_one_with_most_time_to_spare_is_stopped() -> None:
    jobs = [
        holder("late", 0, 1, fewest=2, promised=True, slack_s=-30.0),
        holder("tight", 2, 3, fewest=2, promised=True, slack_s=20.0, loss_s=0.0),
        holder("easy", 4, 5, fewest=2, promised=True, slack_s=200.0, loss_s=50.0),
    ]
    assert set(lend(2, SLOTS, jobs, busy=SLOTS)) == {"n/4", "n/5"}
    assert set(lend(4, SLOTS, jobs, busy=SLOTS)) == {"n/2", "n/3", "n/4", "n/5"}


def test_all_there_are_is_the_most_that_can_be_lent() -> None:
    assert set(lend(9, SLOTS, [holder("a", 0, 1, 2, 3, 4, 5)], busy=SLOTS)) == set(SLOTS)


def test_the_last_slots_lent_come_back_first() -> None:
    assert take_back(1, ("n/5", "n/4", "n/3")) == ("n/5", "n/4")
    assert take_back(0, ("n/5", "n/4")) == ()


@pytest.mark.parametrize(
    ("node", "kept", "reason"),
    [
        (NodeState(id="n", device_type="cpu", slots=4), None, ""),
        (
            NodeState(id="n", device_type="cpu", slots=4, lent=(2, 3)),
            ("n/0", "n/1"),
            "2 slots were reclaimed for somebody else; it goes on with 2 slots",
        ),
        (
            NodeState(id="n", device_type="cpu", slots=4, lent=(1, 2, 3)),
            (),
            "3 slots were reclaimed for somebody else; it needs 2 slots and waits, its state kept",
        ),
        (
            NodeState(id="n", device_type="cpu", slots=4, phase=NodePhase.DRAINED),
            (),
            "node n is drained; it needs 2 slots and waits, its state kept",
        ),
        (
            NodeState(id="n", device_type="cpu", slots=4, phase=NodePhase.LOST),
            (),
            "node n is lost; it needs 2 slots and waits, its state kept",
        ),
    ],
)
def test_jobs_lose_what_they_may_not_use_and_are_told_why(
    node: NodeState, kept: tuple[str, ...] | None, reason: str
) -> None:
    found = evict([holder("a", 0, 1, 2, 3, fewest=2)], {"n": node})
    assert found == ([] if kept is None else [Eviction(job="a", slots=kept, reason=reason)])


def test_a_node_that_nobody_knows_any_more_is_lost() -> None:
    assert evict([holder("a", 0)], {})[0].reason.startswith("node n is lost")
