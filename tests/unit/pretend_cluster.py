"""A backend whose keepers are a thread: they do what `cluster/records.py` asks of them, and training is counting."""

import contextlib
import threading
import time
from dataclasses import dataclass, replace

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.records import Activity, JobRequest, JobSeen, JobState, Keeper, NodeState
from concertina.core.errors import StoreError
from concertina.store.protocol import Lease, Store

TURN_SECONDS = 0.02
STEPS_PER_TURN = 2


@dataclass
class Kept:
    """A keeper that runs."""

    job: str
    attempt: int
    request: JobRequest
    seen: JobSeen
    lease: Lease


class PretendCluster:
    """Start it with `start`. Slots in use are counted, and one used twice is remembered in `clashes`."""

    name = "pretend"

    def __init__(self, store: Store, nodes: tuple[NodeState, ...]) -> None:
        self._store, self._nodes = store, nodes
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self._saved: dict[str, int] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pretend", daemon=True)
        self.clashes: list[str] = []
        self.discarded: list[str] = []
        self.started: list[tuple[str, int]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(timeout=10.0)

    # -- what the controller calls -----------------------------------------------------------------------------------

    def nodes(self) -> tuple[NodeState, ...]:
        return self._nodes

    def start_keeper(self, job: str, attempt: int) -> None:
        with self._lock:
            self.started.append((job, attempt))
            if job in self._kept:  # the lock of the job is held
                return
            request = self._store.get(keys.REQUESTS + job)
            assert request is not None
            lease = self._store.grant(3.0)
            keeper = Keeper(job=job, attempt=attempt, pid=1, host="pretend", started_s=time.time())
            self._store.put(keys.KEEPERS + job, dump(keeper), lease=lease)
            seen = JobSeen(id=job, attempt=attempt, step=self._saved.get(job, 0))
            self._kept[job] = Kept(job, attempt, load(JobRequest, request.value), seen, lease)

    def is_gone(self, state: JobState, keeper: Keeper | None, now: float) -> bool:
        with self._lock:
            return state.id not in self._kept and now > state.attempt_s + 0.1

    def end_keeper(self, job: str) -> None:
        self.kill(job)

    def discard(self, job: str) -> bool:
        with self._lock:
            self.discarded.append(job)
            return job not in self._kept

    def close(self) -> None:
        pass

    # -- bad luck ----------------------------------------------------------------------------------------------------

    def kill(self, job: str) -> None:
        with self._lock:
            kept = self._kept.pop(job, None)
            if kept is not None:
                self._store.revoke(kept.lease)

    # -- keeping -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ends.wait(TURN_SECONDS):
            with self._lock, contextlib.suppress(StoreError):
                for kept in list(self._kept.values()):
                    self._turn(kept)
                used = [slot for kept in self._kept.values() for slot in kept.seen.slots]
                self.clashes += [slot for slot in set(used) if used.count(slot) > 1]

    def _turn(self, kept: Kept) -> None:
        entry = self._store.get(keys.STATES + kept.job)
        assert entry is not None
        state = load(JobState, entry.value)
        self._store.keep_alive(kept.lease)
        seen = replace(kept.seen, heard=state.order, at_s=time.time())
        if state.phase.is_end or state.attempt > kept.attempt:
            self._leave(kept, seen, Activity.CANCELLED)
        elif not state.slots:
            self._leave(kept, seen, Activity.SUSPENDED)
        elif set(seen.slots) != set(state.slots):
            stay = tuple(slot for slot in seen.slots if slot in state.slots)
            new = stay if len(stay) < len(seen.slots) else state.slots
            kept.seen = replace(seen, slots=new, activity=Activity.CHANGING, workers=len(stay))
            self._store.put(keys.SEEN + kept.job, dump(kept.seen))
        else:
            self._train(kept, seen, state)

    def _train(self, kept: Kept, seen: JobSeen, state: JobState) -> None:
        count = len(seen.slots)
        step = min(seen.step + STEPS_PER_TURN * count, kept.request.steps)
        speeds = {**seen.speeds, count: float(STEPS_PER_TURN * count) / TURN_SECONDS}
        kept.seen = replace(
            seen,
            step=step,
            workers=count,
            activity=Activity.TRAINING,
            order=state.order,
            speeds=speeds,
            total_steps=kept.request.steps,
        )
        if step >= kept.request.steps:
            self._leave(kept, kept.seen, Activity.FINISHED)
        else:
            self._store.put(keys.SEEN + kept.job, dump(kept.seen))

    def _leave(self, kept: Kept, seen: JobSeen, activity: Activity) -> None:
        self._saved[kept.job] = seen.step
        last = replace(seen, slots=(), workers=0, activity=activity, exit=0)
        self._store.put(keys.SEEN + kept.job, dump(last))
        self._store.revoke(kept.lease)
        del self._kept[kept.job]
