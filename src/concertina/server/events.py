"""Server-sent events: what changed, to everybody who watches.

An event carries the whole new state of one thing (a job, a node, the cluster), and its id is the revision of the store
at which the thing changed. So a client that was away needs no list of what it missed: it gets each thing that changed
since, once, as it is now. The same makes slow clients harmless: there is no queue, only a revision they have reached.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from concertina.cluster import keys
from concertina.cluster.mirror import Mirror
from concertina.core.errors import HistoryGone, StoreError
from concertina.server.auth import Caller
from concertina.server.board import JOB_KEYS, Board
from concertina.server.views import encode
from concertina.store.lease import leader_key
from concertina.store.protocol import Change, Store

GAP_SECONDS = 0.2  # between two flushes: changes in between travel together
BEAT_SECONDS = 15.0
CATCH_UP_SECONDS = 1.0  # that a mirror may lag behind what a client has seen elsewhere
PAST_SECONDS = 5.0  # that the store may take to tell what changed before this server was there
LEADER = leader_key(keys.CONTROLLER)

Topic = tuple[str, str]  # ("job", id), ("node", id) or ("cluster", "")
THE_CLUSTER: Topic = ("cluster", "")


def topic_of(key: str) -> Topic | None:
    if key.startswith(JOB_KEYS):
        return "job", keys.job_of(key)
    if key.startswith(keys.NODES):
        return "node", keys.job_of(key)
    return THE_CLUSTER if key in (keys.CLUSTER, LEADER) else None


def frame(event: str, data: bytes, event_id: int | None = None) -> bytes:
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


BEAT = b": beat\n\n"


@dataclass(slots=True)
class Flush:
    """What changed between two revisions."""

    after: int
    until: int
    topics: list[Topic]
    chunks: dict[str, bytes] = field(default_factory=dict)  # by who may see it; "": all


class Hub:
    """Lives in the event loop; the mirror's thread tells it what changed."""

    def __init__(
        self, mirror: Mirror, board: Board, store: Store, render: Callable[[Topic, Caller], bytes | None]
    ) -> None:
        self._mirror, self._board, self._store, self._render = mirror, board, store, render
        self._lock = threading.Lock()
        self._pending: dict[Topic, int] = {}
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False
        self._changed: asyncio.Event = asyncio.Event()
        self._flushed: asyncio.Event = asyncio.Event()
        self._last: dict[Topic, int] = {}  # when each changed last, in that order
        self._flush = Flush(0, 0, [])
        self.base = 0  # all changes after it are known here
        self.watching: Counter[str] = Counter()  # clients by user
        self.closing = asyncio.Event()

    def start(self) -> None:
        """In the event loop that it shall live in."""
        self._loop = asyncio.get_running_loop()
        self._mirror.listen(self._note)
        self.base = self._mirror.revision
        self._flush = Flush(self.base, self.base, [])

    def close(self) -> None:
        """Every stream ends."""
        self.closing.set()
        self._wake()
        self._flushed.set()

    @property
    def clients(self) -> int:
        return self.watching.total()

    def left(self, user: str) -> None:
        self.watching[user] -= 1
        if not self.watching[user]:
            del self.watching[user]

    @property
    def led(self) -> bool:
        """Whether a controller is in office."""
        return self._mirror.revision_of(LEADER) > 0

    @property
    def revision(self) -> int:
        return self._flush.until

    # -- from the mirror's thread ------------------------------------------------------------------------------------

    def _note(self, change: Change) -> None:
        loop, topic = self._loop, topic_of(change.key)
        with self._lock:
            if topic is not None:
                self._pending[topic] = max(change.revision, self._pending.get(topic, 0))
            if self._scheduled or loop is None or loop.is_closed():
                return
            self._scheduled = True
        loop.call_soon_threadsafe(self._on_change)

    # -- in the loop -------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        with self._lock:
            self._scheduled = False
        self._wake()
        if not self._flushing and self._loop is not None:
            self._flushing = True
            self._loop.call_later(GAP_SECONDS, self._flush_now)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _flush_now(self) -> None:
        self._flushing = False
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        until = max(*pending.values(), self._flush.until)
        if any(kind != "cluster" for kind, _ in pending):
            pending[THE_CLUSTER] = until  # counts of slots and jobs follow from the others
        topics = sorted(pending, key=pending.__getitem__)
        for topic in topics:
            self._last.pop(topic, None)
            if topic[0] != "job" or self._board.card(topic[1]) is not None:  # of a forgotten one nothing is to be told
                self._last[topic] = pending[topic]
        self._flush = Flush(self._flush.until, until, topics)
        self._flushed.set()
        self._flushed = asyncio.Event()

    async def until(self, there: Callable[[], bool], limit_s: float) -> bool:
        """Looks again after every change in the mirror; False if the limit passed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while True:
            changed = self._changed
            if there():
                return True
            left = end - loop.time()
            if left <= 0 or self.closing.is_set():
                return False
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                return there()

    # -- streams -----------------------------------------------------------------------------------------------------

    async def stream(self, caller: Caller, after: int | None) -> AsyncIterator[bytes]:
        """Everything that this caller may see, from revision `after` on, or from now."""
        at, first = await self._begin(caller, after)
        yield first
        while not self.closing.is_set():
            flushed = self._flushed
            if self._flush.until <= at:
                try:
                    await asyncio.wait_for(flushed.wait(), BEAT_SECONDS)
                except TimeoutError:
                    yield BEAT
                continue
            chunk = self._since(caller, at)
            at = self._flush.until
            if chunk:
                yield chunk

    async def _begin(self, caller: Caller, after: int | None) -> tuple[int, bytes]:
        if after is None:
            return self.revision, self._hello(self.revision, self.revision)
        await self.until(lambda: self._mirror.revision >= after, CATCH_UP_SECONDS)
        if self.base <= after <= self._mirror.revision:
            at = self.revision
            return at, self._hello(at) + self._frames(caller, [t for t, rev in self._last.items() if rev > after])
        topics = await asyncio.to_thread(self._missed, after)
        at = self.revision
        if topics is None:
            reason = encode({"reason": f"changes after revision {after} are no longer known: load everything again"})
            return at, self._hello(at) + frame("reset", reason, at)
        return at, self._hello(at) + self._frames(caller, topics)

    def _missed(self, after: int) -> list[Topic] | None:
        """What changed since, by the store's own history; None: that is gone (or of another store)."""
        newest, until = self._mirror.newest, time.monotonic() + PAST_SECONDS
        if after > self._mirror.revision:
            return None
        try:
            with self._store.watch("", after=after) as watch:
                changes = [*watch.poll(0.0)]
                while watch.revision < newest:  # etcd hands its history out bit by bit
                    changes += watch.poll(max(until - time.monotonic(), 0.0))
                    if time.monotonic() > until:
                        return None
        except (HistoryGone, StoreError):
            return None
        found = {topic: change.revision for change in changes if (topic := topic_of(change.key))}
        return [*sorted(found, key=found.__getitem__), THE_CLUSTER]

    def _hello(self, revision: int, event_id: int | None = None) -> bytes:
        """Without an id for whoever still has to get what came before."""
        return b"retry: 2000\n" + frame("hello", encode({"revision": revision}), event_id)

    def _since(self, caller: Caller, at: int) -> bytes:
        flush = self._flush
        if at < flush.after:  # it was slow: what it missed, each thing once
            return self._frames(caller, [topic for topic, rev in self._last.items() if rev > at])
        seen_by = "" if caller.admin else caller.name
        if seen_by not in flush.chunks:
            flush.chunks[seen_by] = self._frames(caller, flush.topics)
        return flush.chunks[seen_by]

    def _frames(self, caller: Caller, topics: list[Topic]) -> bytes:
        return b"".join(self._frame(caller, topic) for topic in topics)

    def _frame(self, caller: Caller, topic: Topic) -> bytes:
        kind, name = topic
        if kind == "job":
            card = self._board.card(name)
            if card is None or not caller.may_see(card.job.request.user):
                return b""
            return frame(kind, card.brief(caller), self._last.get(topic, self.revision))
        data = self._render(topic, caller)
        return b"" if data is None else frame(kind, data, self._last.get(topic, self.revision))
