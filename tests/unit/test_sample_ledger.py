"""The books of trained samples: what is counted, and what cannot be."""

import pytest

from concertina.core.errors import UsageError
from concertina.core.sample_ledger import SampleLedger


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
    for first in range(0, samples, 4):
        for v in range(virtual):
            book.record(0, v, first, min(samples, first + 4))
    return book


def test_an_epoch_without_fault() -> None:
    assert whole().rows() == [row(20, 20)]


def test_positions_that_were_trained_again_are_counted() -> None:
    book = whole()
    book.record(0, 1, 2, 6)
    assert book.rows() == [row(20, 24, duplicated=4)]


def test_a_sample_that_was_trained_three_times_counts_two_doubles() -> None:
    book = whole(virtual=1)
    book.record(0, 0, 0, 1)
    book.record(0, 0, 0, 1)
    assert book.rows() == [row(10, 12, duplicated=2)]


def test_positions_that_were_left_out_are_counted() -> None:
    book = SampleLedger()
    book.expect(0, 0, 10)
    book.record(0, 0, 6, 9)
    book.record(0, 0, 2, 4)
    assert book.rows() == [row(10, 5, missed=5)]


def test_a_virtual_worker_of_which_nothing_is_heard_is_missed() -> None:
    book = SampleLedger()
    for v in (0, 1):
        book.expect(0, v, 6)
    book.record(0, 0, 0, 6)
    assert book.rows() == [row(12, 6, missed=6)]


def test_epochs_loaders_and_passes_are_kept_apart() -> None:
    book = SampleLedger()
    for epoch, loader, turn in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        book.expect(epoch, 0, 5, loader=loader, turn=turn)
        book.record(epoch, 0, 0, 5, loader=loader, turn=turn)
    assert book.rows() == [row(10, 10), {**row(5, 5), "loader": 1}, row(5, 5, epoch=1)]


def test_what_cannot_be_is_refused() -> None:
    book = whole()
    with pytest.raises(UsageError, match="virtual worker 0: 12 samples are expected, it was 10 before"):
        book.expect(0, 0, 12)
    with pytest.raises(UsageError, match="positions 8 to 10 were trained, needed positions from 0 to 9"):
        book.record(0, 0, 8, 11)
    assert book.rows() == [row(20, 20)], "nothing has changed"
