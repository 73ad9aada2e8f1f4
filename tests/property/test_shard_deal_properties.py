"""Whatever the pieces, the readers and the restarts: every record is trained once, and by whom does not vary."""

import json
import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core import shard_deal as deal
from concertina.core.shard_deal import Need, Stream

Batch = list[tuple[int, int]]  # records as (piece, offset)


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    virtual: int
    batch: int
    shuffle: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    virtual = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=14))
    short = virtual - sum(lengths)
    if short > 0:
        lengths.append(short)
    return Case(lengths, virtual, draw(st.integers(1, 6)), draw(st.booleans()))


def there(case: Case, stream: Stream, v: int, chance: random.Random) -> list[int]:
    """What a reader could say it has: never less than was asked for, and as much more as it likes."""
    asked, counts = case.batch + 1, []
    for granted in deal.held_by(stream, v):
        whole = case.lengths[granted.span.piece] - granted.span.first
        sure = min(whole, max(0, asked))
        counts.append(chance.randint(sure, whole))
        asked -= counts[-1]
    return counts


def agree(case: Case, stream: Stream, chance: random.Random) -> tuple[Stream, list[Need]]:
    """As `ShardFeed.agree`, without workers."""
    tries = 0
    while not stream.tail:
        needs = [
            deal.need(deal.held_by(stream, v), there(case, stream, v, chance), case.batch, tries)
            for v in range(case.virtual)
        ]
        needs = [Need.of(n.words()) for n in needs]
        short = any(n.short for n in needs)
        if short and deal.all_dealt(stream):
            ends = {h.ticket: case.lengths[h.span.piece] for h in stream.books.held}
            stream = deal.even_out(stream, ends, case.batch, case.virtual)
        elif any(n.wants for n in needs):
            stream = deal.grant(stream, needs)
        if not short:
            return stream, needs
        tries += 1
    return stream, deal.tail_needs(stream, case.virtual)


def batches(case: Case, stream: Stream, needs: list[Need]) -> list[Batch]:
    """The records that a reader hands to each virtual worker."""
    found = []
    for v, wanted in enumerate(needs):
        records: Batch = []
        for granted in deal.held_by(stream, v):
            end = case.lengths[granted.span.piece] if granted.span.end is None else granted.span.end
            records += [(granted.span.piece, k) for k in range(granted.span.first, end)]
        found.append(records[: wanted.size])
    return found


def epoch(case: Case, chance: random.Random, restarts: bool = False) -> list[list[Batch]]:
    stream = deal.begin(len(case.lengths), 0, 7, case.shuffle)
    rounds = []
    while not stream.over:
        if restarts and chance.random() < 0.4:
            agree(case, stream, chance)  # a round that does not count
            stream = deal.from_json(json.loads(json.dumps(deal.to_json(stream))))
        planned, needs = agree(case, stream, chance)
        rounds.append(batches(case, planned, needs))
        stream = deal.advance(planned, needs)
    assert stream.rounds == len(rounds)
    assert stream.records == sum(case.lengths)
    return rounds


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_every_record_is_trained_once_and_all_take_part_in_every_round(case: Case, seed: int) -> None:
    rounds = epoch(case, random.Random(seed))
    trained = [record for r in rounds for batch in r for record in batch]
    assert sorted(trained) == [(piece, k) for piece, n in enumerate(case.lengths) for k in range(n)]
    assert all(batch for r in rounds for batch in r)
    most = case.batch if case.batch > 1 else 2  # batches of one record: two where one would be left over
    assert all(len(batch) <= most for r in rounds for batch in r)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_only_the_last_rounds_are_not_full(case: Case, seed: int) -> None:
    sizes = [[len(batch) for batch in r] for r in epoch(case, random.Random(seed))]
    full = [r == [case.batch] * case.virtual for r in sizes]
    tail = sizes[full.index(False) :] if False in full else []
    assert all(max(r) - min(r) <= 1 for r in tail)
    assert len(sizes) <= -(-sum(case.lengths) // (case.virtual * case.batch))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_neither_readers_nor_restarts_decide_who_trains_what(case: Case, one: int, other: int) -> None:
    assert epoch(case, random.Random(one)) == epoch(case, random.Random(other), restarts=True)
