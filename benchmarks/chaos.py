"""Kills, freezes and cuts at random moments and at every named phase of a change; then all bits and samples compared.

    python -m benchmarks.chaos [--faults 300] [--seed 1] [--at-once 1] [--json FILE]
    python -m benchmarks.chaos --table FILE     what --json has written, into docs/results/chaos.md

A job (`chaos_job.py`: dropout, BatchNorm, augmentation, clipping, AdamW, a scheduler) trains on 1 to 4 workers while
faults are thrown at it: workers and masters are killed, frozen for longer than the limit of silence, or have their
connection cut. Sizes are changed and workers moved meanwhile, so that there are changes to disturb. Each run must end
within a limit, with the digest of an undisturbed run and every sample trained once. Same seed, same faults; when they
strike depends on the machine. A run waits most of its time, so that a machine with many cores can have several
side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks import chaos_table
from concertina.backends.local import LocalBackend
from concertina.core.errors import ConcertinaError
from concertina.core.messages import MASTER
from concertina.master.service import state_key
from concertina.report import Report
from concertina.runner import Run, RunSettings
from concertina.store import open_store

HERE = Path(__file__).parent
VIRTUAL, STEPS, SILENCE_S, ARRIVE_S, LIMIT_S = 4, 120, 2.0, 30.0, 300.0
GRACE_S = 60.0  # for a run to start and to end
PER_RUN = 8  # faults, at most
PATIENCE_S = 0.7  # if the chosen phase does not come, another will do
PHASES = ("change_begun", "joined", "ready", "following", "synced", "changed_over", "recovering", "step")
FAULTS = (
    "kill worker",
    "kill worker",
    "kill worker",
    "kill two",
    "kill newest",
    "kill master",
    "freeze worker",
    "cut links",
)


@dataclass
class Outcome:
    """One run under fire."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    seconds: float = 0.0
    digest: str = ""
    exit: int = 0
    problem: str = ""


class Fire:
    """Throws faults at one run."""

    def __init__(self, seed: int, outcome: Outcome, most: int, story: TextIO) -> None:
        """`story`: of events and faults, for runs that fail."""
        self._random = random.Random(seed)
        self._outcome = outcome
        self._left = most
        self._story = story
        self._job: Run | None = None
        self._backend: LocalBackend | None = None
        self._wanted = self._next_phase()
        self._asked_at = 0.0
        self._quiet_until = 0.0

    def aim(self, job: Run, backend: LocalBackend) -> None:
        self._job, self._backend = job, backend

    def _next_phase(self) -> str:
        return self._random.choice(PHASES)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """The run's listener: strikes right when a worker reports the phase that was chosen."""
        now = time.monotonic()
        if event["event"] != "log":
            self._story.write(json.dumps({"at": now, **event}) + "\n")
        if self._job is None or self._left <= 0 or now < self._quiet_until:
            return
        if now - self._asked_at > 1.0:  # something to disturb
            self._asked_at = now
            if self._random.random() < 0.7:
                self._job.resize(self._random.randint(1, VIRTUAL))
            elif self._job.workers:
                self._job.remove([self._random.choice(sorted(self._job.workers))], replaced=True)
        phase = str(event["event"])
        if phase == self._wanted or (phase in PHASES and now - self._quiet_until > PATIENCE_S):
            self._strike(f"{self._random.choice(FAULTS)} at {phase}")
            self._wanted = self._next_phase()
            self._quiet_until = now + self._random.uniform(0.05, 0.8)

    def _strike(self, what: str) -> None:
        assert self._job is not None
        workers = sorted(self._job.workers)
        kind = what.split(" at ")[0]
        struck = False
        if kind == "kill master":
            struck = self._signal(MASTER, signal.SIGKILL)
        elif kind == "cut links":
            struck = self._cut()
        elif workers:
            victims = self._random.sample(workers, min(len(workers), 2 if kind == "kill two" else 1))
            if kind == "kill newest":
                victims = workers[-1:]
            number = signal.SIGSTOP if kind == "freeze worker" else signal.SIGKILL
            struck = sum(self._signal(victim, number) for victim in victims) > 0
        if struck:
            self._left -= 1
            self._outcome.faults[what] += 1
            self._story.write(json.dumps({"at": time.monotonic(), "fault": what, "of": workers}) + "\n")

    def _signal(self, worker: int, number: signal.Signals) -> bool:
        assert self._backend is not None
        pid = self._backend.pid_of(worker)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _cut(self) -> bool:
        """Ends the master's connections as a broken network would; both ends find out for themselves."""
        assert self._backend is not None
        pid = self._backend.pid_of(MASTER)
        if pid is None or shutil.which("ss") is None:
            return False
        listing = subprocess.run(["ss", "-tnpH", "state", "established"], capture_output=True, text=True, timeout=5)
        lines = [line for line in listing.stdout.splitlines() if f"pid={pid}," in line]
        cut = False
        for line in lines:
            local, peer = line.split()[2:4]
            command = ["ss", "-K", "-tnH", "src", local, "dst", peer]
            done = subprocess.run(command, capture_output=True, text=True, timeout=5)
            cut = cut or bool(done.stdout.strip())
        return cut


def run_once(backend: LocalBackend, folder: Path, seed: int, faults: int, stop: threading.Event) -> Outcome:
    """One job under `faults` faults; 0 of them gives what the others are compared with. `stop` ends it early."""
    outcome = Outcome(seed)
    out = folder / f"run-{seed}"
    out.mkdir()
    chance = random.Random(seed)
    settings = RunSettings(
        script=HERE / "chaos_job.py",
        args=[str(out / "digest"), "--pause", "0.01", "--loaders", str(chance.choice((0, 0, 1)))],
        virtual=VIRTUAL,
        workers=chance.randint(1, VIRTUAL) if faults else 1,
        steps=STEPS,
        checkpoint_dir=out / "checkpoints",
        checkpoint_every=25,
        silence_s=SILENCE_S,
        arrive_s=ARRIVE_S,
        run_dir=out / "run",
    )
    began = time.monotonic()
    with ExitStack() as stack:
        fire = Fire(seed, outcome, faults, stack.enter_context((out / "events.jsonl").open("w", buffering=1)))
        job = stack.enter_context(Run(settings, fire, backend))
        fire.aim(job, backend)
        try:
            while not job.turn():
                if stop.is_set():
                    outcome.problem = "stopped"
                    return outcome
                if time.monotonic() - began > LIMIT_S:
                    outcome.problem = f"not over after {LIMIT_S:.0f} s, at step {job.report.steps}"
                    _look_into(job, backend, out)
                    return outcome
        except ConcertinaError as error:
            outcome.problem = f"{type(error).__name__} at step {job.report.steps}: {error}"
            return outcome
        report = job.close_report()
    outcome.seconds = time.monotonic() - began
    outcome.generations = len(report.generations)
    outcome.exit = report.exit
    outcome.digest = (out / "digest").read_text() if (out / "digest").exists() else ""
    outcome.problem = problem_of(report, outcome)
    return outcome


def _look_into(job: Run, backend: LocalBackend, out: Path) -> None:
    """Of a run that hangs: where its workers are, into their logs, and what its master knows."""
    for worker in job.workers:
        pid = backend.pid_of(worker)
        if pid is not None:
            os.kill(pid, signal.SIGUSR2)
    with open_store(job.master.store) as store:
        found = store.get(state_key(job.master.job))
    if found is not None:
        (out / "master.json").write_bytes(found.value)
    time.sleep(1.0)  # for them to write


def problem_of(report: Report, outcome: Outcome) -> str:
    if report.exit:
        return f"exit {report.exit}: {report.error}"
    if not outcome.digest:
        return "no result was written"
    doubled = [row for row in report.samples if row["duplicated"]]
    missed = [row for row in report.samples[:-1] if row["missed"]]  # the last epoch is cut off by --steps
    return f"samples doubled {doubled} or missed {missed}" if doubled or missed else ""


class Range:
    """Where runs happen, so many side by side, each with a backend that is its own for as long as it lasts."""

    def __init__(self, folder: Path, at_once: int) -> None:
        self.folder, self.at_once = folder, at_once
        self._stop = threading.Event()
        self._free: queue.SimpleQueue[tuple[LocalBackend, Path]] = queue.SimpleQueue()
        self._ends = ExitStack()

    def __enter__(self) -> Range:
        with ExitStack() as opened:
            for number in range(self.at_once):
                logs = self.folder / f"logs-{number}"
                backend = LocalBackend.open(logs, 1)
                opened.callback(backend.close)
                self._free.put((backend, logs))
            self._threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="chaos")
            opened.callback(self._threads.shutdown, cancel_futures=True)
            opened.callback(self._stop.set)
            self._ends = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """First all runs are told to stop, then awaited, then the backends are closed."""
        self._ends.close()

    def start(self, seed: int, faults: int, wanted: str = "") -> Future[Outcome]:
        """One run; its digest has to be the one wanted, if one is."""
        return self._threads.submit(self._one, seed, faults, wanted)

    def _one(self, seed: int, faults: int, wanted: str) -> Outcome:
        backend, logs = self._free.get_nowait()  # there are as many as threads
        try:
            outcome = run_once(backend, self.folder, seed, faults, self._stop)
        finally:
            self._free.put((backend, logs))
        run = self.folder / f"run-{seed}"
        if wanted and not outcome.problem and outcome.digest != wanted:
            outcome.problem = "another digest than without faults"
        if not outcome.problem:
            shutil.rmtree(run)
        elif not self._stop.is_set():
            kept = Path(tempfile.mkdtemp(prefix="concertina-chaos-kept-"))
            shutil.copytree(run, kept / "run")
            shutil.copytree(logs, kept / "logs")
            outcome.problem += f"; logs kept in {kept}"
        return outcome


def variant_of(seed: int) -> int:
    """Data-loading processes of the job; they change its result."""
    return random.Random(seed).choice((0, 0, 1))


def chaos(faults: int, seed: int, to: Path | None = None, at_once: int = 1) -> int:
    """0 if nothing was found; all that was seen goes to the file."""
    found: dict[str, Any] = {"at_once": at_once, "cores": os.cpu_count(), "load": os.getloadavg()[0], "runs": []}
    struck, bad = 0, False
    with tempfile.TemporaryDirectory(prefix="concertina-chaos-") as name, Range(Path(name), at_once) as place:
        wanted = _undisturbed(place)
        running: set[Future[Outcome]] = set()
        while not bad:
            while len(running) < at_once and struck + PER_RUN * len(running) < faults:
                running.add(place.start(seed, PER_RUN, wanted[variant_of(seed)]))
                seed += 1
            if not running:
                break
            done, running = wait(running, LIMIT_S + GRACE_S, FIRST_COMPLETED)
            for outcome in [future.result() for future in done]:
                struck += sum(outcome.faults.values())
                bad = bad or bool(outcome.problem)
                found["runs"].append({**vars(outcome), "faults": dict(outcome.faults)})
                print(
                    f"{struck} of {faults} faults; seed {outcome.seed}: {sum(outcome.faults.values())} faults, "
                    f"{outcome.generations} generations, {outcome.seconds:.0f} s, "
                    f"{outcome.problem or 'same bits, every sample once'}",
                    flush=True,
                )
            if not done:
                bad = True
                print(f"no run has ended for {LIMIT_S + GRACE_S:.0f} s", flush=True)
    if to is not None:
        to.write_text(json.dumps(found, indent=1))
    print(chaos_table.table(found))
    return 1 if bad else 0


def _undisturbed(place: Range) -> dict[int, str]:
    """The digest without faults, of each variant of the job."""
    seeds = {variant_of(seed): seed for seed in range(-64, 0)}
    started = {variant: place.start(seed, 0) for variant, seed in seeds.items()}
    outcomes = {variant: future.result(2 * LIMIT_S + GRACE_S) for variant, future in started.items()}
    for outcome in outcomes.values():
        if outcome.problem:
            raise SystemExit(f"the job fails without faults, too: {outcome.problem}")
    return {variant: outcome.digest for variant, outcome in outcomes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="runs side by side; each has up to 6 processes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was seen")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="run nothing: such a FILE into docs/results/chaos.md"
    )
    args = parser.parse_args()
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: needs 1 at least")
    if args.table:
        chaos_table.write(args.table)
        return 0
    try:
        return chaos(args.faults, args.seed, args.json, args.at_once)
    except KeyboardInterrupt:
        print("stopped; all processes have been ended", flush=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
