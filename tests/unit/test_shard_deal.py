"""Small hand-worked cases of dealing pieces to virtual workers."""

import pytest

from concertina.core import shard_deal as deal
from concertina.core.errors import UsageError
from concertina.core.shard_deal import Need


def test_a_virtual_worker_wants_the_next_piece_when_it_begins_the_last_it_holds() -> None:
    stream = deal.begin(6, 0, 0, shuffle=False)
    stream = deal.grant(stream, [Need(2, True, 0, 0, 0)])
    held = deal.held_by(stream, 0)
    assert [(g.span.piece, g.span.first) for g in held] == [(0, 0), (1, 0)]
    assert deal.need(held, [10, 10], batch=4, tries=0) == Need(0, False, 0, 4, 4)
    # Ten records of piece 0, and a batch that looks at the eleventh: piece 1 is in use, so another is to be fetched.
    assert deal.need(held, [4, 10], batch=4, tries=0) == Need(1, False, 1, 0, 4)
    assert deal.need(held, [3, 10], batch=4, tries=0) == Need(1, False, 1, 1, 4)


def test_whoever_is_short_asks_for_more_with_every_try() -> None:
    assert deal.need((), (), batch=4, tries=0).wants == 2
    assert deal.need((), (), batch=4, tries=3).wants == 16


def test_pieces_go_round_so_that_nobody_gets_all() -> None:
    short = Need(2, True, 0, 0, 0)
    stream = deal.grant(deal.begin(3, 0, 0, shuffle=False), [short, short])
    assert [[g.span.piece for g in deal.held_by(stream, v)] for v in (0, 1)] == [[0, 2], [1]]
    assert deal.all_dealt(stream)


def test_the_rest_is_dealt_out_evenly_and_ends_for_all_in_the_same_round() -> None:
    short = Need(1, True, 0, 0, 0)
    stream = deal.grant(deal.begin(2, 0, 0, shuffle=False), [short, short])
    stream = deal.even_out(stream, {0: 1, 1: 8}, batch=3, virtual=2)  # one record here, eight there
    assert stream.tail == 2
    spans = [[(g.span.piece, g.span.first, g.span.end) for g in deal.held_by(stream, v)] for v in (0, 1)]
    assert spans == [[(0, 0, 1), (1, 0, 4)], [(1, 4, 8)]]
    needs = deal.tail_needs(stream, 2)
    assert [n.size for n in needs] == [3, 2]
    stream = deal.advance(stream, needs)
    assert [n.size for n in deal.tail_needs(stream, 2)] == [2, 2]
    assert not stream.over
    stream = deal.advance(stream, deal.tail_needs(stream, 2))
    assert stream.over
    assert (stream.rounds, stream.records) == (2, 9)


def test_a_stream_with_fewer_records_than_virtual_workers_is_refused() -> None:
    short = Need(1, True, 0, 0, 0)
    stream = deal.grant(deal.begin(2, 0, 0, shuffle=False), [short, short, short])
    with pytest.raises(UsageError, match=r"the shards hold 2 records, one step needs 3 .*lower --virtual"):
        deal.even_out(stream, {0: 2, 1: 0}, batch=4, virtual=3)
