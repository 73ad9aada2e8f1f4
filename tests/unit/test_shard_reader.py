"""Reading pieces in the background: the same records however they come, ahead of use, and errors where they belong."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from concertina.core.errors import UsageError
from concertina.core.shard_ledger import Granted, Span
from concertina.runtime.fabric import Fabric, Post
from concertina.runtime.shard_reader import CHUNK, ShardReader
from concertina.runtime.shards import ShardFeed, ShardOptions

LENGTHS = [5, 0, 3 * CHUNK, 7]


def at_once(item: int) -> list[tuple[int, int]]:
    return [(item, k) for k in range(LENGTHS[item])]


def one_by_one(item: int) -> Iterator[tuple[int, int]]:
    yield from at_once(item)


Make = Callable[..., ShardReader]


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def build(read: Any = one_by_one) -> ShardReader:
        made.append(ShardReader(range(len(LENGTHS)), read))
        return made[-1]

    yield build
    for reader in made:
        reader.close()
    assert not [t for t in threading.enumerate() if t.name == "concertina-shards"]


def spans(*parts: tuple[int, int, int | None]) -> list[Granted]:
    return [Granted(10 + k, Span(*part)) for k, part in enumerate(parts)]


@pytest.mark.parametrize("read", [at_once, one_by_one])
def test_records_come_in_order_across_pieces_from_where_they_shall(make: Make, read: Any) -> None:
    reader = make(read)
    reader.hold({3: spans((0, 2, None), (1, 0, None), (3, 1, 4))}, ready=4)
    assert reader.take(3, 4) == [(0, 2), (0, 3), (0, 4), (3, 1)]
    assert reader.take(3, 2) == [(3, 2), (3, 3)]
    assert sum(reader.look(3, 100)) == 0


@pytest.mark.parametrize("read", [at_once, one_by_one])
def test_ends_are_found_without_keeping_what_is_read(make: Make, read: Any) -> None:
    reader = make(read)
    reader.hold({0: spans((2, 4, None)), 1: [Granted(20, Span(3)), Granted(21, Span(1))]}, ready=2)
    reader.take(0, 2)
    assert reader.ends() == {10: 3 * CHUNK, 20: 7, 21: 0}
    reader.hold({0: [Granted(10, Span(2, 6))]}, ready=2)
    assert reader.take(0, 2) == [(2, 6), (2, 7)]


def test_the_next_piece_is_opened_while_the_present_one_is_in_use(make: Make) -> None:
    opened, second = [], threading.Event()

    def read(item: int) -> list[tuple[int, int]]:
        opened.append(item)
        if item == 3:
            second.set()
        return at_once(item)

    reader = make(read)
    reader.hold({0: spans((2, 0, None), (3, 0, None))}, ready=2)
    assert reader.take(0, 1) == [(2, 0)]
    assert second.wait(20)
    reader.hold({0: [Granted(10, Span(2, 1)), Granted(11, Span(3))]}, ready=2)
    assert reader.take(0, 1) == [(2, 1)]
    assert opened == [2, 3]


def test_going_back_reads_again(make: Make) -> None:
    reader = make()
    reader.hold({0: spans((0, 1, None))}, ready=3)
    first = reader.take(0, 2)
    reader.hold({0: spans((0, 1, None))}, ready=3)
    assert reader.take(0, 2) == first


def test_what_read_raises_is_raised_where_the_records_are_needed(make: Make) -> None:
    def read(item: int) -> Iterator[int]:
        yield from range(3)
        raise OSError("no such disk")

    reader = make(read)
    reader.hold({0: spans((0, 0, None)), 1: spans((0, 0, None))}, ready=2)
    with pytest.raises(OSError, match="no such disk"):
        reader.take(0, 4)


@pytest.mark.parametrize("kind", [list, iter])
def test_a_piece_that_has_become_shorter_is_refused(make: Make, kind: Any) -> None:
    reader = make(lambda item: kind(at_once(item)))
    reader.hold({0: spans((0, 9, None))}, ready=2)
    with pytest.raises(UsageError, match=r"item 0 of session.shards gave 5 records and more when it was read before"):
        reader.look(0, 1)
    reader.hold({0: [Granted(99, Span(3, 2, 9))]}, ready=2)
    with pytest.raises(UsageError, match=r"item 3 of session.shards gave 7 records"):
        reader.look(0, 8)


def test_a_feed_goes_back_over_several_rounds_that_did_not_count() -> None:
    """As after a loss during gradient accumulation: the recovery point is some rounds ago."""
    fabric = Fabric(0, [0], 0, [Post.create()])
    options = ShardOptions(batch_size=4, collate_fn=list)
    feed = ShardFeed(range(len(LENGTHS)), one_by_one, options, virtual=2)

    def play(count: int, point: int, order: tuple[int, ...]) -> list[Any]:
        found = []
        for _ in range(count):
            feed.agree(fabric)
            found.append({v: feed.take(v, 0) for v in order})
            feed.advance(point)
        return found

    try:
        feed.begin(0)
        feed.open(0, 0, (0, 1))
        play(2, 2, (0, 1))
        before = play(3, 2, (0, 1))
        feed.open(0, 2, (0, 1), new_pass=False)
        assert play(3, 2, (0, 1)) == before
        rest = 0
        while feed.stream is not None and not feed.stream.over:
            play(1, feed.stream.rounds + 1, (0, 1))
            rest += 1
        assert feed.batches == 5 + rest
        assert feed.stream is not None
        assert feed.stream.records == sum(LENGTHS)
    finally:
        feed.shut_down()
