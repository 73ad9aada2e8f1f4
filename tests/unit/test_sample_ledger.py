"""The books of trained samples: what is counted, found, joined, saved, and that they stay small."""

import json
import sys
from typing import Any

import pytest

from concertina.core.errors import UsageError
from concertina.core.sample_ledger import SampleLedger, positions
from concertina.core.sample_set import PAGE, SampleSet


def row(expected: int, seen: int, duplicated: int = 0, missed: int = 0, epoch: int = 0) -> dict[str, int]:
    return {
        "epoch": epoch,
        "loader": 0,
        "expected": expected,
        "seen": seen,
        "duplicated": duplicated,
        "missed": missed,
    }


def whole(virtual: int = 2, samples: int = 10) -> SampleLedger:
    """An epoch without fault, in batches of 4."""
    book = SampleLedger()
    for v in range(virtual):
        book.expect(0, v, samples)
    for step, first in enumerate(range(0, samples, 4)):
        for v in range(virtual):
            book.record(0, step, v, first, min(samples, first + 4))
    return book


def test_an_epoch_without_fault() -> None:
    book = whole()
    assert book.rows() == [row(20, 20)]
    assert book.problems == book.missed() == []


def test_positions_that_were_trained_again_are_counted_and_named() -> None:
    book = whole()
    book.record(0, 3, 1, 2, 6)
    assert book.rows() == [row(20, 24, duplicated=4)]
    assert book.problems == ["epoch 0, loader 0, virtual worker 1: positions 2 to 5 were trained again by step 3"]


def test_a_sample_that_was_trained_three_times_counts_two_doubles() -> None:
    book = whole(virtual=1)
    book.record(0, 3, 0, 0, 1)
    book.record(0, 4, 0, 0, 1)
    assert book.rows() == [row(10, 12, duplicated=2)]


def test_positions_that_were_left_out_are_counted_and_named() -> None:
    book = SampleLedger()
    book.expect(0, 0, 10)
    book.record(0, 1, 0, 2, 4)
    book.record(0, 2, 0, 6, 9)
    assert book.rows() == [row(10, 5, missed=5)]
    assert book.missed() == [
        "epoch 0, loader 0, virtual worker 0: positions 0 to 1 were not trained",
        "epoch 0, loader 0, virtual worker 0: positions 4 to 5 were not trained",
        "epoch 0, loader 0, virtual worker 0: positions 9 to 9 were not trained",
    ]
    assert len(book.missed(limit=2)) == 2


def test_a_virtual_worker_of_which_nothing_is_heard_is_missed() -> None:
    book = SampleLedger()
    for v in (0, 1):
        book.expect(0, v, 6)
    book.record(0, 1, 0, 0, 6)
    assert book.rows() == [row(12, 6, missed=6)]


def test_epochs_loaders_and_passes_are_kept_apart() -> None:
    book = SampleLedger()
    for epoch, loader, turn in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        book.expect(epoch, 0, 5, loader=loader, turn=turn)
        book.record(epoch, 1, 0, 0, 5, loader=loader, turn=turn)
    assert book.rows() == [row(10, 10), {**row(5, 5), "loader": 1}, row(5, 5, epoch=1)]


def test_samples_told_by_number_count_for_the_epoch_whoever_trained_them() -> None:
    book = SampleLedger()
    book.expect_numbers(0, 6)
    book.record_numbers(0, 1, 0, [5, 0, 3])
    book.record_numbers(0, 1, 1, [1, 2, 5])
    assert book.rows() == [row(6, 6, duplicated=1, missed=1)]
    assert book.problems == ["epoch 0, loader 0, all workers: samples 5 to 5 were trained again by step 1"]
    assert book.missed() == ["epoch 0, loader 0, all workers: samples 4 to 4 were not trained"]


def test_a_number_twice_in_one_step_is_a_double() -> None:
    book = SampleLedger()
    book.expect_numbers(0, 4)
    book.record_numbers(0, 1, 0, [1, 1, 1, 0])
    assert book.rows() == [row(4, 4, duplicated=2, missed=2)]


def test_books_of_several_workers_are_joined() -> None:
    left, right = SampleLedger(), SampleLedger()
    for book, first, end in ((left, 0, 6), (right, 5, 9)):
        book.expect(0, 0, 10)
        book.record(0, 7, 0, first, end)
    left.merge(right)
    assert left.rows() == [row(10, 10, duplicated=1, missed=1)]
    assert left.problems == ["epoch 0, loader 0, virtual worker 0: positions 5 to 5 were trained again by step 7"]


def test_joining_keeps_what_only_the_other_book_knows() -> None:
    left, right = SampleLedger(), whole(virtual=1)
    right.record(0, 3, 0, 0, 1)
    left.merge(right)
    assert left == right
    assert (left.rows(), len(left.problems)) == ([row(10, 11, duplicated=1)], 1)


def test_books_survive_json() -> None:
    book = whole()
    book.expect_numbers(1, 3 * PAGE)
    book.record_numbers(1, 9, 0, [2 * PAGE, 5, PAGE - 1, 5])
    book.record_numbers(1, 9, 0, range(PAGE, 2 * PAGE))
    again = SampleLedger.from_json(json.loads(json.dumps(book.to_json())))
    assert again == book
    assert again.rows() == book.rows()
    again.record(0, 4, 0, 0, 1)
    assert again.rows()[0]["duplicated"] == 1, "it goes on where it was"


def test_a_hundred_million_samples_in_order_take_a_few_hundred_bytes() -> None:
    book, samples = SampleLedger(), 100_000_000
    book.expect(0, 0, samples)
    for step, first in enumerate(range(0, samples, 1_000_000)):
        book.record(0, step, 0, first, first + 1_000_000)
    assert book.rows() == [row(samples, samples)]
    assert len(book.streams[0, 0, 0, 0].once._pages) <= 1
    assert len(json.dumps(book.to_json())) < 2_000


def test_a_hundred_million_samples_without_the_first_are_saved_in_a_few_hundred_bytes() -> None:
    book = SampleSet()
    book.add_range(1, 100_000_000)
    assert len(json.dumps(book.to_json())) < 2_000


def test_a_hundred_million_samples_in_any_order_take_a_bit_each_at_most() -> None:
    """Every other sample: the least that can be left out of a book."""
    book, samples = SampleSet(), 100_000_000
    pattern = int.from_bytes(b"\x55" * (PAGE // 8), "little")
    for page in range(samples // PAGE):
        book._add(page, pattern, book)
    assert len(book) == samples // PAGE * PAGE // 2
    assert sum(sys.getsizeof(mask) for mask in book._pages.values()) < 1.2 * samples / 8


def event(virtual: int, first: int, end: int, seen: int, **more: int) -> dict[str, Any]:
    """As a worker reports a pass of 3 batches of 4 samples with 9 in all."""
    fields = {"loader": 0, "epoch": 0, "virtual": virtual, "first": first, "end": end, "seen": seen}
    return {**fields, "batches": 3, "expected": 9, **more}


def test_the_events_of_workers_give_the_rows_of_the_report() -> None:
    book = SampleLedger()
    book.add(event(0, 0, 1, 4))
    book.add(event(0, 1, 3, 5))
    book.add(event(1, 0, 3, 9))
    assert book.rows() == [row(18, 18)]


def test_events_that_overlap_or_leave_a_hole_are_counted_in_samples() -> None:
    book = SampleLedger()
    book.add(event(0, 0, 2, 8))
    book.add(event(0, 1, 3, 5))
    book.add(event(1, 2, 3, 1))
    assert book.rows() == [row(18, 14, duplicated=4, missed=8)]


def test_a_second_pass_in_an_epoch_is_no_double_if_the_event_says_so() -> None:
    book = SampleLedger()
    book.add(event(0, 0, 3, 9))
    book.add(event(0, 0, 3, 9, turn=1))
    assert book.rows() == [row(18, 18)]


@pytest.mark.parametrize(
    ("first", "end", "seen", "found"),
    [(0, 3, 9, (0, 9)), (0, 2, 8, (0, 8)), (1, 2, 4, (4, 8)), (2, 3, 1, (8, 9)), (1, 3, 5, (4, 9)), (1, 1, 0, (0, 0))],
)
def test_batches_as_positions(first: int, end: int, seen: int, found: tuple[int, int]) -> None:
    assert positions(first, end, 3, seen, 9) == found


def test_only_the_first_problems_are_kept_but_all_are_counted() -> None:
    book = whole(virtual=1, samples=200)
    for _ in range(2):
        for first in range(0, 200, 2):
            book.record(0, 99, 0, first, first + 1)
    assert len(book.problems) == 20
    assert book.rows()[0]["duplicated"] == 200


def test_what_cannot_be_is_refused() -> None:
    book = whole()
    with pytest.raises(UsageError, match="12 samples are expected, it was 10 before"):
        book.expect(0, 0, 12)
    with pytest.raises(UsageError, match="step 5: positions 8 to 10 were trained, needed positions from 0 to 9"):
        book.record(0, 5, 0, 8, 11)
    book.expect_numbers(1, 4)
    with pytest.raises(UsageError, match="samples 1 to 4 were trained, needed numbers from 0 to 3"):
        book.record_numbers(1, 5, 0, [1, 4])
    with pytest.raises(UsageError, match="not of one size"):
        positions(0, 2, 3, 7, 9)
    with pytest.raises(UsageError, match="cannot be"):
        positions(0, 4, 3, 7, 9)
    with pytest.raises(UsageError, match="format None, needed 1"):
        SampleLedger.from_json({})
    assert book.rows()[0] == row(20, 20), "nothing has changed"
