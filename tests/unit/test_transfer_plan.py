"""Sources for newcomers: Elan's own example, each level, links that would collide, several sources at once."""

import pytest

from concertina.core.errors import UsageError
from concertina.master.topology import Lanes, Level, Place, Via
from concertina.master.transfer_plan import Transfer, TransferPlan, fewest_rounds, plan_transfers


def spots(plan: TransferPlan) -> list[list[tuple[str, str]]]:
    return [[(t.source, t.target) for t in transfers] for transfers in plan.rounds]


def one_host(*workers: str) -> dict[str, Place]:
    return {worker: Place(host="h") for worker in workers}


def test_figure_9_serves_e_from_c_and_f_from_d_at_the_same_time() -> None:
    """A, B below one PCIe switch; C on the other socket of that host; D on another host. E is beside C, F beside D."""
    existing = {
        "A": Place(host="1", socket="0", switch="0"),
        "B": Place(host="1", socket="0", switch="0"),
        "C": Place(host="1", socket="1", switch="2"),
        "D": Place(host="2", socket="0", switch="0"),
    }
    newcomers = {"E": Place(host="1", socket="1", switch="3"), "F": Place(host="2", socket="1", switch="2")}
    plan = plan_transfers(existing, newcomers)
    assert plan.rounds == (
        (
            Transfer(source="C", target="E", via=Via.SHARED_MEMORY, level=Level.SOCKET, first=0, end=1),
            Transfer(source="D", target="F", via=Via.SHARED_MEMORY, level=Level.HOST, first=0, end=1),
        ),
    )
    assert plan.reason == "2 newcomers in 1 round from the nearest sources: 2 by shared memory"


@pytest.mark.parametrize(
    ("near", "via", "level"),
    [
        (Place(rack="r", host="h", socket="0", switch="0"), Via.PEER, Level.SWITCH),
        (Place(rack="r", host="h", socket="0", switch="1"), Via.SHARED_MEMORY, Level.SOCKET),
        (Place(rack="r", host="h", socket="1", switch="2"), Via.SHARED_MEMORY, Level.HOST),
        (Place(rack="r", host="i", socket="0", switch="0"), Via.NETWORK, Level.RACK),
        (Place(rack="s", host="h", socket="0", switch="0"), Via.NETWORK, Level.REST),
    ],
)
def test_each_level_has_its_way(near: Place, via: Via, level: Level) -> None:
    plan = plan_transfers({"a": near}, {"n": Place(rack="r", host="h", socket="0", switch="0")})
    assert [(t.via, t.level) for t in plan.rounds[0]] == [(via, level)]


def test_the_nearest_of_all_levels_is_chosen() -> None:
    places = [
        ("switch", Place(rack="r", host="h", socket="0", switch="0")),
        ("socket", Place(rack="r", host="h", socket="0", switch="1")),
        ("host", Place(rack="r", host="h", socket="1", switch="2")),
        ("rack", Place(rack="r", host="i", socket="0", switch="0")),
        ("rest", Place(rack="s", host="h", socket="0", switch="0")),
    ]
    for k in range(len(places)):
        plan = plan_transfers(dict(places[k:]), {"n": Place(rack="r", host="h", socket="0", switch="0")}, chunks=8)
        assert plan.sources_of("n") == (places[k][0],)


def test_unknown_switches_use_shared_memory() -> None:
    plan = plan_transfers(one_host("a"), one_host("n"))
    assert plan.rounds[0][0].via is Via.SHARED_MEMORY


def test_transfers_over_one_socket_link_take_turns() -> None:
    """The contention that Elan names: replications that cross from socket to socket."""
    existing = {w: Place(host="h", socket="0", switch=w) for w in "ab"}
    newcomers = {w: Place(host="h", socket="1", switch=w) for w in "mn"}
    assert spots(plan_transfers(existing, newcomers)) == [[("a", "m")], [("b", "n")]]


def test_transfers_in_opposite_directions_do_not_collide() -> None:
    existing = {"a": Place(rack="r", host="1"), "b": Place(rack="s", host="3")}
    newcomers = {"m": Place(rack="s", host="4"), "n": Place(rack="r", host="2")}
    assert len(plan_transfers(existing, newcomers, lanes=Lanes(rack=1)).rounds) == 1


def test_one_network_card_takes_newcomers_one_after_another() -> None:
    existing = {"a": Place(host="1"), "b": Place(host="2")}
    newcomers = {w: Place(host="3") for w in "klmn"}
    assert [len(r) for r in plan_transfers(existing, newcomers).rounds] == [1, 1, 1, 1]
    assert [len(r) for r in plan_transfers(existing, newcomers, lanes=Lanes(host=2)).rounds] == [2, 2]


def test_a_source_serves_one_at_a_time_and_sources_share_the_work() -> None:
    plan = plan_transfers(one_host("a", "b"), one_host(*"klmn"), most_sources=1)
    assert sorted(source for transfers in spots(plan) for source, _ in transfers) == ["a", "a", "b", "b"]
    assert [len(transfers) for transfers in plan.rounds] == [2, 2]


def test_sources_that_would_be_idle_send_a_part() -> None:
    plan = plan_transfers(one_host("a", "b", "c"), one_host("n"), chunks=8)
    assert [(t.source, t.first, t.end) for t in plan.rounds[0]] == [("a", 0, 3), ("b", 3, 6), ("c", 6, 8)]


def test_further_sources_are_those_that_have_least_to_do() -> None:
    plan = plan_transfers(one_host(*"abc"), one_host("m", "n"), chunks=2, most_sources=2, lanes=Lanes(worker_out=2))
    assert spots(plan) == [[("a", "m"), ("c", "m"), ("b", "n"), ("a", "n")]]


@pytest.mark.parametrize(("most", "chunks", "lanes"), [(2, 8, Lanes()), (8, 2, Lanes()), (8, 8, Lanes(worker_in=2))])
def test_no_more_sources_than_asked_chunks_or_lanes(most: int, chunks: int, lanes: Lanes) -> None:
    plan = plan_transfers(one_host(*"abcde"), one_host("n"), chunks=chunks, most_sources=most, lanes=lanes)
    assert len(plan.sources_of("n")) == 2


def test_further_sources_are_of_the_same_level_only() -> None:
    existing = {"a": Place(host="1"), "b": Place(host="2"), "c": Place(host="2")}
    plan = plan_transfers(existing, {"n": Place(host="2")}, chunks=4)
    assert plan.sources_of("n") == ("b", "c")


def test_a_near_source_that_others_need_more_is_left_to_them() -> None:
    """`far` may use a or b; `near` only a. With one lane each, one round needs far from b."""
    existing = {"a": Place(host="1", switch="0", socket="0"), "b": Place(host="1", switch="1", socket="0")}
    newcomers = {"near": Place(host="1", switch="0", socket="0"), "far": Place(host="2")}
    assert spots(plan_transfers(existing, newcomers)) == [[("a", "near"), ("b", "far")]]


def test_the_plan_does_not_depend_on_the_order_of_its_input() -> None:
    existing, newcomers = one_host(*"abc"), one_host(*"mno")
    turned = dict(reversed(existing.items())), dict(reversed(newcomers.items()))
    assert plan_transfers(*turned, chunks=5) == plan_transfers(existing, newcomers, chunks=5)


def test_nobody_new_means_nothing_to_do() -> None:
    assert plan_transfers(one_host("a"), {}) == TransferPlan(rounds=(), reason="nobody is new")
    assert fewest_rounds(one_host("a"), {}) == 0


def test_bad_requests_get_one_sentence() -> None:
    with pytest.raises(UsageError, match="no worker that has the state"):
        plan_transfers({}, one_host("n"))
    with pytest.raises(UsageError, match="n cannot be a newcomer and have the state"):
        plan_transfers(one_host("n"), one_host("n"))
    with pytest.raises(UsageError, match="0 chunks"):
        plan_transfers(one_host("a"), one_host("n"), chunks=0)
    with pytest.raises(UsageError, match="host carries 0 transfers"):
        Lanes(host=0)
    with pytest.raises(UsageError, match="has no host"):
        Place(host="")
