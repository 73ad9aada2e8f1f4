"""The store in this process: for tests, and for jobs that need not survive their master."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from concertina.core.errors import HistoryGone, LeaseGone, StoreError
from concertina.store.base import BaseStore, Closing
from concertina.store.clock import since_boot
from concertina.store.protocol import (
    KEEP_BYTES,
    KEEP_CHANGES,
    Change,
    Clock,
    Entry,
    Guard,
    Lease,
    Listing,
    check_key,
    check_prefix,
    check_ttl,
    check_value,
)


@dataclass(slots=True)
class _Term:
    ttl: float
    expires: float


class MemoryStore(BaseStore):
    """One lock, one dictionary, one list of changes. Its state is gone when the object is."""

    def __init__(self, *, clock: Clock = since_boot, keep_changes: int = KEEP_CHANGES) -> None:
        self._clock, self._keep_changes = clock, keep_changes
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Term] = {}
        self._history: deque[Change] = deque()  # its revisions have no gaps
        self._history_bytes = 0
        self._revision = 0
        self._granted = 0
        self._changed = threading.Condition()
        self._closed = False

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._changed:
            self._begin()
            return self._entries.get(key)

    def list_prefix(self, prefix: str) -> Listing:
        check_prefix(prefix)
        with self._changed:
            self._begin()
            found = sorted(key for key in self._entries if key.startswith(prefix))
            return Listing(entries=tuple(self._entries[key] for key in found), revision=self._revision)

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None,
        lease: Lease | None = None,
        guard: Guard | None = None,
    ) -> int | None:
        check_key(key)
        check_value(key, value)
        with self._changed:
            self._begin()
            if not self._holds(key, expected) or (guard and not self._holds(guard.key, guard.revision)):
                return None
            if lease is not None and lease.id not in self._leases:
                raise LeaseGone(lease.id)
            self._record(key, value)
            attached = lease.id if lease else None
            self._entries[key] = Entry(key=key, value=value, revision=self._revision, lease=attached)
            return self._revision

    def delete(self, key: str, *, expected: int | None = None, guard: Guard | None = None) -> bool:
        check_key(key)
        with self._changed:
            self._begin()
            held = self._holds(key, expected) and (guard is None or self._holds(guard.key, guard.revision))
            if not held or key not in self._entries:
                return False
            self._remove(key)
            return True

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        with self._changed:
            self._begin()
            self._granted += 1
            self._leases[self._granted] = _Term(ttl, self._clock() + ttl)
            self._changed.notify_all()  # whoever waits for the next lease to run out
            return Lease(id=self._granted, ttl=ttl)

    def keep_alive(self, lease: Lease) -> None:
        with self._changed:
            self._begin()
            term = self._leases.get(lease.id)
            if term is None:
                raise LeaseGone(lease.id)
            term.expires = self._clock() + term.ttl

    def revoke(self, lease: Lease) -> None:
        with self._changed:
            self._begin()
            if lease.id in self._leases:
                self._end(lease.id)

    def watch(self, prefix: str, *, after: int) -> MemoryWatch:
        check_prefix(prefix)
        return MemoryWatch(self, prefix, after)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _begin(self) -> None:
        """Under the lock, before anything else: what ran out is gone."""
        if self._closed:
            raise StoreError("this store is closed: open it again")
        now = self._clock()
        over = [(term.expires, lease) for lease, term in self._leases.items() if term.expires <= now]
        for _, lease in sorted(over):
            self._end(lease)

    def _end(self, lease: int) -> None:
        del self._leases[lease]
        for key in sorted(key for key, entry in self._entries.items() if entry.lease == lease):
            self._remove(key)

    def _holds(self, key: str, expected: int | None) -> bool:
        entry = self._entries.get(key)
        return expected is None or expected == (entry.revision if entry else 0)

    def _remove(self, key: str) -> None:
        del self._entries[key]
        self._record(key, None)

    def _record(self, key: str, value: bytes | None) -> None:
        self._revision += 1
        self._history.append(Change(key=key, value=value, revision=self._revision))
        self._history_bytes += len(value or b"")
        while len(self._history) > self._keep_changes or self._history_bytes > KEEP_BYTES:
            self._history_bytes -= len(self._history.popleft().value or b"")
        self._changed.notify_all()

    def _wait_for_changes(self, watch: MemoryWatch, limit_s: float) -> tuple[Change, ...]:
        until = time.monotonic() + limit_s
        with self._changed:
            while True:
                if watch.closed:
                    return ()
                self._begin()
                found = self._since(watch)
                left = until - time.monotonic()
                if found or left <= 0:
                    return found
                next_end = min((term.expires for term in self._leases.values()), default=float("inf"))
                self._changed.wait(min(left, max(0.0, next_end - self._clock())))

    def _since(self, watch: MemoryWatch) -> tuple[Change, ...]:
        oldest = self._revision - len(self._history) + 1
        if watch.revision < oldest - 1:
            raise HistoryGone(after=watch.revision, oldest=oldest)
        new = islice(self._history, watch.revision - oldest + 1, None)
        found = tuple(change for change in new if change.key.startswith(watch.prefix))
        watch.revision = max(watch.revision, self._revision)  # a watch may begin in the future
        return found

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class MemoryWatch(Closing):
    """See protocol.Watch."""

    def __init__(self, store: MemoryStore, prefix: str, after: int) -> None:
        self._store = store
        self.prefix, self.revision, self.closed = prefix, after, False

    def poll(self, limit_s: float) -> tuple[Change, ...]:
        return self._store._wait_for_changes(self, limit_s)

    def close(self) -> None:
        self.closed = True
        self._store._wake()
