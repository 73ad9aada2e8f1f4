"""A copy of the cluster's records in memory, kept up to date by a thread that watches the store.

Readers never touch the store: a page, a metric and a list of jobs come from here. A change is in the mirror a few
milliseconds after it was written; whoever has written something and must see it waits for its revision.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from concertina.cluster import keys
from concertina.cluster.codec import load
from concertina.cluster.records import (
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobSeen,
    JobState,
    Keeper,
    NodeState,
    Reply,
    Spent,
    User,
)
from concertina.core.errors import HistoryGone, StoreError
from concertina.store.protocol import Change, Store

POLL_SECONDS = 0.5
AGAIN_SECONDS = 0.2

KINDS: dict[str, type[Any]] = {
    keys.REQUESTS: JobRequest,
    keys.STATES: JobState,
    keys.SEEN: JobSeen,
    keys.KEEPERS: Keeper,
    keys.NODES: NodeState,
    keys.CURVES: Curve,
    keys.ASKS: Ask,
    keys.ANSWERS: Reply,
    keys.USERS: User,
    keys.SPENT: Spent,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that is known of one job."""

    request: JobRequest
    state: JobState
    seen: JobSeen | None = None
    keeper: Keeper | None = None

    @property
    def id(self) -> str:
        return self.request.id


Listener = Callable[[Change], None]


class Mirror:
    """The records as of `revision`. Start it with `start`; readers may come from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: dict[str, dict[str, Any]] = {prefix: {} for prefix in KINDS}
        self._revisions: dict[str, int] = {}  # key -> revision of its value, for compare-and-set
        self._cluster: ClusterState | None = None
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._listeners: list[Listener] = []
        self._thread = threading.Thread(target=self._run, name="concertina-mirror", daemon=True)
        self.revision = 0
        self.stale_since: float | None = None  # the store does not answer since (monotonic)

    def start(self) -> None:
        self._take_all()
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def listen(self, listener: Listener) -> None:
        """Called with every change, in order, from the mirror's thread, after the mirror has it."""
        self._listeners.append(listener)

    # -- reading -----------------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job | None:
        request = self._tables[keys.REQUESTS].get(job_id)
        return None if request is None else self._job(request)

    def jobs(self) -> list[Job]:
        """All there are, in order of submission."""
        with self._changed:
            requests = list(self._tables[keys.REQUESTS].values())
        return [self._job(r) for r in sorted(requests, key=lambda r: (r.submitted_s, r.id))]

    def _job(self, request: JobRequest) -> Job:
        state = self._tables[keys.STATES].get(request.id)
        return Job(
            request=request,
            state=state or JobState(id=request.id, reason="the controller has not looked at it yet"),
            seen=self._tables[keys.SEEN].get(request.id),
            keeper=self._tables[keys.KEEPERS].get(request.id),
        )

    @property
    def requests(self) -> Mapping[str, JobRequest]:
        """By job. Only to look names up: it changes under whoever walks over it. So the next three."""
        return self._tables[keys.REQUESTS]

    @property
    def all_seen(self) -> Mapping[str, JobSeen]:
        return self._tables[keys.SEEN]

    @property
    def users_by_name(self) -> Mapping[str, User]:
        return self._tables[keys.USERS]

    def seen(self, job_id: str) -> JobSeen | None:
        return self._tables[keys.SEEN].get(job_id)

    def keeper(self, job_id: str) -> Keeper | None:
        return self._tables[keys.KEEPERS].get(job_id)

    def nodes(self) -> list[NodeState]:
        with self._changed:
            return sorted(self._tables[keys.NODES].values(), key=lambda node: node.id)

    def asks(self) -> list[Ask]:
        """What is still to be done, in order."""
        with self._changed:
            return sorted(self._tables[keys.ASKS].values(), key=lambda ask: (ask.at_s, ask.id))

    def curves(self) -> dict[str, Curve]:
        with self._changed:
            return dict(self._tables[keys.CURVES])

    def curve(self, key: str) -> Curve | None:
        return self._tables[keys.CURVES].get(key)

    def reply(self, ask_id: str) -> Reply | None:
        return self._tables[keys.ANSWERS].get(ask_id)

    def spent(self, user: str) -> Spent | None:
        return self._tables[keys.SPENT].get(user)

    def all_spent(self) -> list[Spent]:
        with self._changed:
            return list(self._tables[keys.SPENT].values())

    def users(self) -> list[User]:
        with self._changed:
            return sorted(self._tables[keys.USERS].values(), key=lambda user: user.name)

    @property
    def cluster(self) -> ClusterState | None:
        return self._cluster

    def revision_of(self, key: str) -> int:
        """For compare-and-set; 0 if the key is not there."""
        return self._revisions.get(key, 0)

    @property
    def newest(self) -> int:
        """When any record that is there now was written last. The store itself may count further."""
        with self._changed:
            return max(self._revisions.values(), default=0)

    def wait(self, after: int, limit_s: float) -> int:
        """Waits until something newer than revision `after` is here; the revision in any case."""
        with self._changed:
            self._changed.wait_for(lambda: self.revision > after or self._ends.is_set(), limit_s)
            return self.revision

    def wait_until(self, there: Callable[[], bool], limit_s: float) -> bool:
        """Looks again after every change; False if the limit passed."""
        with self._changed:
            return self._changed.wait_for(there, limit_s)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        missed = False  # changes that the store does not keep any more: only looking at everything helps
        while not self._ends.is_set():
            try:
                if missed:
                    self._take_all()
                    missed = False
                with self._store.watch("", after=self.revision) as watch:
                    self.stale_since = None
                    while not self._ends.is_set():
                        changes = watch.poll(POLL_SECONDS)
                        self._take(changes, watch.revision)
            except HistoryGone:
                missed = True
            except StoreError:
                self.stale_since = self.stale_since or time.monotonic()
                self._ends.wait(AGAIN_SECONDS)

    def _take_all(self) -> None:
        found = self._store.list_prefix("")
        here = {entry.key for entry in found.entries}
        gone = [Change(key=key, value=None, revision=found.revision) for key in self._revisions if key not in here]
        news = [Change(key=e.key, value=e.value, revision=e.revision) for e in found.entries]
        self._take(tuple(gone + [c for c in news if self._revisions.get(c.key) != c.revision]), found.revision)

    def _take(self, changes: tuple[Change, ...], revision: int) -> None:
        if not changes and revision <= self.revision:
            return
        with self._changed:
            for change in changes:
                self._keep(change)
            self.revision = max(self.revision, revision)
            self._changed.notify_all()
        for change in changes:
            for listener in self._listeners:
                listener(change)

    def _keep(self, change: Change) -> None:
        """A record that can not be read is passed over: one bad value must not blind everybody."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            self._keep_well(change)

    def _keep_well(self, change: Change) -> None:
        if change.value is None:
            self._revisions.pop(change.key, None)
        else:
            self._revisions[change.key] = change.revision
        if change.key == keys.CLUSTER:
            self._cluster = None if change.value is None else load(ClusterState, change.value)
            return
        prefix, slash, name = change.key.partition("/")
        table, kind = self._tables.get(prefix + slash), KINDS.get(prefix + slash)
        if table is None or kind is None:
            return
        if change.value is None:
            table.pop(name, None)
        else:
            table[name] = load(kind, change.value)
