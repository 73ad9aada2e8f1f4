"""One job on this machine, from start to end: `concertina run` without its command line.

Starts a master and, on its word, workers; keeps the books: the report, the event stream, the samples. A master that
dies is replaced; the job does not notice.
"""

import json
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from concertina.backends.base import Seat, WorkerBackend
from concertina.backends.local import LocalBackend
from concertina.core.batch_scaling import Scaling
from concertina.core.checkpoints import check_whole, newest_whole
from concertina.core.env import WorkerEnv, check_workers
from concertina.core.errors import CheckpointError, JobFailed, UsageError
from concertina.core.messages import MASTER
from concertina.master.launch import MasterKeeper
from concertina.master.machine import EXIT_INTERRUPTED_BY_USER, Change, Phase
from concertina.master.service import JobSpec
from concertina.master.words import SCRIPT
from concertina.report import Generation, GenerationBook, Report, SampleBook, hint_of_a_late_start, last_words

STOP_SECONDS = 30.0  # a stopping worker may take this long to reach a step boundary and write its checkpoint
POLL_SECONDS = 0.2
ORPHAN_SECONDS = 60.0  # without a word from any master, a worker on another host ends itself
_EXITED = re.compile(r"worker (\d+) ended with exit code \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What `concertina run` was asked to do, checked."""

    script: Path
    args: Sequence[str] = ()
    virtual: int = 1
    workers: int = 1
    minimum: int = 1  # with fewer workers left, the job waits for others
    maximum: int = 0  # 0: as many as there are virtual workers
    silence_s: float = 10.0  # a worker without a sign of life for so long is taken for lost
    stall_s: float = 300.0  # and so is one that the others have waited for so long within a step
    arrive_s: float = 900.0  # or that has not said a word for so long after its start
    steps: int = 0
    changes: tuple[Change, ...] = ()
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    checkpoint_seconds: int = 0
    resume: Path | None = None  # a whole checkpoint
    threads: int = 1
    level: str = "D1"
    reduction: str = "auto"
    scaling: str = Scaling.CONSISTENT
    ramp: int = 100
    largest_batch: int = 0
    record_dir: Path | None = None
    run_dir: Path | None = None
    store: str = ""  # on several hosts: a store that all of them reach; empty: the master has one of its own
    job: str = ""  # its name there

    def __post_init__(self) -> None:
        check_script(self.script)
        WorkerEnv(
            virtual=self.virtual,
            level=self.level,
            reduction=self.reduction,
            scaling=self.scaling,
            ramp=self.ramp,
            largest_batch=self.largest_batch,
        )
        check_workers(self.workers, self.virtual)
        if not 1 <= self.minimum <= self.workers:
            raise UsageError(f"--min {self.minimum}: needs 1 to {self.workers} (the workers to start with)")
        if self.maximum and not self.workers <= self.maximum <= self.virtual:
            raise UsageError(
                f"--max {self.maximum}: needs {self.workers} (the workers to start with) to {self.virtual} (--virtual)"
            )
        most = self.maximum or self.virtual
        for change in self.changes:
            if not self.minimum <= change.workers <= most:
                raise UsageError(
                    f"--resize {change.step}={change.workers}: needs {self.minimum} to {most} workers "
                    f"({'--max' if self.maximum else 'the number of virtual workers'})"
                )
        if self.steps < 0 or self.threads < 0 or self.checkpoint_every < 0:
            raise UsageError("--steps, --threads and --checkpoint-every take numbers from 0 up")
        if (self.checkpoint_every or self.checkpoint_seconds) and self.checkpoint_dir is None:
            raise UsageError("--checkpoint-every needs --checkpoint DIR")


def check_script(script: Path) -> None:
    if not script.is_file():
        raise UsageError(f"{script} is not a file: give the path of a training script")
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script} is not a Python script: {error}") from None


Listener = Callable[[Mapping[str, object]], None]
Seating = Callable[[int], Seat | None]  # where a new worker goes; None: there is no place for it now


class Run:
    """Carries out what the master commands until the job is over. Use as a context manager."""

    def __init__(
        self,
        settings: RunSettings,
        listener: Listener = lambda event: None,
        backend: WorkerBackend | None = None,
        seating: Seating = lambda worker: Seat(),
    ) -> None:
        """`backend` lets several runs share one nursery; otherwise the run has its own.

        `seating` is asked for each new worker, and again every turn while it has no place for it.
        """
        self.settings = settings
        self.report = Report(virtual=settings.virtual, scaling=str(settings.scaling))
        self._listener = listener
        self._own_dir = settings.run_dir is None
        self.run_dir = settings.run_dir or Path(tempfile.mkdtemp(prefix="concertina-run-"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # Fresh for every run: a rendezvous that was used before would lead to addresses of the past.
        self._private_dir = Path(tempfile.mkdtemp(prefix=".job-", dir=self.run_dir))
        self._log_dir = self.run_dir / "logs"
        self._log_dir.mkdir(exist_ok=True)
        self._own_backend = backend is None
        self._backend: WorkerBackend = backend or LocalBackend.open(self._log_dir, settings.threads)
        self._seating = seating
        self._unseated: dict[int, Mapping[str, Any]] = {}  # worker -> what the master said when it wanted it started
        self.on_idle: Callable[[], None] = lambda: None  # called several times a second
        self._samples = SampleBook(resumed=settings.resume is not None)
        self._book = GenerationBook(self.report)
        self._kill_at: float | None = None
        self._asked_to_stop = self._asked_to_save = False
        self._stops = False  # all workers were told to
        self._answers: dict[str, tuple[bool, str]] = {}
        self._over: Mapping[str, Any] | None = None
        self.main_worker = 0  # where virtual worker 0 lives
        self.workers: dict[int, int] = {}  # alive: number -> pid
        self.seats: dict[int, Seat] = {}  # of workers that were started and are not gone
        at_step = self.report.steps = check_whole(settings.resume).step if settings.resume else 0
        spec = JobSpec(
            virtual=settings.virtual,
            workers=settings.workers,
            schedule=tuple((change.step, change.workers) for change in settings.changes),
            at_step=at_step,
            minimum=settings.minimum,
            resume=settings.resume is not None,
            maximum=settings.maximum,
            silence_s=settings.silence_s,
            stall_s=settings.stall_s,
            arrive_s=settings.arrive_s,
        )
        log = self._log_dir / "master.log"
        self.master = MasterKeeper(
            self._private_dir,
            spec,
            lambda env: self._backend.start_master(env, log),
            store=settings.store,
            job=settings.job or "job",
            host=self._backend.address,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.master.close()
        if self._own_backend:
            self._backend.close()
        else:
            self._backend.end_workers()
        shutil.rmtree(self._private_dir, ignore_errors=True)
        if self._own_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """What runs of the same job did before this one, so that the report is about the whole job.

        Whatever they trained on after the checkpoint that this one goes on from counts no more.
        """
        for event in events:
            kind = event["event"]
            if kind == "run_started":
                self._samples.begin_again()
            elif kind == "samples":
                self._samples.add(event)
            elif kind == "training" and "rounds" in event:
                self._samples.go_back(event["generation"], event["rounds"])
            elif kind == "generation_started":
                row = Generation(event["generation"], event["step"], event["workers"], event["reason"])
                self.report.generations.append(row)
            elif kind == "generation_timed":
                self._recall_times(event)
        self._samples.begin_again()

    def _recall_times(self, event: Mapping[str, Any]) -> None:
        numbered = (row for row in reversed(self.report.generations) if row.generation == event["generation"])
        if (row := next(numbered, None)) is not None:
            row.stop_s, row.phases = event["stop_s"], dict(event["phases"])

    def log_path(self, worker: int) -> Path:
        return self._log_dir / f"worker-{worker}.log"

    # -- what can be asked of a running job --------------------------------------------------------------------------

    def interrupt(self) -> None:
        """From a signal handler: stop at the next step boundary; asked a second time, at once."""
        self._asked_to_stop = True

    def save_soon(self) -> None:
        """From a signal handler: `checkpoint` in the next turn."""
        self._asked_to_save = True

    def resize(self, workers: int) -> str:
        """Asks for another number of workers; the name under which `answer` gives the master's word."""
        return self._ask(op="resize", workers=workers)

    def remove(self, workers: Sequence[int], replaced: bool = False, reason: str = "asked for") -> str:
        """Asks certain workers to leave; with `replaced`, others come in their place."""
        return self._ask(op="remove", workers=list(workers), replaced=replaced, reason=reason)

    def checkpoint(self) -> str:
        """Asks for a checkpoint after the next step, in the job's folder for them; training goes on."""
        if self.settings.checkpoint_dir is None:
            raise UsageError(
                "a checkpoint was asked for, and the job has no folder for it: start it with --checkpoint DIR"
            )
        return self._ask(op="checkpoint")

    @property
    def unseated(self) -> tuple[int, ...]:
        """Workers that the master wants and that have no place yet."""
        return tuple(self._unseated)

    def refuse(self, workers: Sequence[int]) -> None:
        """There will be no place for these: for the master they are gone, and it does without or asks again."""
        for worker in workers:
            if self._unseated.pop(worker, None) is not None:
                self.master.say(op="exited", worker=worker, code=-int(signal.SIGKILL))

    def kill(self, workers: Sequence[int]) -> None:
        """Ends workers without asking; the others go on without them."""
        self.refuse(workers)
        if workers:
            self._backend.signal_workers(signal.SIGKILL, workers)

    def answer(self, request: str) -> tuple[bool, str] | None:
        """Whether the request was accepted, and the reason; None while there is no answer."""
        return self._answers.get(request)

    def _ask(self, **request: Any) -> str:
        name = uuid.uuid4().hex
        self.master.say(request=name, **request)
        return name

    # -- the loop ----------------------------------------------------------------------------------------------------

    def to_end(self) -> Report:
        while not self.turn():
            pass
        return self.close_report()

    def turn(self) -> bool:
        """Does what is to be done now; True when the job is over."""
        if self._asked_to_stop:
            self._asked_to_stop = False
            self.master.say(op="interrupt")
            self._tell({"event": "interrupt_asked"})
        if self._asked_to_save:
            self._asked_to_save = False
            self.checkpoint()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.master.say(op="interrupt")  # asked long enough
            self._kill_at = None
        if self.master.is_frozen:
            self._backend.signal_workers(signal.SIGKILL, (MASTER,))
        self.on_idle()
        for event in self._backend.events(POLL_SECONDS, self.master.wake_fd):
            self._note(event)
            self._tell(event)
            self._tell_times()
        for message in self.master.heard():
            self._obey(message)
        for message in list(self._unseated.values()):
            self._start_worker(message)
        return self._over is not None

    def close_report(self) -> Report:
        report, over = self.report, self._over
        assert over is not None
        report.samples = self._samples.rows()
        report.exit, report.error = over["exit"], over["failure"]
        if self.settings.resume is not None or len(report.generations) > 1:
            report.error += hint_of_a_late_start(report.error)
        if found := _EXITED.fullmatch(report.error):  # without an exception that could be told
            report.error += last_words(self.log_path(int(found[1])))
        if over["phase"] == Phase.INTERRUPTED:
            report.exit, report.error = EXIT_INTERRUPTED_BY_USER, "interrupted"
        self._tell_times(at_the_end=True)
        self._tell({"event": "job_ended", "exit": report.exit, "error": report.error, "step": report.steps})
        return report

    # -- words of the master -----------------------------------------------------------------------------------------

    def _obey(self, message: Mapping[str, Any]) -> None:
        op = message["op"]
        if op == "start":
            self._unseated[message["worker"]] = message  # until there is a place, which is mostly at once
        elif op == "kill":
            self.kill(message["workers"])
        elif op == "stop":
            self._stops = True
            self.refuse(self.unseated)
            self._backend.signal_workers(signal.SIGTERM)
            self._kill_at = time.monotonic() + STOP_SECONDS
        elif op == "answer":
            self._answers[message["request"]] = (message["accepted"], message["reason"])
            if message["request"] == SCRIPT:
                told = {"event": "script_answered", "accepted": message["accepted"], "reason": message["reason"]}
                self._tell(told)
        elif op == "story":
            story = {name: value for name, value in message.items() if name != "op"}
            self._book.story(story)
            if story["event"] == "generation_started":
                self.main_worker = story["members"][0]
            self._tell(story)
        elif op == "over":
            self._over = message

    def _start_worker(self, message: Mapping[str, Any]) -> None:
        s = self.settings
        number = message["worker"]
        seat = self._seating(number)
        if seat is None:
            return
        del self._unseated[number]
        self.seats[number] = seat
        resume = self._newest_checkpoint() if message["resume"] else None
        env = WorkerEnv(
            virtual=s.virtual,
            worker=number,
            members=tuple(message["members"]),
            generation=message["generation"],
            hold_at=message["hold_at"],
            launched=True,
            run_dir=str(self._private_dir),
            store=self.master.workers_store,
            job=self.master.job,
            key=self.master.key,
            host=self._backend.host_of(seat.node) if self._backend.address else "",
            orphan_s=max(ORPHAN_SECONDS, 3 * s.silence_s),
            resume=str(resume.resolve()) if resume else "",
            steps=s.steps,
            checkpoint_dir=str(s.checkpoint_dir.resolve()) if s.checkpoint_dir else "",
            checkpoint_every=s.checkpoint_every,
            checkpoint_seconds=s.checkpoint_seconds,
            threads=s.threads,
            level=s.level,
            reduction=s.reduction,
            record_dir=str(s.record_dir.resolve()) if s.record_dir else "",
            scaling=str(s.scaling),
            from_workers=s.workers,
            ramp=s.ramp,
            largest_batch=s.largest_batch,
        ).to_environ()
        del env["CONCERTINA_EVENTS_FD"], env["CONCERTINA_RACK"]  # the nursery's own pipe, the host's own place
        env |= seat.env
        self._backend.start_worker(number, s.script.resolve(), s.args, env, self.log_path(number), seat.node)

    def _newest_checkpoint(self) -> Path | None:
        """Where to go on from after everything was lost."""
        folder = self.settings.checkpoint_dir
        if folder is not None and folder.is_dir():
            try:
                return newest_whole(folder)[0]
            except CheckpointError:
                pass
        return self.settings.resume

    # -- words of the workers ----------------------------------------------------------------------------------------

    def _note(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "master_started":
            self.master.came_up()
        elif kind == "master_exited":
            if self._over is None:
                self.master.ended(event["code"])
        elif kind == "worker_exited":
            self.workers.pop(event["worker"], None)
            self.seats.pop(event["worker"], None)
            self.master.say(op="exited", worker=event["worker"], code=event["code"])
        elif kind == "failed":
            self.master.say(op="failed", worker=event["worker"], error=event["error"])
        elif kind == "worker_started":
            self.workers[event["worker"]] = event["pid"]
            if self._stops:  # it was not there yet when the others were told
                self._backend.signal_workers(signal.SIGTERM, (event["worker"],))
        elif kind == "batch":
            self.report.batches.append({k: event[k] for k in ("step", "total", "reason")})
        elif kind == "training" and "rounds" in event:
            if self._samples.go_back(event["generation"], event["rounds"]):
                self.report.batches = [b for b in self.report.batches if b["step"] <= event["step"]]
        elif kind == "samples":
            self._samples.add(event)
        elif kind == "prepared":
            self.report.reduction = event["reduction"] or self.report.reduction
        elif kind == "epoch":
            self.report.epochs = max(self.report.epochs, event["epoch"] + 1)
        if kind in ("step", "finished", "checkpoint"):
            self.report.steps = max(self.report.steps, event["step"])
        self._book.note(event)

    def _tell_times(self, at_the_end: bool = False) -> None:
        for row in self._book.timed(at_the_end):
            self._tell({"event": "generation_timed", **row.to_json()})

    def _tell(self, event: Mapping[str, object]) -> None:
        self._listener({"time": round(time.time(), 3), **event})


def parse_changes(text: str) -> tuple[Change, ...]:
    """`"40=4,80=2"`: from step 40 on 4 workers, from step 80 on 2."""
    changes: list[Change] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        step, _, workers = part.partition("=")
        try:
            change = Change(int(step), int(workers))
        except ValueError:
            raise UsageError(f'--resize {text!r}: {part!r} is not STEP=WORKERS; try --resize "40=4,80=2"') from None
        if change.step < 1 or change.workers < 1:
            raise UsageError(f"--resize {text!r}: {part!r} needs a step and a number of workers of 1 or more")
        if changes and change.step <= changes[-1].step:
            raise UsageError(f"--resize {text!r}: steps must increase, {part!r} does not")
        changes.append(change)
    return tuple(changes)


def run(
    settings: RunSettings,
    listener: Listener = lambda event: None,
    backend: WorkerBackend | None = None,
    seating: Seating = lambda worker: Seat(),
) -> Report:
    """Runs a job to its end; raises JobFailed if it does not end well."""
    with Run(settings, listener, backend, seating) as job:
        report = job.to_end()
        if report.exit:
            raise JobFailed(report.error, report.exit)
        return report


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
