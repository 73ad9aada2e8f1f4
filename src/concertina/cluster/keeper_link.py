"""A keeper's line to the store: it reads what was decided, writes what it sees, and stays in office.

Three threads, each with its own connection, so that one that waits for the store holds up neither the others nor the
job. A store that does not answer changes nothing for the job; what is to be written then is written when it does.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.keeper_log import complain
from concertina.cluster.records import ENDED, JobSeen, JobState, Keeper
from concertina.core.errors import LeaseGone, StoreError
from concertina.store.protocol import ABSENT, Entry, Lease, Store

TTL_SECONDS = 3.0  # of the lease that keeps a keeper in office
POLL_SECONDS = 0.5
AGAIN_SECONDS = 0.3
WRITE_SECONDS = 0.5  # between two writes of what is not urgent
JOIN_SECONDS = 10.0

OpenStore = Callable[[], Store]


class StoreLink:
    """Start it with `start`; `state` is the newest decision, `over` says why this keeper is none any more."""

    def __init__(self, open_store: OpenStore, keeper: Keeper, state: JobState) -> None:
        self._open = open_store
        self._keeper = keeper
        self._job = keeper.job
        self._ends = threading.Event()
        self._changed = threading.Condition()
        self._wanted: JobSeen | None = None  # to be written
        self._written: JobSeen | None = None
        self._urgent = False
        self._revision: int | None = None  # of our record, as far as we know
        self._lease: Lease | None = None
        self.state = state
        self.over = ""
        self.silent_since: float | None = None  # the store does not answer since (monotonic)
        work = {"lease": self._keep_office, "watch": self._watch, "write": self._write}
        self._threads = [
            threading.Thread(target=self._insist, args=(one,), name=f"concertina-{name}", daemon=True)
            for name, one in work.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def publish(self, seen: JobSeen) -> None:
        """To be written soon: at once if slots, orders or the activity changed."""
        with self._changed:
            if self._wanted is not None and seen == replace(self._wanted, at_s=seen.at_s):
                return
            before = self._wanted
            self._urgent = self._urgent or before is None or _matters(before) != _matters(seen)
            self._wanted = seen
            self._changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Whether all that was published is in the store; waits for it."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._written is self._wanted or bool(self.over), limit_s)

    def close(self) -> None:
        self._ends.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_SECONDS)

    # -- the threads -------------------------------------------------------------------------------------------------

    def _insist(self, work: Callable[[Store], None]) -> None:
        """Again and again with a new connection, until the keeper ends."""
        while not self._ends.is_set():
            try:
                with self._open() as store:
                    work(store)
            except StoreError as error:
                if self.silent_since is None:
                    self.silent_since = time.monotonic()
                    complain(f"store: {error}")
                self._ends.wait(AGAIN_SECONDS)
            except Exception as error:  # nothing may end a keeper's line while its job trains
                complain(f"store: {type(error).__name__}: {error}")
                self._ends.wait(AGAIN_SECONDS)

    def _end(self, why: str) -> None:
        with self._changed:
            self.over = self.over or why
            self._changed.notify_all()

    def _keep_office(self, store: Store) -> None:
        while not self._ends.is_set():
            if self._lease is None:
                self._lease = self._enter_office(store)
            else:
                try:
                    store.keep_alive(self._lease)
                except LeaseGone:
                    self._lease = None
                    continue
            self.silent_since = None
            self._ends.wait(TTL_SECONDS / 4)
        if self._lease is not None:
            store.revoke(self._lease)

    def _enter_office(self, store: Store) -> Lease | None:
        """Whoever holds the job's lock is its keeper, unless a later attempt was started meanwhile."""
        key = keys.KEEPERS + self._job
        found = store.get(key)
        if found is not None and load(Keeper, found.value).attempt > self._keeper.attempt:
            self._end(f"attempt {load(Keeper, found.value).attempt} has taken over")
            return None
        lease = store.grant(TTL_SECONDS)
        expected = ABSENT if found is None else found.revision
        if store.compare_and_set(key, dump(self._keeper), expected=expected, lease=lease) is None:
            store.revoke(lease)
            return None
        return lease

    def _watch(self, store: Store) -> None:
        key = keys.STATES + self._job
        found = store.list_prefix(key)
        self._take(next((e.value for e in found.entries if e.key == key), None))
        with store.watch(key, after=found.revision) as watch:
            while not self._ends.is_set():
                for change in watch.poll(POLL_SECONDS):
                    if change.key == key:
                        self._take(change.value)

    def _take(self, value: bytes | None) -> None:
        if value is None:
            self._end("the store knows nothing of the job any more")
            return
        state = load(JobState, value)
        if state.attempt > self._keeper.attempt:
            self._end(f"attempt {state.attempt} was started in its place")
        if state.order >= self.state.order:
            self.state = state

    def _write(self, store: Store) -> None:
        while not self._ends.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ends.is_set() or self._wanted is not self._written, POLL_SECONDS)
                if self._wanted is None or self._wanted is self._written or self.over:
                    continue
                self._changed.wait_for(lambda: self._ends.is_set() or self._urgent, WRITE_SECONDS)
                wanted, self._urgent = self._wanted, False
            try:
                self._put(store, wanted)
            except StoreError:
                self._urgent = True
                raise
            with self._changed:
                self._written = wanted
                self._changed.notify_all()

    def _put(self, store: Store, seen: JobSeen) -> None:
        """Over a record of ours or of an earlier attempt, never of a later one."""
        key = keys.SEEN + self._job
        while not self._ends.is_set():
            if self._revision is None:
                found = store.get(key)
                if found is not None and _attempt(found) > self._keeper.attempt:
                    self._end(f"attempt {_attempt(found)} has taken over")
                    return
                self._revision = ABSENT if found is None else found.revision
            self._revision = store.compare_and_set(key, dump(seen), expected=self._revision)
            if self._revision is not None:
                return


def _attempt(entry: Entry) -> int:
    return load(JobSeen, entry.value).attempt


def _matters(seen: JobSeen) -> tuple[object, ...]:
    """What others wait for."""
    return seen.slots, seen.activity, seen.order, seen.heard, seen.workers, seen.activity in ENDED
