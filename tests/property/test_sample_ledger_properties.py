"""Sets of samples and the books over them against plain Python counters."""

import json
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.sample_ledger import SampleLedger
from concertina.core.sample_set import PAGE, SampleSet

COMMON = settings(max_examples=80, deadline=None)
TOTAL = 3 * PAGE + 50

# Numbers near the borders of pages are where mistakes would be.
near_borders = st.builds(lambda page, off: min(TOTAL, max(0, page * PAGE + off)), st.integers(0, 3), st.integers(-3, 3))
numbers = st.one_of(near_borders, st.integers(0, TOTAL)).map(lambda n: min(n, TOTAL - 1))
spans = st.tuples(near_borders, near_borders).map(lambda pair: (min(pair), max(pair)))
adds = st.lists(st.one_of(spans, st.lists(numbers, max_size=12)), max_size=8)


def fill(parts: list[tuple[int, int] | list[int]]) -> tuple[SampleSet, Counter[int]]:
    """The set and the plain truth, with what came back checked on the way."""
    made, truth = SampleSet(), Counter[int]()
    for part in parts:
        told = range(*part) if isinstance(part, tuple) else part
        before = set(truth)
        again = made.add_range(*part) if isinstance(part, tuple) else made.add(part)
        truth.update(told)
        doubled = {n for n, count in Counter(told).items() if n in before or count > 1}
        assert set(spread(again)) == doubled
    return made, truth


def spread(some: SampleSet) -> list[int]:
    return [n for first, end in some.ranges() for n in range(first, end)]


@COMMON
@given(adds)
def test_a_set_holds_what_was_added(parts: list[tuple[int, int] | list[int]]) -> None:
    made, truth = fill(parts)
    assert spread(made) == sorted(truth)
    assert len(made) == len(truth)
    assert all((n in made) == (n in truth) for n in range(0, TOTAL, 7))
    assert [n for first, end in made.missing(TOTAL) for n in range(first, end)] == sorted(
        set(range(TOTAL)) - set(truth)
    )
    found = list(made.ranges())
    assert all(a[1] < b[0] for a, b in pairwise(found)), "ranges that touch are one"
    assert SampleSet.from_json(json.loads(json.dumps(made.to_json()))) == made


@COMMON
@given(adds, adds)
def test_joining_two_sets_is_the_same_in_both_directions(
    left: list[tuple[int, int] | list[int]], right: list[tuple[int, int] | list[int]]
) -> None:
    (a, in_a), (b, in_b) = fill(left), fill(right)
    (other_a, _), (other_b, _) = fill(left), fill(right)
    assert set(spread(a.merge(b))) == set(in_a) & set(in_b)
    other_b.merge(other_a)
    assert a == other_b
    assert spread(a) == sorted(set(in_a) | set(in_b))


@COMMON
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 30), st.integers(0, 10)), max_size=30),
    st.integers(0, 30),
    st.booleans(),
)
def test_the_books_count_as_a_counter_does_in_one_or_two_books(
    told: list[tuple[int, int, int, int]], cut: int, restart: bool
) -> None:
    """(epoch, virtual worker, first, length) into two books that are joined, with a restart between."""
    total = 40
    books = [SampleLedger(), SampleLedger()]
    truth: dict[int, Counter[tuple[int, int]]] = {0: Counter(), 1: Counter()}
    for book in books:
        for epoch in (0, 1):
            for v in range(3):
                book.expect(epoch, v, total)
    for k, (epoch, v, first, length) in enumerate(told):
        books[k >= cut].record(epoch, k, v, first, first + length)
        truth[epoch].update((v, n) for n in range(first, first + length))
    joined = SampleLedger.from_json(json.loads(json.dumps(books[0].to_json()))) if restart else books[0]
    joined.merge(books[1])
    for row in joined.rows():
        count = truth[row["epoch"]]
        assert row["expected"] == 3 * total
        assert row["seen"] == count.total()
        assert row["duplicated"] == sum(n - 1 for n in count.values())
        assert row["missed"] == 3 * total - len(count)
