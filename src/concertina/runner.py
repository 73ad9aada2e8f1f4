"""One job on this machine, from start to end: `concertina run` without its command line.

Wires the pure machine (`master/machine.py`) to processes (`backends/local.py`) and keeps the books: the report, the
event stream, the samples.
"""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from concertina.backends.local import LocalBackend
from concertina.core.checkpoints import check_whole
from concertina.core.env import WorkerEnv
from concertina.core.errors import JobFailed, UsageError
from concertina.master import machine
from concertina.master.machine import Change, Phase

STOP_SECONDS = 30.0  # a stopping worker may take this long to reach a step boundary and write its checkpoint
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What `concertina run` was asked to do, checked."""

    script: Path
    args: Sequence[str] = ()
    virtual: int = 1
    workers: int = 1
    steps: int = 0
    changes: tuple[Change, ...] = ()
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    resume: Path | None = None  # a whole checkpoint
    threads: int = 1
    level: str = "D1"
    reduction: str = "auto"
    record_dir: Path | None = None
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        check_script(self.script)
        WorkerEnv(virtual=self.virtual, workers=self.workers, level=self.level)
        for change in self.changes:
            if not 1 <= change.workers <= self.virtual:
                raise UsageError(
                    f"--resize {change.step}={change.workers}: needs 1 to {self.virtual} workers "
                    f"(the number of virtual workers)"
                )
        if self.steps < 0 or self.threads < 0 or self.checkpoint_every < 0:
            raise UsageError("--steps, --threads and --checkpoint-every take numbers from 0 up")
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise UsageError("--checkpoint-every needs --checkpoint DIR")


def check_script(script: Path) -> None:
    if not script.is_file():
        raise UsageError(f"{script} is not a file: give the path of a training script")
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script} is not a Python script: {error}") from None


@dataclass(slots=True)
class Generation:
    """One row of the report."""

    generation: int
    step: int
    workers: int
    reason: str
    started: float
    stop_s: float = 0.0  # between the last step before and the first step of this generation
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What `--report` writes."""

    virtual: int
    scaling: str = "consistent"
    steps: int = 0
    epochs: int = 0
    reduction: str = ""
    generations: list[Generation] = field(default_factory=list)
    samples: list[dict[str, int]] = field(default_factory=list)
    exit: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "generation": g.generation,
                "step": g.step,
                "workers": g.workers,
                "reason": g.reason,
                "stop_s": round(g.stop_s, 4),
                "phases": {name: round(seconds, 4) for name, seconds in g.phases.items()},
            }
            for g in self.generations
        ]
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "virtual": self.virtual,
            "scaling": self.scaling,
            "reduction": self.reduction,
            "generations": rows,
            "samples": self.samples,
            "exit": self.exit,
            "error": self.error,
        }


class SampleBook:
    """Counts which batches of which virtual worker were trained on, so that none is missed or done twice."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}  # (loader, epoch, virtual) -> spans
        self._expected: dict[tuple[int, int, int], tuple[int, int]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        key = (event["loader"], event["epoch"], event["virtual"])
        self._seen.setdefault(key, []).append((event["first"], event["end"], event["seen"]))
        self._expected[key] = (event["batches"], event["expected"])

    def rows(self) -> list[dict[str, int]]:
        """One row per loader and epoch. A span that overlaps another counts its overlap as duplicated."""
        rows: dict[tuple[int, int], dict[str, int]] = {}
        for (loader, epoch, virtual), spans in sorted(self._seen.items()):
            batches, expected = self._expected[loader, epoch, virtual]
            per_batch = expected / max(1, batches)
            row = rows.setdefault(
                (epoch, loader),
                {"epoch": epoch, "loader": loader, "expected": 0, "seen": 0, "duplicated": 0, "missed": 0},
            )
            row["expected"] += expected
            row["seen"] += sum(seen for _, _, seen in spans)
            covered = [0] * batches
            for first, end, _ in spans:
                for b in range(first, end):
                    covered[b] += 1
            row["duplicated"] += round(sum(n - 1 for n in covered if n > 1) * per_batch)
            row["missed"] += round(sum(1 for n in covered if n == 0) * per_batch)
        return [rows[key] for key in sorted(rows)]


Listener = Callable[[Mapping[str, object]], None]


class Run:
    """Carries out what the machine commands until the job is over. Use as a context manager."""

    def __init__(
        self,
        settings: RunSettings,
        listener: Listener = lambda event: None,
        backend: LocalBackend | None = None,
    ) -> None:
        """`backend` lets several runs share one nursery; otherwise the run has its own."""
        self.settings = settings
        self.report = Report(virtual=settings.virtual)
        self._listener = listener
        self._own_dir = settings.run_dir is None
        self.run_dir = settings.run_dir or Path(tempfile.mkdtemp(prefix="concertina-run-"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # Fresh for every run: a rendezvous that was used before would lead to addresses of the past.
        self._private_dir = Path(tempfile.mkdtemp(prefix=".generations-", dir=self.run_dir))
        self._log_dir = self.run_dir / "logs"
        self._log_dir.mkdir(exist_ok=True)
        self._own_backend = backend is None
        self._backend = backend or LocalBackend.open(self._log_dir, settings.threads)
        self.on_idle: Callable[[], None] = lambda: None  # called several times a second
        self._samples = SampleBook()
        self._resume = settings.resume
        self._last_step_at = 0.0
        self._kill_at: float | None = None
        self._asked_to_stop = False
        self._state: machine.State | None = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._own_backend:
            self._backend.close()
        else:
            self._backend.end_workers()
        shutil.rmtree(self._private_dir, ignore_errors=True)
        if self._own_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def log_path(self, generation: int, worker: int) -> Path:
        return self._log_dir / f"generation-{generation}-worker-{worker}.log"

    def interrupt(self) -> None:
        """From a signal handler: stop at the next step boundary; asked a second time, at once."""
        self._asked_to_stop = True

    def to_end(self) -> Report:
        at_step = self.report.steps = check_whole(self._resume).step if self._resume else 0
        state, commands = machine.start(self.settings.workers, self.settings.changes, at_step)
        while True:
            for command in commands:
                self._carry_out(command)
            commands = ()
            if state.phase not in (Phase.TRAINING, Phase.STOPPING):
                break
            for event in self._next_events():
                state, more = machine.handle(state, event)
                commands += more
        return self._close(state)

    def _close(self, state: machine.State) -> Report:
        report = self.report
        report.samples = self._samples.rows()
        report.exit, report.error = state.exit_code, state.failure
        if state.phase is Phase.INTERRUPTED:
            report.exit, report.error = machine.EXIT_INTERRUPTED_BY_USER, "interrupted"
        self._tell({"event": "job_ended", "exit": report.exit, "error": report.error, "step": report.steps})
        return report

    # -- commands ------------------------------------------------------------------------------------------------

    def _carry_out(self, command: machine.Command) -> None:
        if isinstance(command, machine.StartGeneration):
            self._start_generation(command)
        elif isinstance(command, machine.AskToStop):
            self._backend.signal_workers(signal.SIGTERM)
            self._kill_at = time.monotonic() + STOP_SECONDS
        else:
            self._backend.signal_workers(signal.SIGKILL)

    def _start_generation(self, command: machine.StartGeneration) -> None:
        s = self.settings
        row = Generation(command.generation, self.report.steps, command.workers, command.reason, time.monotonic())
        self.report.generations.append(row)
        self._tell(
            {
                "event": "generation_started",
                "generation": command.generation,
                "workers": command.workers,
                "step": self.report.steps,
                "reason": command.reason,
            }
        )
        handover = self._private_dir / f"handover-{command.generation}"
        for worker in range(command.workers):
            env = WorkerEnv(
                virtual=s.virtual,
                workers=command.workers,
                worker=worker,
                generation=command.generation,
                launched=True,
                run_dir=str(self._private_dir),
                resume=str(self._resume.resolve()) if self._resume else "",
                stop_at=command.stop_at,
                steps=s.steps,
                handover_dir=str(handover),
                checkpoint_dir=str(s.checkpoint_dir.resolve()) if s.checkpoint_dir else "",
                checkpoint_every=s.checkpoint_every,
                threads=s.threads,
                level=s.level,
                reduction=s.reduction,
                record_dir=str(s.record_dir.resolve()) if s.record_dir else "",
            ).to_environ()
            del env["CONCERTINA_EVENTS_FD"]  # the nursery's own pipe
            log = self.log_path(command.generation, worker)
            self._backend.start_worker(command.generation, worker, s.script.resolve(), s.args, env, log)
        self._resume = handover

    # -- events --------------------------------------------------------------------------------------------------

    def _next_events(self) -> list[machine.Event]:
        found: list[machine.Event] = []
        if self._asked_to_stop:
            self._asked_to_stop = False
            found.append(machine.InterruptAsked())
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            found.append(machine.InterruptAsked())  # asked long enough
            self._kill_at = None
        self.on_idle()
        for event in self._backend.events(POLL_SECONDS):
            self._note(event)
            self._tell(event)
            translated = _translate(event)
            if translated is not None:
                found.append(translated)
        return found

    def _note(self, event: Mapping[str, Any]) -> None:
        kind, now = event["event"], time.monotonic()
        rows = self.report.generations
        if kind == "samples":
            self._samples.add(event)
        elif kind == "step":
            self._note_step(event, now)
        elif kind == "prepared":
            self.report.reduction = event["reduction"]
        elif kind == "epoch" and event["worker"] == 0:
            self.report.epochs = max(self.report.epochs, event["epoch"] + 1)
        elif kind in ("finished", "checkpoint") and event["worker"] == 0:
            self.report.steps = max(self.report.steps, event["step"])
        if kind in ("joined", "prepared", "training") and rows and event["generation"] == rows[-1].generation:
            rows[-1].phases[kind] = now - rows[-1].started

    def _note_step(self, event: Mapping[str, Any], now: float) -> None:
        self.report.steps = max(self.report.steps, event["step"])
        row = self.report.generations[-1]
        if "first step" not in row.phases and event["generation"] == row.generation:
            row.phases["first step"] = now - row.started
            row.stop_s = now - self._last_step_at if self._last_step_at else 0.0
        self._last_step_at = now

    def _tell(self, event: Mapping[str, object]) -> None:
        self._listener({"time": round(time.time(), 3), **event})


def _translate(event: Mapping[str, Any]) -> machine.Event | None:
    if event["event"] == "worker_exited":
        return machine.WorkerExited(event["worker"], event["generation"], event["code"])
    if event["event"] == "failed":
        return machine.WorkerFailed(event["worker"], event["generation"], event["error"])
    return None


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


def run(settings: RunSettings, listener: Listener = lambda event: None, backend: LocalBackend | None = None) -> Report:
    """Runs a job to its end; raises JobFailed if it does not end well."""
    with Run(settings, listener, backend) as job:
        report = job.to_end()
        if report.exit:
            raise JobFailed(report.error, report.exit)
        return report


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
