"""Reads the pieces of a sharded stream in the background, for the virtual workers of one worker.

A thread opens the pieces that they hold, the next one while the present one is in use, and keeps some batches of each
ready. What it reads ahead is nobody's yet: should a virtual worker move away, its next host reads the same again.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from concertina.core.errors import ConcertinaError, UsageError
from concertina.core.shard_ledger import Granted, Span

CHUNK = 32  # records read without looking for what else is to be done

Read = Callable[[Any], Iterable[Any]]


class OpenSpan:
    """A part of a piece that is being read. What `read` gave may be a sequence, or be read one record at a time."""

    def __init__(self, granted: Granted) -> None:
        self.span: Span = granted.span
        self.ticket = granted.ticket
        self.position = granted.span.first  # of the next record to hand out
        self.records: Sequence[Any] | None = None  # all of the piece, where it is a sequence
        self.ahead: deque[Any] = deque()
        self.source: Iterator[Any] | None = None
        self.skipped = 0  # records after those in `ahead` that were only counted
        self.opened = False
        self.ended = False  # everything up to the end is here
        self.error: BaseException | None = None
        self.count_only = False

    @property
    def there(self) -> int:
        """Records that can be handed out."""
        if self.records is not None:
            end = len(self.records) if self.span.end is None else self.span.end
            return end - self.position
        return len(self.ahead)

    @property
    def end(self) -> int:
        """Where it ends; known once `ended`."""
        return self.position + self.there + self.skipped

    def take(self, count: int) -> list[Any]:
        first, self.position = self.position, self.position + count
        if self.records is not None:
            return [self.records[i] for i in range(first, self.position)]
        return [self.ahead.popleft() for _ in range(count)]


class ShardReader:
    """The pieces that local virtual workers hold, and the thread that reads them."""

    def __init__(self, items: Sequence[Any], read: Read) -> None:
        self._items = items
        self._read = read
        self._held: dict[int, list[OpenSpan]] = {}
        self._wanted = 0  # records to keep ready per virtual worker
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False

    # -- for the training thread -------------------------------------------------------------------------------------

    def hold(self, wanted: Mapping[int, Sequence[Granted]], ready: int) -> None:
        """From now on these, by virtual worker, with `ready` records kept ready; what is held already goes on."""
        with self._changed:
            before = {s.ticket: s for spans in self._held.values() for s in spans}
            whole = {s.span.piece: s.records for s in before.values() if s.records is not None}
            self._held = {
                v: [self._continue(before.get(g.ticket), g, whole) for g in granted] for v, granted in wanted.items()
            }
            self._wanted = ready
            self._changed.notify_all()
        if wanted and self._thread is None:
            self._ends = False
            self._thread = threading.Thread(target=self._run, name="concertina-shards", daemon=True)
            self._thread.start()

    def _continue(self, open_span: OpenSpan | None, granted: Granted, whole: Mapping[int, Any]) -> OpenSpan:
        if open_span is not None and open_span.position == granted.span.first and not open_span.count_only:
            return open_span
        fresh = OpenSpan(granted)
        if granted.span.piece in whole:
            _take_sequence(fresh, whole[granted.span.piece])
        return fresh

    def look(self, v: int, count: int) -> list[int]:
        """Records that are there by piece, as soon as there are `count` of them or all pieces have ended."""
        with self._changed:
            while not self._enough(v, count):
                self._changed.wait()
            return [span.there for span in self._held[v]]

    def _enough(self, v: int, count: int) -> bool:
        for span in self._held[v]:
            if span.error is not None:
                raise span.error
            count -= span.there
            if count <= 0:
                return True
            if not span.ended:
                return False
        return True

    def take(self, v: int, count: int) -> list[Any]:
        """The next records of virtual worker v, which must be there in the pieces it holds."""
        self.look(v, count)
        with self._changed:
            found: list[Any] = []
            for span in self._held[v]:
                found += span.take(min(span.there, count - len(found)))
                if len(found) == count:
                    break
            self._changed.notify_all()
        assert len(found) == count, f"virtual worker {v} got {len(found)} records instead of {count}"
        return found

    def ends(self) -> dict[int, int]:
        """Where every piece ends, by ticket; whatever was not a sequence must be opened anew after this."""
        with self._changed:
            spans = [s for held in self._held.values() for s in held]
            for span in spans:
                span.count_only = span.records is None
            self._changed.notify_all()
            for span in spans:
                while not span.ended:
                    if span.error is not None:
                        raise span.error
                    self._changed.wait()
            return {span.ticket: span.end for span in spans}

    def close(self) -> None:
        with self._changed:
            self._held = {}
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)  # a read that takes longer ends with the process
            self._thread = None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while (work := self._next()) is None and not self._ends:
                    self._changed.wait()
                if self._ends:
                    return
                assert work is not None
            try:
                put = self._work(work)
                with self._changed:
                    put()
                    self._changed.notify_all()
            except BaseException as error:  # the script's own; it is raised where the records are needed
                with self._changed:
                    work.error = error
                    self._changed.notify_all()

    def _next(self) -> OpenSpan | None:
        """What to read on now: for whoever has least ready; then what is to be opened ahead."""
        least: tuple[int, OpenSpan] | None = None
        ahead: OpenSpan | None = None
        for spans in self._held.values():
            ready = 0
            for span in spans:
                if span.error is not None:
                    break
                if span.count_only and not span.ended:
                    return span
                ready += span.there
                if not span.ended:
                    if ready < self._wanted and (least is None or ready < least[0]):
                        least = ready, span
                    break
            ahead = ahead or next((s for s in spans if not s.opened and s.error is None), None)
        return least[1] if least is not None else ahead

    def _work(self, span: OpenSpan) -> Callable[[], None]:
        """Reads without the lock; what it returns puts the result in its place."""
        if not span.opened:
            made = self._read(self._items[span.span.piece])
            if isinstance(made, Sequence | np.ndarray | torch.Tensor) and not isinstance(made, str | bytes):
                return lambda: _take_sequence(span, made)
            source = iter(made)
            skipped = sum(1 for _ in itertools.islice(source, span.span.first))
            if skipped < span.span.first:
                raise _fewer(span.span, skipped)
            return lambda: _take_source(span, source)
        assert span.source is not None
        if span.count_only:
            count = sum(1 for _ in itertools.islice(span.source, CHUNK))
            return lambda: _take_counted(span, count)
        limit = CHUNK if span.span.end is None else min(CHUNK, span.span.end - span.position - len(span.ahead))
        records = list(itertools.islice(span.source, limit))
        return lambda: _take_records(span, records, limit)


def _take_sequence(span: OpenSpan, made: Any) -> None:
    if len(made) < (span.span.end or span.span.first):
        raise _fewer(span.span, len(made))
    span.records, span.opened, span.ended = made, True, True


def _take_source(span: OpenSpan, source: Iterator[Any]) -> None:
    span.source, span.opened = source, True
    span.ended = span.span.end == span.span.first


def _take_counted(span: OpenSpan, count: int) -> None:
    span.skipped += count
    span.ended = count < CHUNK


def _take_records(span: OpenSpan, records: list[Any], limit: int) -> None:
    span.ahead.extend(records)
    end = span.position + len(span.ahead)
    if span.span.end is None:
        span.ended = len(records) < limit
    elif len(records) < limit:
        span.error = _fewer(span.span, end)
    else:
        span.ended = end == span.span.end
    if span.ended:
        span.source = None


def _fewer(span: Span, seen: int) -> ConcertinaError:
    return UsageError(
        f"item {span.piece} of session.shards gave {seen} records and more when it was read before: read(item) must "
        "give the same records, in the same order, every time"
    )
