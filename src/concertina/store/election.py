"""One leader at a time, with a fencing number that grows from leader to leader. Decisions are in `lease.py`.

The leader is whoever holds the key `leaders/NAME`, which is attached to a lease. The fencing number is the revision at
which that key was created: the store never gives a revision twice, so no two leaders share one, and later ones have
higher ones. Renewing touches the lease, not the key, so the revision stays, and a write can be made conditional on it.
"""

from __future__ import annotations

import contextlib
import threading
import time

from concertina.core.errors import Deposed, HistoryGone, LeaseGone, StoreUnavailable
from concertina.store.clock import since_boot
from concertina.store.lease import Tenure, at, check_name, ended, leader_key, next_renewal, renewed
from concertina.store.protocol import ABSENT, Clock, Guard, Lease, Store


class Leadership:
    """One leader's hold on one office, from `acquire` to `resign` or until it is deposed. Safe to use from threads.

    Open the store of a leader that may not stand still with a `timeout_s` well below its `ttl`: `renew` waits for it.
    """

    def __init__(self, store: Store, name: str, lease: Lease, tenure: Tenure, clock: Clock) -> None:
        self.name, self.fence = name, tenure.fence
        self._store, self._lease, self._clock = store, lease, clock
        self._tenure = tenure
        self._lock = threading.Lock()

    @classmethod
    def acquire(
        cls, store: Store, name: str, ttl: float, *, holder: str = "", wait_s: float = 0.0, clock: Clock = since_boot
    ) -> Leadership | None:
        """The leadership, or None when somebody else had it all the time that we were willing to wait."""
        check_name(name)
        until = time.monotonic() + wait_s
        while True:
            present = store.list_prefix(leader_key(name))
            vacant = all(entry.key != leader_key(name) for entry in present.entries)
            leadership = _try(store, name, ttl, holder, clock) if vacant else None
            left = until - time.monotonic()
            if leadership or left <= 0:
                return leadership
            if not vacant:
                with contextlib.suppress(HistoryGone), store.watch(leader_key(name), after=present.revision) as watch:
                    watch.poll(left)  # so much happened meanwhile that looking again is the same

    def renew(self) -> bool:
        """Once every `ttl` / 4 or so (see `renew_at`). False: deposed, for good. A store that does not answer is no
        reason to step down while there is time left: try again."""
        if not self.holds():
            return False
        sent = self._clock()
        try:
            self._store.keep_alive(self._lease)
        except LeaseGone:
            self._end("its lease is gone from the store")
        except StoreUnavailable:
            pass
        else:
            with self._lock:
                self._tenure = renewed(self._tenure, sent=sent, now=self._clock())
        return self.holds()

    def resign(self) -> None:
        """The next candidate need not wait for the lease to run out."""
        self._end("it has resigned")
        self._store.revoke(self._lease)

    def holds(self) -> bool:
        """Whether this leader may act now. False before anybody else can be leader."""
        with self._lock:
            self._tenure = at(self._tenure, self._clock())
            return not self._tenure.over

    def check(self) -> None:
        """Raises Deposed, with the reason, when this leader may not act."""
        if not self.holds():
            raise Deposed(name=self.name, fence=self.fence, reason=self._tenure.over)

    @property
    def renew_at(self) -> float:
        """When to renew next, by the clock given to `acquire`."""
        with self._lock:
            return next_renewal(self._tenure)

    def put_fenced(
        self, key: str, value: bytes, *, expected: int | None = None, lease: Lease | None = None
    ) -> int | None:
        """Write as the leader. Raises Deposed, and writes nothing, when the store knows a newer leader or none.

        None: the key did not stand at the `expected` revision.
        """
        self.check()
        revision = self._store.compare_and_set(key, value, expected=expected, lease=lease, guard=self._guard)
        if revision is None:
            self._check_key(certain=expected is None)
        return revision

    def delete_fenced(self, key: str, *, expected: int | None = None) -> bool:
        """Delete as the leader; False when the key was not there or not at `expected`."""
        self.check()
        gone = self._store.delete(key, expected=expected, guard=self._guard)
        if not gone:
            self._check_key(certain=False)
        return gone

    @property
    def _guard(self) -> Guard:
        return Guard(key=leader_key(self.name), revision=self.fence)

    def _check_key(self, *, certain: bool) -> None:
        """A refused write: was it the guard?"""
        entry = None if certain else self._store.get(leader_key(self.name))
        if entry is None or entry.revision != self.fence:
            self._end("the store knows a newer leader, or none")
            self.check()

    def _end(self, why: str) -> None:
        with self._lock:
            self._tenure = ended(self._tenure, why)


def _try(store: Store, name: str, ttl: float, holder: str, clock: Clock) -> Leadership | None:
    sent = clock()
    lease = store.grant(ttl)
    try:
        fence = store.compare_and_set(leader_key(name), holder.encode(), expected=ABSENT, lease=lease)
    except LeaseGone:
        return None  # this process stood still for longer than the lease
    if fence is None:
        store.revoke(lease)
        return None
    leadership = Leadership(store, name, lease, Tenure(fence=fence, ttl=lease.ttl, sent=sent), clock)
    if not leadership.holds():  # the answers took too long
        leadership.resign()
        return None
    return leadership
