"""The controller: looks, decides (`turn.py`), writes down, and starts keepers. One at a time is in office.

    python -m concertina.cluster.controller STORE STATE [SLOTS [POLICY]]

All it knows is in the store; killed at any moment and started again, or followed by another that waited, it goes on
where it was. Jobs do not notice: their keepers outlive it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from concertina.cluster import keys
from concertina.cluster.backend import ClusterBackend, LocalCluster, holder_name
from concertina.cluster.codec import dump, load
from concertina.cluster.controller_log import JsonLog
from concertina.cluster.curves import kind_of
from concertina.cluster.mirror import Mirror
from concertina.cluster.prune import AT_ONCE, KEEP, counted_in, forgettable
from concertina.cluster.records import ClusterState, JobRequest, JobSeen, JobState, NodeState, Op, Spent
from concertina.cluster.script_file import read_script
from concertina.cluster.slots import keeper_is_over
from concertina.cluster.turn import decide
from concertina.cluster.turn_types import Decision, Facts, Memory
from concertina.cluster.views import live_policy, written_notes
from concertina.cluster.writes import Written
from concertina.core.errors import ConcertinaError, Deposed, StoreError
from concertina.core.job import JobPhase
from concertina.policies.base import Policy
from concertina.store import Store, open_store
from concertina.store.election import Leadership
from concertina.store.protocol import Change

TTL_SECONDS = 2.0  # of the office: whoever waits has it so long after its holder died
STORE_SECONDS = 1.0  # that one call to the store may take
GAP_SECONDS = 0.2  # between two turns at least
TICK_SECONDS = 1.0  # and at most
ANSWER_SECONDS = 120.0  # that an answer is kept
STUCK_SECONDS = 30.0  # a controller whose turn takes longer gives its office up
GOAL_MS = 60.0  # of a round; admissions wait for the next one where more would take longer
WRITE_GOAL_MS = 400.0  # of writing it down: meanwhile nobody else is heard
MOST_ADMISSIONS = 200
LOOK_SECONDS = 10.0  # between two looks for jobs to be forgotten
MOST_SCRIPTS = 64  # that are remembered, so that many submissions of one read it once


@dataclass(slots=True)
class Books:
    """What the controller in office knows, beyond the mirror."""

    memory: Memory
    ended: dict[str, JobPhase]
    written: Written
    admit_most: int = 20
    promise_most: int = 2
    missing: dict[str, float] = field(default_factory=dict)  # job -> since when its keeper holds no lease
    not_started: dict[str, str] = field(default_factory=dict)  # job -> why its keeper could not be started
    asked: set[str] = field(default_factory=set)  # asks that were answered; the mirror may still show them
    old: list[str] = field(default_factory=list)  # jobs to be forgotten, the oldest first
    looked_s: float = -LOOK_SECONDS  # when it was last looked which these are
    not_removed: set[str] = field(default_factory=set)  # jobs of which that was noted
    headless: list[str] = field(default_factory=list)  # jobs of which only the state is left
    spent: dict[str, Spent] = field(default_factory=dict)  # by user, as we wrote it: newer than the mirror's


class Controller:
    """`start` it, `close` it. Whether it is in office does not matter to whoever started it."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        mirror: Mirror,
        backend: ClusterBackend,
        *,
        policy: str = "concertina",
        log: Path | None = None,
        ttl_s: float = TTL_SECONDS,
        keep_jobs: int = KEEP,
    ) -> None:
        """`mirror` is started and closed by whoever made it. `keep_jobs`: that have ended, the newest; 0: all."""
        self._open, self._mirror, self._backend, self._ttl_s = open_store, mirror, backend, ttl_s
        self._policy_name, self._keep_jobs = policy, keep_jobs
        self._policy: Policy = live_policy(policy)
        self._log = JsonLog(log)
        self._name = holder_name()
        self.down_before: float | None = None  # when `down` was asked for last before we came: that one is over
        self._ends = threading.Event()
        self._turned = time.monotonic()
        self._fresh: set[str] = set()  # requests that came since they were last looked at
        self._fresh_lock = threading.Lock()
        self._scripts: dict[tuple[str, int, int], bytes] = {}
        self._thread = threading.Thread(target=self._run, name="concertina-controller", daemon=True)
        self.in_office = threading.Event()
        self.is_down = threading.Event()  # `down` was asked for, and no job has a process any more
        mirror.listen(self._on_change)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Resigns. Jobs and keepers go on."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        self._backend.close()

    def _on_change(self, change: Change) -> None:
        if change.key.startswith(keys.REQUESTS) and change.value is not None:
            with self._fresh_lock:
                self._fresh.add(keys.job_of(change.key))

    # -- the office --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                with self._open() as store:
                    if self.down_before is None:
                        self.down_before = _cluster_in(store).down_s
                    leadership = Leadership.acquire(store, keys.CONTROLLER, self._ttl_s, holder=self._name, wait_s=1.0)
                    if leadership is not None:
                        self._hold(store, leadership)
            except (Deposed, StoreError) as error:
                self._log.write("office lost", reason=str(error))
                self._ends.wait(0.3)
            except Exception as error:  # a defect must not end the cluster: look at everything anew
                self._log.write("turn failed", reason=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
                self._ends.wait(1.0)

    def _hold(self, store: Store, leadership: Leadership) -> None:
        self._log.write("office taken", holder=self._name, fence=leadership.fence)
        over = threading.Event()
        self._turned = time.monotonic()
        renewer = threading.Thread(target=self._renew, args=(leadership, over), name="concertina-office", daemon=True)
        renewer.start()
        try:
            books = self._load(store)
            self.in_office.set()
            while not self._ends.is_set():
                self._turned = time.monotonic()
                seen = self._mirror.revision
                leadership.check()
                self._turn(store, leadership, books)
                self._ends.wait(max(GAP_SECONDS - (time.monotonic() - self._turned), 0.0))
                self._mirror.wait(seen, TICK_SECONDS)
        finally:
            self.in_office.clear()
            over.set()
            renewer.join(timeout=5.0)
            with contextlib.suppress(ConcertinaError):
                leadership.resign()

    def _renew(self, leadership: Leadership, over: threading.Event) -> None:
        """Beside the turns: a slow one must not cost the office, a stuck one must."""
        while not over.wait(self._ttl_s / 5):
            if time.monotonic() - self._turned > STUCK_SECONDS or not leadership.renew():
                return

    def _load(self, store: Store) -> Books:
        """All that was decided before, from the store itself: nobody else can write it any more."""
        found = store.list_prefix(keys.STATES)
        states = {keys.job_of(entry.key): load(JobState, entry.value) for entry in found.entries}
        cluster = _cluster_in(store)
        self._mirror.wait_until(lambda: self._mirror.revision >= found.revision, 10.0)
        if cluster.going_down and cluster.down_s == self.down_before:  # not which is later: the clock may be set back
            cluster = replace(cluster, going_down=False)
        cluster = replace(cluster, policy=self._policy_name, backend=self._backend.name, controller=self._name)
        live = {job: state for job, state in states.items() if not self._at_rest(state)}
        notes = written_notes(live.values())
        with self._fresh_lock:
            self._fresh |= {job.id for job in self._mirror.jobs() if job.id not in states}
        return Books(
            memory=Memory(cluster=cluster, live=live, notes=notes.levels, reserved=notes.reserved),
            ended={job: state.phase for job, state in states.items() if job not in live},
            written=Written(states=dict(live), nodes={node.id: node for node in self._nodes_in(store)}),
            headless=[job for job, state in states.items() if state.phase.is_end and self._has_no_request(store, job)],
        )

    def _nodes_in(self, store: Store) -> list[NodeState]:
        return [load(NodeState, entry.value) for entry in store.list_prefix(keys.NODES).entries]

    def _has_no_request(self, store: Store, job: str) -> bool:
        """The mirror may be behind: the store's word counts."""
        return job not in self._mirror.requests and store.get(keys.REQUESTS + job) is None

    def _at_rest(self, state: JobState) -> bool:
        seen = self._mirror.seen(state.id)
        return state.phase.is_end and keeper_is_over(state, seen, gone=False)

    # -- a turn ------------------------------------------------------------------------------------------------------

    def _turn(self, store: Store, leadership: Leadership, books: Books) -> None:
        facts = self._look(store, books)
        begun = time.perf_counter()
        decision = decide(books.memory, facts, self._policy)
        decided_ms = (time.perf_counter() - begun) * 1000
        written_ms = self._write(store, leadership, books, decision, facts)
        self._pace(books, decision, decided_ms, written_ms)
        self._count(books, decision, decided_ms)
        for job in decision.start:
            books.not_started.pop(job, None)
            try:
                self._backend.start_keeper(job, books.memory.live[job].attempt)
            except OSError as error:  # no room, no more processes: a turn to come finds that it is not there
                books.not_started[job] = str(error)
                self._log.write("keeper not started", job=job, reason=str(error))
        for job in decision.end:
            self._backend.end_keeper(job)
        for line in decision.lines:
            self._log.write(line.event, job=line.job, reason=line.reason, workers=line.workers)
        self._forget_old(leadership, books, facts)
        if books.memory.cluster.going_down and self._is_quiet(books.memory):
            self.is_down.set()

    def _forget_old(self, leadership: Leadership, books: Books, facts: Facts) -> None:
        """Jobs that ended long ago, a few in each turn."""
        now = time.monotonic()
        if any(ask.op is Op.PRUNE for ask in facts.asks):
            books.old, books.looked_s = [], now - LOOK_SECONDS
        if not books.old and now - books.looked_s >= LOOK_SECONDS:
            books.looked_s = now
            known = [job.state for job in map(self._mirror.job, books.ended) if job is not None]
            before_s = books.memory.cluster.prune_before_s
            books.old = forgettable(known, time.time(), keep=self._keep_jobs, before_s=before_s)
        few, books.old = books.old[:AT_ONCE], books.old[AT_ONCE:]
        for name in few:
            self._forget(leadership, books, name)
        while books.headless:  # whoever was in office before us died in the middle of that
            leadership.delete_fenced(keys.STATES + books.headless.pop())

    def _forget(self, leadership: Leadership, books: Books, name: str) -> None:
        """Its state last: without a request it is no job, without a state it would be a new one."""
        job = self._mirror.job(name)
        if job is None or job.keeper is not None or not self._discard(books, name):
            return
        user = job.request.user
        spent = counted_in(books.spent.get(user) or self._mirror.spent(user), user, job.state)
        leadership.put_fenced(keys.SPENT + user, dump(spent))
        books.spent[user] = spent
        if job.request.idempotency:
            leadership.delete_fenced(keys.submission_key(user, job.request.idempotency))
        for prefix in (keys.REQUESTS, keys.SEEN, keys.STATES):
            leadership.delete_fenced(prefix + name)
        del books.ended[name]
        self._log.write("forgotten", job=name, reason="it ended long ago, and newer ones are kept")

    def _discard(self, books: Books, name: str) -> bool:
        try:
            return self._backend.discard(name)
        except OSError as error:  # no right to, no room for the other folder: no reason to decide nothing more
            if name not in books.not_removed:  # it is tried again every few seconds
                books.not_removed.add(name)
                self._log.write("not removed", job=name, reason=str(error))
            return False

    def _is_quiet(self, memory: Memory) -> bool:
        return not any(
            state.slots or not keeper_is_over(state, self._mirror.seen(job), gone=False)
            for job, state in memory.live.items()
        )

    def _look(self, store: Store, books: Books) -> Facts:
        mirror, now = self._mirror, time.time()
        fresh = self._take_fresh(books)
        registered, gone = self._look_for_keepers(store, books, now)
        return Facts(
            now=now,
            nodes=self._backend.nodes(),
            requests=mirror.requests,
            fresh=tuple(fresh),
            kinds={request.id: self._kind(request) for request in fresh},
            seen=mirror.all_seen,
            registered=frozenset(registered),
            gone=frozenset(gone),
            curves=mirror.curves(),
            asks=tuple(ask for ask in mirror.asks() if ask.id not in books.asked),
            users=mirror.users_by_name,
            ended=books.ended,
            admit_most=books.admit_most,
            promise_most=books.promise_most,
            missing_s={job: now - since for job, since in books.missing.items()},
            not_started=books.not_started,
        )

    def _look_for_keepers(self, store: Store, books: Books, now: float) -> tuple[set[str], set[str]]:
        """Jobs whose keeper is in office, and those of whose last one nothing is left. Notes who is missing since when:
        something of a keeper is there, but it is not in office."""
        registered, gone = set(), set()
        missing: dict[str, float] = {}
        for job, state in books.memory.live.items():
            if state.attempt:
                keeper = self._mirror.keeper(job)
                if keeper is not None:
                    registered.add(job)
                over = keeper_is_over(state, self._mirror.seen(job), gone=False)
                if not over and self._backend.is_gone(state, keeper, now):
                    if not self._said_how_it_ended(store, state):
                        gone.add(job)
                elif not over and keeper is None:
                    missing[job] = books.missing.get(job, now)
        books.missing = missing
        return registered, gone

    def _said_how_it_ended(self, store: Store, state: JobState) -> bool:
        """A keeper's last word is written before it ends, but may not be in the mirror when it is no process any
        more: then the next turn has it."""
        entry = store.get(keys.SEEN + state.id)
        return keeper_is_over(state, load(JobSeen, entry.value) if entry is not None else None, gone=False)

    def _take_fresh(self, books: Books) -> list[JobRequest]:
        with self._fresh_lock:
            names, self._fresh = self._fresh, set()
        known = books.memory.live
        found = [self._mirror.requests.get(name) for name in names if name not in known and name not in books.ended]
        return sorted((r for r in found if r is not None), key=lambda r: (r.submitted_s, r.id))

    def _kind(self, request: JobRequest) -> str:
        """Empty: the script can not be read. Whatever a request holds, it is no reason to decide nothing for others."""
        try:
            about = os.stat(request.script)
            key = (request.script, about.st_mtime_ns, about.st_size)
            if key not in self._scripts:
                if len(self._scripts) >= MOST_SCRIPTS:
                    self._scripts.clear()
                self._scripts[key] = read_script(request.script)
            return kind_of(request, self._scripts[key])
        except (OSError, ValueError):
            return ""

    def _count(self, books: Books, decision: Decision, decided_ms: float) -> None:
        """For people and Prometheus; written with the next record of the cluster."""
        cluster = replace(books.memory.cluster, at_s=round(time.time(), 3))
        if decision.round:
            cluster = replace(cluster, rounds=cluster.rounds + 1, round_ms=round(decided_ms, 2))
        books.memory = replace(books.memory, cluster=cluster)

    def _pace(self, books: Books, decision: Decision, decided_ms: float, written_ms: float) -> None:
        """As many admissions a round as fit into its time."""
        if not decision.round:
            return
        slow = decided_ms > GOAL_MS or written_ms > WRITE_GOAL_MS
        quick = decided_ms < GOAL_MS / 2 and written_ms < WRITE_GOAL_MS / 2
        if decision.promises:
            books.promise_most = _next(books.promise_most, slow, quick)
        elif decision.admissions or quick:
            books.admit_most = _next(books.admit_most, slow, quick)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, store: Store, leadership: Leadership, books: Books, decision: Decision, facts: Facts) -> float:
        """Milliseconds that it took. Whatever was not written when this breaks is decided again by whoever is next."""
        begun = time.monotonic()
        lease = store.grant(ANSWER_SECONDS) if decision.replies else None
        for write in books.written.todo(decision, facts.asks, begun):
            if write.record is None:
                leadership.delete_fenced(write.key)
            else:
                leadership.put_fenced(write.key, dump(write.record), lease=lease if write.leased else None)
            books.written.done(write, begun)
        shown = {ask.id for ask in self._mirror.asks()}
        books.asked = (books.asked & shown) | {ask.id for ask in facts.asks}
        for job in decision.at_rest:
            books.ended[job] = (decision.states.get(job) or books.memory.live[job]).phase
            books.written.forget(job)
        books.memory = decision.memory
        return (time.monotonic() - begun) * 1000


def _cluster_in(store: Store) -> ClusterState:
    entry = store.get(keys.CLUSTER)
    return load(ClusterState, entry.value) if entry else ClusterState(policy="", backend="")


def _next(most: int, slow: bool, quick: bool) -> int:
    if slow:
        return max(most // 2, 1)
    return min(most * 2, MOST_ADMISSIONS) if quick else most


def main(store: str, state_dir: Path, slots: int = 0, policy: str = "concertina") -> int:
    """A controller without an interface, until it is told to end."""
    state_dir.mkdir(parents=True, exist_ok=True)
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    with open_store(store) as watched:
        mirror = Mirror(watched)
        mirror.start()
        controller = Controller(
            lambda: open_store(store, timeout_s=STORE_SECONDS),
            mirror,
            LocalCluster.open(store, state_dir, slots),
            policy=policy,
            log=state_dir / "controller.log",
        )
        controller.start()
        while not ends.wait(0.5) and not controller.is_down.is_set():
            pass
        controller.close()
        mirror.close()
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    slots_ = int(given[2]) if len(given) > 2 else 0
    sys.exit(main(given[0], Path(given[1]), slots_, given[3] if len(given) > 3 else "concertina"))
