"""One job under its keeper, from start to end: carries out what `keeper_plan` decides on a `runner.Run`."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from concertina.backends.base import Seat, WorkerBackend
from concertina.cluster.keeper_book import JobBook, plain
from concertina.cluster.keeper_log import complain
from concertina.cluster.keeper_plan import (
    AGAIN_S,
    Decision,
    Interrupt,
    Kill,
    Refuse,
    Remove,
    Resize,
    Seated,
    Situation,
    Stop,
    is_settled,
    plan,
)
from concertina.cluster.records import Activity, JobRequest, JobSeen, JobState
from concertina.core.checkpoints import checkpoints_in, newest_whole
from concertina.core.env import WorkerEnv
from concertina.core.errors import CheckpointError
from concertina.core.job import JobPhase
from concertina.master.machine import EXIT_INTERRUPTED_BY_USER
from concertina.report import Report
from concertina.runner import Listener, Run, RunSettings, write_json

CHECKPOINT_SECONDS = 30  # between two checkpoints: what a crash of everything may cost
KEEP_CHECKPOINTS = 2

SlotEnv = Callable[[str], Mapping[str, str] | None]  # what a worker on this slot has in its environment, if known


class Outcome(Enum):
    FINISHED = "finished"
    FAILED = "failed"
    SUSPENDED = "suspended"  # every worker ended on request
    STOPPED = "stopped"  # at once, since nothing more is wanted of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    outcome: Outcome
    exit: int = 0
    error: str = ""


class KeptJob:
    """Use as a context manager; `turn` until it gives an ending."""

    def __init__(
        self,
        request: JobRequest,
        folder: Path,
        state: JobState,
        backend: WorkerBackend,
        book: JobBook,
        tell: Listener,
        slot_env: SlotEnv,
    ) -> None:
        self._request, self._folder, self._book, self._tell, self._slot_env = request, folder, book, tell, slot_env
        self._state = state
        self._slots = state.slots
        self._avoided: frozenset[str] = frozenset()  # where a worker was found slow, until the next order
        self._taken: dict[str, float] = {}
        self._leaving: set[int] = set()
        self._counted: set[int] = set()  # removals that the target knows of
        self._left: dict[int, float] = {}
        self._killed: set[int] = set()
        self._pending: tuple[str, Decision] | None = None
        self._asked = 0.0
        self._refused_until = 0.0
        self._interrupted: float | None = None
        self._trains_s = 0.0
        self.asked_to_end: float | None = None
        book.begin()
        settings = settings_of(request, folder, len(state.slots))
        book.step = book.checkpoint_step = _step_of(settings.resume)
        self._target = settings.workers
        before = list(told_before(folder / "events.jsonl"))
        self._say("run_started", step=book.step, workers=settings.workers)
        self.run = Run(settings, self._note, backend, self._seat)
        self.run.recall(before)

    def __enter__(self) -> "KeptJob":
        return self

    def __exit__(self, *error: Any) -> None:
        self.run.__exit__(None, None, None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def turn(self, state: JobState) -> Ending | None:
        """A fifth of a second of the job's life; its ending, when it is over."""
        self._heed(state, time.monotonic())
        if self.run.turn():
            return self._ending(self.run.close_report())
        now = time.monotonic()
        self._take_answer(now)
        decision = plan(self._situation(now))
        if isinstance(decision, Stop):
            return Ending(outcome=Outcome.STOPPED)
        self._carry_out(decision, now)
        return None

    def _heed(self, state: JobState, now: float) -> None:
        if state.order != self._state.order:
            self._avoided = frozenset()
        self._state = state
        slots = tuple(s for s in state.slots if s not in self._avoided) or state.slots
        self._slots = slots[: self._request.virtual]
        occupied = {seat.slot for seat in self.run.seats.values()}
        self._taken = {s: self._taken.get(s, now) for s in occupied if s not in self._slots}

    def _situation(self, now: float) -> Situation:
        return Situation(
            now=now,
            slots=self._slots,
            ended=self._state.phase.is_end and self._state.phase is not JobPhase.FINISHED,
            asked_to_end=self.asked_to_end,
            vacate_s=self._state.vacate_s,
            workers=tuple(self._seated(n, seat.slot, now) for n, seat in self.run.seats.items()),
            members=len(self._book.members),
            unseated=tuple(n for n in self.run.unseated if n in self._book.members),
            taken=self._taken,
            target=self._target,
            waits=self._pending is not None or now < self._refused_until,
            asked=self._asked,
            changes=self._book.changes,
            finishes=self._book.finishes,
            interrupted=self._interrupted,
        )

    def _seated(self, worker: int, slot: str, now: float) -> Seated:
        left = worker in self._book.left
        if left:
            self._left.setdefault(worker, now)
        return Seated(
            worker=worker,
            slot=slot,
            member=worker in self._book.members,
            leaving=left or worker in self._leaving,
            left=self._left.get(worker),
            started=worker in self.run.workers,
            killed=worker in self._killed,
        )

    def _seat(self, worker: int) -> Seat | None:
        """The first granted slot on which nothing of ours runs."""
        occupied = {seat.slot for seat in self.run.seats.values()}
        slot = next((s for s in self._slots if s not in occupied), None)
        env = self._slot_env(slot) if slot is not None else None
        if slot is None or env is None:
            return None
        self._say("worker_seated", worker=worker, slot=slot)
        return Seat(node=slot.rpartition("/")[0], slot=slot, env=env)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision, now: float) -> None:
        if isinstance(decision, Remove):
            name = self.run.remove(decision.workers, decision.replaced, decision.reason)
            self._pending, self._asked = (name, decision), now
        elif isinstance(decision, Resize):
            self._pending, self._asked = (self.run.resize(decision.workers), decision), now
        elif isinstance(decision, Interrupt):
            self._interrupted = now
            self.run.interrupt()
            self._say("job_interrupted", reason=decision.reason)
        elif isinstance(decision, Kill):
            self._killed |= set(decision.workers)
            self._say("workers_killed", workers=list(decision.workers), reason=decision.reason)
            self.run.kill(decision.workers)
        elif isinstance(decision, Refuse):
            self.run.refuse(decision.workers)

    def _take_answer(self, now: float) -> None:
        if self._pending is None:
            return
        name, decision = self._pending
        answer = self.run.answer(name)
        if answer is None:
            return
        self._pending = None
        accepted, reason = answer
        if not accepted:
            self._say("request_refused", reason=reason)
            self._refused_until = now + AGAIN_S
        elif isinstance(decision, Resize):
            self._target = decision.workers
        elif isinstance(decision, Remove):
            self._leaving |= set(decision.workers)
            if not decision.replaced:
                new = set(decision.workers) - self._counted
                self._counted |= new
                self._target = max(1, self._target - len(new))

    # -- what is heard of it -----------------------------------------------------------------------------------------

    def _note(self, event: Mapping[str, Any]) -> None:
        self._tell(event)
        self._book.note(event)
        if self._book.trains and not self._trains_s:
            self._trains_s = round(time.time(), 3)
        kind = event["event"]
        if kind in ("generation_started", "change_abandoned"):
            self._leaving.clear()  # whoever still has to go is asked again, which does no harm
        elif kind == "worker_slow" and event["worker"] in self.run.seats:
            self._avoided |= {self.run.seats[event["worker"]].slot}
            self._target -= 1  # the master's own doing
        elif kind == "script_answered" and event["accepted"]:
            self._target = 0  # the script has asked for another number, but the cluster decides: ask again
        elif kind == "checkpoint":
            drop_old_checkpoints(self._folder / "checkpoints")

    def _say(self, event: str, **fields: Any) -> None:
        self._tell({"time": round(time.time(), 3), "event": event, **fields})

    def _ending(self, report: Report) -> Ending:
        try:
            write_json(self._folder / "report.json", report.to_json())
        except OSError as error:  # a full disk: the job has ended all the same
            complain(f"report.json: {error}")
        if report.exit == 0:
            return Ending(outcome=Outcome.FINISHED)
        if self._interrupted is not None and report.exit == EXIT_INTERRUPTED_BY_USER:
            return Ending(outcome=Outcome.SUSPENDED)
        return Ending(outcome=Outcome.FAILED, exit=report.exit, error=plain(report.error))

    # -- what it looks like ------------------------------------------------------------------------------------------

    def seen(self, attempt: int) -> JobSeen:
        """For the store."""
        book, situation = self._book, self._situation(time.monotonic())
        settled = book.trains and is_settled(situation)
        book.carried_out = self._state.order if settled else book.carried_out
        return JobSeen(
            id=self._request.id,
            attempt=attempt,
            order=book.carried_out,
            heard=self._state.order,
            activity=self._activity(settled),
            slots=tuple(seat.slot for seat in self.run.seats.values()),
            workers=len(book.members) if book.trains else 0,
            generation=book.generation,
            step=book.step,
            epoch=book.epoch,
            epochs=book.epochs,
            total_steps=book.total_steps,
            trains_s=self._trains_s,
            checkpoint_step=book.checkpoint_step,
            values=book.values,
            speeds=dict(book.meter.speeds),
            pids={seat.slot: self.run.workers[n] for n, seat in self.run.seats.items() if n in self.run.workers},
            at_s=round(time.time(), 3),
        )

    def _activity(self, settled: bool) -> Activity:
        if self._interrupted is not None:
            return Activity.SUSPENDING
        if not self._book.trains:
            return Activity.STARTING
        return Activity.TRAINING if settled or self._book.finishes else Activity.CHANGING


def settings_of(request: JobRequest, folder: Path, workers: int) -> RunSettings:
    """As many workers as there are slots; how few may go on is the controller's affair."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    return RunSettings(
        script=Path(request.script),
        args=request.args,
        virtual=request.virtual,
        workers=max(1, min(workers, request.virtual)),
        steps=request.steps,
        checkpoint_dir=checkpoints,
        checkpoint_seconds=WorkerEnv.from_environ(os.environ).checkpoint_seconds or CHECKPOINT_SECONDS,
        resume=_newest(checkpoints),
        level=request.level,
        scaling=request.scaling,
        run_dir=folder,
    )


OF_THE_REPORT = ("run_started", "samples", "training", "generation_started", "generation_timed")
RECALLED = tuple(f'"event": "{kind}"' for kind in OF_THE_REPORT)


def told_before(events: Path) -> Iterator[dict[str, Any]]:
    """What of the story so far belongs into the report of the whole job; a torn line is none."""
    with contextlib.suppress(FileNotFoundError), events.open(errors="replace") as file:
        for line in file:
            if any(kind in line for kind in RECALLED):
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def _newest(checkpoints: Path) -> Path | None:
    try:
        found, passed_over = newest_whole(checkpoints)
    except CheckpointError:
        return None
    for sentence in passed_over:
        complain(f"passed over: {sentence}")
    return found


def _step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint is not None else 0


def drop_old_checkpoints(folder: Path) -> None:
    """The newest are enough; a folder that is deleted halfway is one that is not whole."""
    for old in checkpoints_in(folder)[KEEP_CHECKPOINTS:]:
        shutil.rmtree(old, ignore_errors=True)
