"""The books behind session.shards: pieces on demand, progress, commit, leaving, loss, a new master."""

import json

import pytest

from concertina.core import shard_ledger as ledger
from concertina.core.errors import UsageError
from concertina.core.shard_ledger import EpochOver, Granted, Refused, Report, Shards, Span, Wait


def in_order(pieces: int = 4, hold: int = 2) -> Shards:
    return ledger.start(pieces, shuffle=False, hold=hold)


def take(state: Shards, worker: str, request: int = 1, epoch: int = 0) -> tuple[Shards, Granted]:
    state, answer = ledger.take(state, worker, request, epoch)
    assert isinstance(answer, Granted), answer
    return state, answer


def read(state: Shards, worker: str, ticket: int, step: int, offset: int, ended: bool = False) -> Shards:
    state, refused = ledger.read(state, worker, ticket, step=step, offset=offset, ended=ended)
    assert refused is None, refused
    return state


def test_pieces_are_handed_out_on_demand_each_once() -> None:
    state = in_order(3)
    state, a = take(state, "a", 1)
    state, b = take(state, "b", 1)
    state, c = take(state, "a", 2)
    assert [g.span for g in (a, b, c)] == [Span(0), Span(1), Span(2)]
    assert isinstance(ledger.take(state, "b", 2, 0)[1], Wait)


def test_the_order_is_given_by_seed_and_epoch() -> None:
    first = ledger.order(50, 7, 0)
    assert sorted(first) == list(range(50))
    assert first == ledger.order(50, 7, 0)
    assert len({first, ledger.order(50, 7, 1), ledger.order(50, 8, 0), tuple(range(50))}) == 4
    _, granted = take(ledger.start(50, seed=7), "a")
    assert granted.span.piece == first[0]


def test_the_order_of_a_seed_never_changes() -> None:
    """Written down, so that a new version of anything below that reorders a running epoch is noticed."""
    assert ledger.order(8, 0, 0) == (0, 6, 4, 3, 1, 7, 2, 5)
    assert ledger.order(8, 0, 1) == (0, 6, 7, 3, 4, 1, 5, 2)


def test_a_worker_holds_two_pieces_that_it_has_not_read() -> None:
    state = in_order()
    state, a = take(state, "a", 1)
    state, _ = take(state, "a", 2)
    same, answer = ledger.take(state, "a", 3, 0)
    assert answer == Refused("worker a has 2 pieces to read already, at most 2 at once")
    assert same == state
    state = read(state, "a", a.ticket, 1, 10, ended=True)
    state, third = take(state, "a", 3)
    assert third.span == Span(2), "read to its end, a piece makes room before its step is committed"


def test_the_same_request_again_has_the_same_answer() -> None:
    state, granted = take(in_order(), "a", 1)
    again, answer = ledger.take(state, "a", 1, 0)
    assert (again, answer) == (state, granted)
    assert isinstance(ledger.take(take(state, "a", 2)[0], "a", 1, 0)[1], Refused)
    state = ledger.leave(take(state, "b", 1)[0], "b")
    assert ledger.take(state, "a", 1, 0) == (state, granted), "also after somebody else has left"


def test_an_epoch_is_over_when_its_last_step_is_committed() -> None:
    state, a = take(in_order(1), "a", 1)
    state = read(state, "a", a.ticket, 1, 5, ended=True)
    assert isinstance(ledger.take(state, "a", 2, 0)[1], Wait)
    assert isinstance(ledger.take(state, "a", 2, 1)[1], Wait)
    state = ledger.commit(state, 1)
    assert state.over
    assert ledger.take(state, "a", 2, 0)[1] == EpochOver(0)
    assert isinstance(ledger.take(state, "a", 2, 2)[1], Wait), "epoch 1 comes first"
    state, b = take(state, "a", 2, epoch=1)
    assert b.span == Span(0)
    assert ledger.take(state, "b", 1, 0)[1] == EpochOver(0)
    assert isinstance(ledger.take(state, "b", 1, 2)[1], Wait)


def test_a_leaver_gives_back_what_it_has_not_read() -> None:
    state, a = take(in_order(2), "a", 1)
    state, _ = take(state, "a", 2)
    state = ledger.commit(read(state, "a", a.ticket, 1, 3), 1)
    state = ledger.leave(state, "a")
    assert state.returned == (Span(0, 3), Span(1))
    state, b = take(state, "b", 1)
    assert b.span == Span(0, 3)


def test_a_lost_worker_step_that_is_committed_after_all_is_not_given_again() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.leave(read(state, "a", a.ticket, 1, 3), "a")
    assert state.returned == (Span(0, 3),)
    state = ledger.commit(state, 1)
    assert state.returned == (Span(0, 3),)
    assert not state.held


def test_a_lost_worker_step_that_is_done_again_is_given_again_in_one_piece() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.leave(read(state, "a", a.ticket, 1, 3), "a")
    state = ledger.roll_back(state)
    assert state.returned == (Span(0),)
    assert not state.held


def test_the_part_of_a_lost_worker_is_given_with_its_end_where_the_rest_is_with_another() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.leave(read(state, "a", a.ticket, 1, 3), "a")
    state, b = take(state, "b", 1)
    state = ledger.roll_back(state)
    state, c = take(state, "c", 1)
    assert (b.span, c.span) == (Span(0, 3), Span(0, 0, 3))
    state = ledger.commit(read(read(state, "c", c.ticket, 1, 3), "b", b.ticket, 1, 9, ended=True), 1)
    assert state.over


def test_members_read_again_from_the_last_committed_step() -> None:
    state, a = take(in_order(), "a")
    state = ledger.commit(read(state, "a", a.ticket, 1, 2), 1)
    state = read(state, "a", a.ticket, 2, 5)
    assert ledger.holdings(state, "a") == (Granted(a.ticket, Span(0, 5)),)
    state = ledger.roll_back(state)
    assert ledger.holdings(state, "a") == (Granted(a.ticket, Span(0, 2)),)


def test_a_commit_counts_its_step_and_those_before_only() -> None:
    state, a = take(in_order(), "a")
    for step, offset in ((1, 2), (2, 4), (3, 6)):
        state = read(state, "a", a.ticket, step, offset)
    state = ledger.roll_back(ledger.commit(state, 2))
    assert ledger.holdings(state, "a") == (Granted(a.ticket, Span(0, 4)),)
    assert ledger.commit(state, 1) == state


def test_a_commit_keeps_what_was_read_for_later_steps() -> None:
    state, a = take(in_order(), "a")
    state = ledger.commit(read(read(state, "a", a.ticket, 1, 2), "a", a.ticket, 2, 4), 1)
    assert ledger.holdings(state, "a") == (Granted(a.ticket, Span(0, 4)),)


def test_a_part_that_comes_back_keeps_its_end() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.leave(read(state, "a", a.ticket, 1, 3), "a")
    state, _ = take(state, "b", 1)
    state, c = take(ledger.roll_back(state), "c", 1)
    state = ledger.leave(ledger.commit(read(state, "c", c.ticket, 1, 2), 1), "c")
    assert state.returned == (Span(0, 2, 3),)


def test_nothing_comes_back_of_a_piece_that_was_read_to_its_end() -> None:
    state, a = take(in_order(2), "a", 1)
    state, b = take(state, "a", 2)
    state = read(read(state, "a", a.ticket, 1, 3, ended=True), "a", b.ticket, 1, 0, ended=True)
    state = ledger.leave(state, "a")
    assert state.returned == ()
    assert ledger.roll_back(state).returned == (Span(0, 0, 3),), "the other piece has no records"
    assert ledger.commit(state, 1).over


def test_neighbouring_parts_come_back_as_one_with_the_end_of_the_last() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.leave(read(state, "a", a.ticket, 1, 3), "a")
    state, _ = take(state, "b", 1)  # 3 and beyond
    state, c = take(ledger.roll_back(state), "c", 1)
    state = ledger.leave(read(state, "c", c.ticket, 1, 2), "c")
    assert state.returned == (Span(0, 2, 3),)
    assert ledger.roll_back(state).returned == (Span(0, 0, 3),)


def test_a_piece_without_records_is_done_when_its_step_is() -> None:
    state, a = take(in_order(1), "a")
    state = ledger.commit(read(state, "a", a.ticket, 1, 0, ended=True), 1)
    assert state.over


def test_a_report_may_come_twice() -> None:
    state, a = take(in_order(1), "a")
    state = read(state, "a", a.ticket, 1, 4)
    state = read(state, "a", a.ticket, 1, 4, ended=True)
    assert read(state, "a", a.ticket, 1, 4) == state
    assert ledger.commit(state, 1).over


@pytest.mark.parametrize(
    ("worker", "ticket", "step", "offset", "why"),
    [
        ("b", 0, 3, 5, "worker b does not hold ticket 0"),
        ("a", 9, 3, 5, "worker a does not hold ticket 9"),
        ("a", 0, 1, 5, "step 1 is committed already"),
        ("a", 0, 2, 5, "step 2 after step 3"),
        ("a", 0, 3, 3, "read to 3, but it had read to 4"),
        ("a", 1, 3, 8, "read to 8, beyond its end at 7"),
        ("c", 4, 3, 3, "read to 3, beyond its part, which ends at 2"),
    ],
)
def test_a_report_that_cannot_be_right_is_refused_and_changes_nothing(
    worker: str, ticket: int, step: int, offset: int, why: str
) -> None:
    state = in_order(3)
    for name, request in (("a", 1), ("a", 2), ("b", 1)):
        state, _ = take(state, name, request)
    state = ledger.commit(state, 1)
    state = ledger.leave(read(state, "b", 2, 2, 2), "b")
    state, _ = take(state, "d", 1)  # the rest of b's piece
    state = ledger.roll_back(state)
    state, granted = take(state, "c", 1)
    assert granted == Granted(4, Span(2, 0, 2))
    state = read(read(state, "a", 0, 3, 4), "a", 1, 3, 7, ended=True)
    same, refused = ledger.read(state, worker, ticket, step=step, offset=offset)
    assert same == state
    assert refused is not None
    assert why in refused.reason


def test_all_reports_of_a_step_at_once_are_as_one_after_another_and_only_the_wrong_one_is_refused() -> None:
    state, a = take(in_order(), "a")
    state, b = take(state, "b")
    reports = [Report("a", a.ticket, 3), Report("b", a.ticket, 4), Report("b", b.ticket, 5, ended=True)]
    together, refused = ledger.read_all(state, 1, reports)
    assert together == read(read(state, "a", a.ticket, 1, 3), "b", b.ticket, 1, 5, ended=True)
    assert refused == (Refused("worker b does not hold ticket 0; what it reads there does not count"),)


def test_a_job_that_continues_from_a_checkpoint_hands_everything_else_out_again() -> None:
    state, a = take(in_order(3), "a", 1)
    state, b = take(state, "b", 1)
    state = ledger.commit(read(state, "a", a.ticket, 1, 2), 1)
    state = read(read(state, "b", b.ticket, 2, 4), "a", a.ticket, 2, 3)
    state = ledger.begin_again(state)
    assert state.returned == (Span(0, 2), Span(1))
    assert not state.held


def test_a_new_master_goes_on_with_what_was_saved() -> None:
    state, a = take(ledger.start(5, seed=3), "a", 1)
    state, b = take(state, "b", 4)
    state = read(read(state, "a", a.ticket, 1, 2), "b", b.ticket, 1, 7, ended=True)
    state = ledger.leave(state, "a")
    assert ledger.from_json(json.loads(json.dumps(ledger.to_json(state)))) == state


def test_bad_settings_and_states_get_one_sentence() -> None:
    with pytest.raises(UsageError, match="got 0 items"):
        ledger.start(0)
    with pytest.raises(UsageError, match="may hold 0 pieces"):
        ledger.start(3, hold=0)
    with pytest.raises(UsageError, match="has format 9, needed 1"):
        ledger.from_json({"format": 9})
    with pytest.raises(UsageError, match="without a name"):
        ledger.take(in_order(), "", 1, 0)
