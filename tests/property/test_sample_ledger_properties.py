"""The books of trained samples against a plain Python counter."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.sample_ledger import SampleLedger

TOTAL = 40


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 30), st.integers(0, 10)), max_size=30))
def test_the_books_count_as_a_counter_does(told: list[tuple[int, int, int, int]]) -> None:
    """(epoch, virtual worker, first, length)"""
    book = SampleLedger()
    truth: dict[int, Counter[tuple[int, int]]] = {0: Counter(), 1: Counter()}
    for epoch in (0, 1):
        for v in range(3):
            book.expect(epoch, v, TOTAL)
    for epoch, v, first, length in told:
        book.record(epoch, v, first, first + length)
        truth[epoch].update((v, n) for n in range(first, first + length))
    for row in book.rows():
        count = truth[row["epoch"]]
        assert row["expected"] == 3 * TOTAL
        assert row["seen"] == count.total()
        assert row["duplicated"] == sum(n - 1 for n in count.values())
        assert row["missed"] == 3 * TOTAL - len(count)
