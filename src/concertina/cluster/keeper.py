"""The keeper of one job: a process that outlives controllers and makes the job what they decided.

    python -m concertina.cluster.keeper STORE STATE JOB ATTEMPT

It reads `states/JOB`, drives the job (`keeper_job.py`), and writes `seen/JOB`. Whoever holds the job's lock is its
keeper; all that the job starts holds it, too, so no two attempts ever run at once. It needs the store only to learn of
something new: while that is away, the job trains on. SIGTERM suspends the job. Killed, it takes everything with it, and
the next attempt goes on from the newest checkpoint.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from concertina.backends.base import WorkerBackend
from concertina.backends.local import LocalBackend
from concertina.cluster import keys
from concertina.cluster.codec import load
from concertina.cluster.keeper_book import JobBook
from concertina.cluster.keeper_job import Ending, KeptJob, Outcome, settings_of
from concertina.cluster.keeper_link import StoreLink
from concertina.cluster.keeper_log import complain
from concertina.cluster.keeper_start import HERE_ONLY, LOCK, end_holders, job_folder, me, take_lock
from concertina.cluster.records import Activity, ClusterState, JobRequest, JobSeen, JobState, NodeState
from concertina.core.errors import StoreError, UsageError
from concertina.core.messages import EXIT_USAGE
from concertina.store import Store, open_store
from concertina.store.address import SqliteAddress, parse_address

EXIT_FAILED_JOB = 1
EXIT_NOT_IN_OFFICE = 3  # another attempt keeps the job
EXIT_BROKEN = 70  # not the job's fault: the next attempt may have more luck

STORE_SECONDS = 2.0  # that one call may take
READ_SECONDS = 30.0  # for the first word of the store
LOCK_SECONDS = 10.0  # for an earlier attempt to end
LAST_SECONDS = 60.0  # for the store to take the last word
ROOM_BYTES = 4 << 20  # on the disk, without which no job is begun: it would fail for what is not its fault
ROOM_SECONDS = 1.0  # between two looks whether there is room
EACH_STEP = 4096  # lines for as many steps; from twice as many steps on, every second one is written down, and so on

ENDINGS = {
    Outcome.FINISHED: Activity.FINISHED,
    Outcome.FAILED: Activity.FAILED,
    Outcome.SUSPENDED: Activity.SUSPENDED,
    Outcome.STOPPED: Activity.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a keeper reads before it begins."""

    request: JobRequest
    state: JobState
    before: JobSeen | None  # what the attempt before saw last
    backend: str


def main(store: str, state_dir: Path, job: str, attempt: int) -> int:
    store, folder = absolute(store), job_folder(state_dir.absolute(), job)
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder / LOCK, LOCK_SECONDS)
    task = read_task(lambda: open_store(store, timeout_s=STORE_SECONDS), job, attempt)
    if task is None:
        return EXIT_NOT_IN_OFFICE
    if lock is None:
        complain("an earlier attempt does not end: it is ended")
        end_holders(folder / LOCK)
        lock = take_lock(folder / LOCK, LOCK_SECONDS)
    if lock is None:
        complain(f"{folder / LOCK} is held by another process: giving up")
        return EXIT_NOT_IN_OFFICE
    with (folder / "events.jsonl").open("a") as sink:
        sink.write("\n" if ends_torn(folder / "events.jsonl") else "")
        return Office(store, folder, task, attempt, sink, lock).serve()


def read_task(open_: Callable[[], Store], job: str, attempt: int) -> Task | None:
    """Waits for a store that does not answer, and for the word that this attempt is meant; None: it is not."""
    until = time.monotonic() + READ_SECONDS
    while True:
        try:
            with open_() as store:
                found = _read(store, job)
            if found is not None and found.state.attempt >= attempt:
                return found if found.state.attempt == attempt else None
            problem = f"the store knows no job {job!r} with attempt {attempt}"
        except StoreError as error:
            problem = str(error)
        if time.monotonic() >= until:
            complain(problem)
            return None
        time.sleep(0.3)


def _read(store: Store, job: str) -> Task | None:
    request, state = store.get(keys.REQUESTS + job), store.get(keys.STATES + job)
    seen, cluster = store.get(keys.SEEN + job), store.get(keys.CLUSTER)
    if request is None or state is None:
        return None
    return Task(
        request=load(JobRequest, request.value),
        state=load(JobState, state.value),
        before=load(JobSeen, seen.value) if seen is not None else None,
        backend=load(ClusterState, cluster.value).backend if cluster is not None else "local",
    )


def open_backend(kind: str, log_dir: Path, lock: int) -> WorkerBackend:
    if kind == "local":
        return LocalBackend.open(log_dir, threads=1, hold=(lock,))
    try:
        found: WorkerBackend = import_module(f"concertina.backends.{kind}").open_backend(
            log_dir, threads=1, hold=(lock,)
        )
    except (ModuleNotFoundError, AttributeError) as error:
        raise UsageError(f"backend {kind!r} can not be used ({error}): use 'local', or install what it needs") from None
    return found


class Office:
    """A keeper's time in office."""

    def __init__(self, store: str, folder: Path, task: Task, attempt: int, sink: TextIO, lock: int) -> None:
        self._open: Callable[[], Store] = lambda: open_store(store, timeout_s=STORE_SECONDS)
        self._folder, self._task, self._attempt, self._sink, self._lock = folder, task, attempt, sink, lock
        before = task.before
        self._book = JobBook(steps=task.request.steps, speeds=before.speeds if before else None)
        if before is not None:
            self._book.epochs, self._book.values = before.epochs, dict(before.values)
        self._link = StoreLink(self._open, me(task.request.id, attempt), task.state)
        self._devices: dict[str, tuple[str, ...]] = {}  # names of the GPUs by node
        self._types: dict[str, str] = {}  # type of device by node
        self._type = before.device_type if before else ""  # on which speeds were measured
        self._asked_to_end: float | None = None
        self._last = first_word(task, attempt)

    def serve(self) -> int:
        """The exit code of the process."""
        signal.signal(signal.SIGTERM, self._on_term)
        self._link.start()
        try:
            ending = self._keep()
        except UsageError as error:
            ending = Ending(outcome=Outcome.FAILED, exit=EXIT_USAGE, error=str(error))
        except Exception as error:
            complain(traceback.format_exc())
            self._tell({"event": "keeper_broken", "error": f"{type(error).__name__}: {error}"})
            return self._leave(None)
        return self._leave(ending)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = self._asked_to_end or time.monotonic()

    def _keep(self) -> Ending:
        """Runs the job, again if it was interrupted and has slots by then."""
        for left_over in self._folder.glob(".job-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        go_to(self._task.request.cwd)
        self._wait_for_room()
        if not self._goes_on():
            return self._called_off()
        settings_of(self._task.request, self._folder, len(self._task.state.slots))  # says what is wrong before it costs
        self._tell({"event": "keeper_started", "attempt": self._attempt, "pid": os.getpid()})
        backend = open_backend(self._task.backend, self._folder / "logs", self._lock)
        try:
            while True:
                ending = self._run(backend)
                if ending.outcome is not Outcome.SUSPENDED or not self._goes_on():
                    return ending
        finally:
            backend.close()

    def _goes_on(self) -> bool:
        state = self._link.state
        return bool(state.slots) and not state.phase.is_end and self._asked_to_end is None and not self._link.over

    def _called_off(self) -> Ending:
        """Before it began."""
        stopped = self._link.state.phase.is_end or self._link.over
        return Ending(outcome=Outcome.STOPPED if stopped else Outcome.SUSPENDED)

    def _run(self, backend: WorkerBackend) -> Ending:
        self._wait_for_room()
        if not self._goes_on():
            return self._called_off()
        request, state = self._task.request, self._link.state
        with KeptJob(request, self._folder, state, backend, self._book, self._tell, self._slot_env) as job:
            while True:
                if self._link.over:
                    return Ending(outcome=Outcome.STOPPED)
                job.asked_to_end = self._asked_to_end
                ending = job.turn(self._link.state)
                self._heed_type()
                self._last = replace(job.seen(self._attempt), device_type=self._type)
                if ending is not None:
                    return ending
                self._link.publish(self._last)

    def _wait_for_room(self) -> None:
        """As long as the job is wanted and the disk is full."""
        waits = False
        while self._goes_on() and shutil.disk_usage(self._folder).free < ROOM_BYTES:
            if not waits:
                complain(f"{self._folder} has no room: waiting for some")
            waits = True
            said = f"it waits: the disk with {self._folder} is full"
            self._link.publish(replace(self._last, heard=self._link.state.order, error=said))
            time.sleep(ROOM_SECONDS)

    def _heed_type(self) -> None:
        """Speeds hold for one type of device: on another one they are measured anew."""
        types = {self._types.get(slot.rpartition("/")[0], "") for slot in self._last.slots}
        now = types.pop() if len(types) == 1 else ""
        if self._last.slots and now != self._type:
            if self._type:
                self._book.meter.forget()
            self._type = now

    def _slot_env(self, slot: str) -> Mapping[str, str] | None:
        """A GPU slot shows its worker that GPU and no other, any other slot none. None: the store does not say now."""
        node, _, index = slot.rpartition("/")
        if node not in self._devices:
            try:
                with self._open() as store:
                    found = store.get(keys.NODES + node)
            except StoreError:
                return None
            known = load(NodeState, found.value) if found is not None else None
            self._devices[node] = gpus_of(known) if known is not None else ()
            self._types[node] = known.device_type if known is not None else ""
        names = self._devices[node]
        return {"CONCERTINA_SLOT": slot, "CUDA_VISIBLE_DEVICES": names[int(index) % len(names)] if names else ""}

    def _tell(self, event: Mapping[str, Any]) -> None:
        event = {"time": round(time.time(), 3), **event}
        if event["event"] == "step":
            if event["step"] % step_stride(event["step"]):
                return
            # JSON has no word for what is not a number
            event["log"] = {name: value if isfinite(value) else None for name, value in event["log"].items()}
        try:
            self._sink.write(json.dumps(event) + "\n")
            self._sink.flush()
        except OSError as error:  # a full disk is no reason to stop training
            complain(f"events.jsonl: {error}")

    def _leave(self, ending: Ending | None) -> int:
        """The last word: nothing runs any more, and how it ended. None: it broke, and the next attempt goes on."""
        if self._link.over:
            complain(f"not in office: {self._link.over}")
            self._link.close()
            return EXIT_NOT_IN_OFFICE
        last = replace(self._last, slots=(), pids={}, workers=0, heard=self._link.state.order)
        if ending is not None:
            last = replace(last, activity=ENDINGS[ending.outcome], exit=ending.exit, error=ending.error)
            self._tell({"event": "keeper_ended", "attempt": self._attempt, "activity": last.activity})
        self._link.publish(replace(last, at_s=round(time.time(), 3)))
        if not self._link.flush(LAST_SECONDS):
            complain("the store did not take the last word")
        self._link.close()
        if ending is None:
            return EXIT_BROKEN
        return EXIT_FAILED_JOB if ending.outcome is Outcome.FAILED else 0


def first_word(task: Task, attempt: int) -> JobSeen:
    """Before the job begins: it is where it will go on from."""
    before = task.before or JobSeen(id=task.request.id, attempt=attempt)
    return JobSeen(
        id=task.request.id,
        attempt=attempt,
        step=before.checkpoint_step,
        epoch=before.epoch,
        epochs=before.epochs,
        total_steps=before.total_steps,
        checkpoint_step=before.checkpoint_step,
        values=before.values,
        speeds=before.speeds,
        device_type=before.device_type,
    )


def gpus_of(node: NodeState) -> tuple[str, ...]:
    if node.device_type.lower() in ("cpu", ""):
        return ()
    return node.devices or tuple(str(index) for index in range(node.slots))


def step_stride(step: int) -> int:
    """The longer a job is, the fewer of its steps are written down: twice as many steps take `EACH_STEP` lines more."""
    return 1 << max(0, (step // EACH_STEP).bit_length() - 1)


def ends_torn(path: Path) -> bool:
    """Whether an earlier keeper was killed in the middle of a line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def absolute(address: str) -> str:
    """The keeper is about to change its folder."""
    where = parse_address(address)
    return f"sqlite:{where.path.absolute()}" if isinstance(where, SqliteAddress) and where.synced else address


def go_to(folder: str) -> None:
    if folder:
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(
                f"the job's folder {folder} can not be entered ({error.strerror}): submit it again"
            ) from None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.environ.get("PYTHONSAFEPATH") == HERE_ONLY:
        del os.environ["PYTHONSAFEPATH"]
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
