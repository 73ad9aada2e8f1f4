"""How the pieces of a sharded stream are dealt to virtual workers, round by round. Pure.

Every worker keeps the same books (`shard_ledger.py`) and decides the same, from what the hosts of the virtual workers
tell each other before a round. Pieces belong to virtual workers, so who reads what does not depend on how many workers
there are. A virtual worker never leaves; its worker may, and whoever hosts it next reads on from where the books say.

While pieces are left, each takes the next when it is about to finish one. When one of them would run dry, the rest is
dealt out anew, evenly, so that all have a record in every round up to the last, and the last is the last for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from concertina.core import shard_ledger
from concertina.core.errors import UsageError
from concertina.core.shard_ledger import Granted, Held, Report, Shards, Span

HELD = 2  # pieces a virtual worker likes to have: one in use, one being fetched
NO_LIMIT = 1 << 60  # the books need not refuse anybody: what is asked for here is what shall be given


@dataclass(frozen=True, slots=True)
class Stream:
    """Where all virtual workers are in an epoch of a stream."""

    books: Shards
    rounds: int = 0  # that are done
    tail: int = 0  # rounds left, once the rest was dealt out evenly; 0 before
    records: int = 0  # that these rounds had

    @property
    def over(self) -> bool:
        return self.books.over


@dataclass(frozen=True, slots=True)
class Need:
    """What a virtual worker will read in the coming round, and what it wants for later ones."""

    wants: int  # pieces
    short: bool  # it has not enough for this round and one record of the next
    used: int  # pieces that it holds and that end within the batch
    offset: int  # how far it reads into the piece after those
    size: int  # records of the batch

    def words(self) -> list[int]:
        return [self.wants, int(self.short), self.used, self.offset, self.size]

    @classmethod
    def of(cls, words: Sequence[int]) -> "Need":
        wants, short, used, offset, size = words
        return cls(wants, bool(short), used, offset, size)


WORDS = 5  # of a Need


def begin(pieces: int, epoch: int, seed: int, shuffle: bool) -> Stream:
    return Stream(replace(shard_ledger.start(pieces, seed=seed, shuffle=shuffle, hold=NO_LIMIT), epoch=epoch))


def held_by(stream: Stream, v: int) -> tuple[Granted, ...]:
    """What virtual worker v reads next, and from where."""
    return shard_ledger.holdings(stream.books, str(v))


def need(held: Sequence[Granted], there: Sequence[int], batch: int, tries: int) -> Need:
    """Of a virtual worker, given how many records of each piece it holds are there for sure.

    All but the first and last of `there` are whole pieces, or the first `batch` + 1 records are among them. That one
    record more is looked at makes sure that everybody has something left when the first runs dry. Nothing here depends
    on how far a reader happens to be ahead. With the number of `tries` in a round more is asked for at once.
    """
    before = 0
    for k, count in enumerate(there):
        if before + count > batch:
            wants = max(0, HELD - (len(held) - k))
            return Need(wants, False, k, held[k].span.first + batch - before, batch)
        before += count
    return Need(HELD << tries, True, 0, 0, 0)


def grant(stream: Stream, needs: Sequence[Need]) -> Stream:
    """Gives pieces to those who want some, in turn, as long as there are any."""
    books = stream.books
    for turn in range(max(n.wants for n in needs)):
        for v, wanted in enumerate(needs):
            if turn < wanted.wants:
                books, answer = shard_ledger.take(books, str(v), books.tickets, books.epoch)
                if not isinstance(answer, Granted):
                    return replace(stream, books=books)
    return replace(stream, books=books)


def all_dealt(stream: Stream) -> bool:
    return stream.books.cursor == stream.books.pieces and not stream.books.returned


def even_out(stream: Stream, ends: Mapping[int, int], batch: int, virtual: int) -> Stream:
    """Deals all that is held out again; `ends` says by ticket where the pieces end.

    Batches of the rounds left are as large as `batch` at most, where that leaves a record for everybody, and differ by
    one record at most.
    """
    rest = []
    for v in range(virtual):
        rest += [Span(g.span.piece, g.span.first, ends[g.ticket]) for g in held_by(stream, v)]
    left = sum(_length(span) for span in rest)
    if left < virtual:
        raise UsageError(
            f"the shards hold {stream.records + left} records, one step needs {virtual} (one for each virtual worker): "
            "give more items, or lower --virtual"
        )
    rounds = max(1, min(-(-left // (virtual * batch)), left // virtual))
    ticket, held = stream.books.tickets, []
    for v in range(virtual):
        mine, rest = _cut(rest, left // virtual + (v < left % virtual))
        for span in mine:
            held.append(Held(ticket, str(v), span))
            ticket += 1
    return replace(stream, books=replace(stream.books, held=tuple(held), tickets=ticket), tail=rounds)


def _length(span: Span) -> int:
    assert span.end is not None
    return span.end - span.first


def _cut(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """The first `count` records, and the others."""
    taken: list[Span] = []
    for k, span in enumerate(spans):
        if count == 0:
            return taken, list(spans[k:])
        if _length(span) > count:
            middle = span.first + count
            return [*taken, replace(span, end=middle)], [replace(span, first=middle), *spans[k + 1 :]]
        if _length(span):
            taken.append(span)
            count -= _length(span)
    return taken, []


def tail_needs(stream: Stream, virtual: int) -> list[Need]:
    """Of all virtual workers, once the rest was dealt out: everybody knows everything."""
    found = []
    for v in range(virtual):
        held = held_by(stream, v)
        counts = [_length(g.span) for g in held]
        size = -(-sum(counts) // stream.tail)
        used, before = 0, 0
        while used < len(held) and before + counts[used] <= size:
            before += counts[used]
            used += 1
        offset = held[used].span.first + size - before if used < len(held) else 0
        found.append(Need(0, False, used, offset, size))
    return found


def advance(stream: Stream, needs: Sequence[Need]) -> Stream:
    """The round counts: what was read for it will not be handed out again."""
    reports = []
    for v, done in enumerate(needs):
        held = held_by(stream, v)
        # Where a piece ends matters to nobody once it is read; that it has ended does.
        reports += [Report(str(v), g.ticket, g.span.end or g.span.first, ended=True) for g in held[: done.used]]
        if done.used < len(held) and done.offset > held[done.used].span.first:
            reports.append(Report(str(v), held[done.used].ticket, done.offset))
    step = stream.rounds + 1
    books, refused = shard_ledger.read_all(stream.books, step, reports)
    assert not refused, refused
    return Stream(
        shard_ledger.commit(books, step),
        step,
        max(0, stream.tail - 1),
        stream.records + sum(n.size for n in needs),
    )


def to_json(stream: Stream) -> dict[str, Any]:
    books = shard_ledger.to_json(stream.books)
    return {"books": books, "rounds": stream.rounds, "tail": stream.tail, "records": stream.records}


def from_json(value: Mapping[str, Any]) -> Stream:
    return Stream(shard_ledger.from_json(value["books"]), value["rounds"], value["tail"], value["records"])
