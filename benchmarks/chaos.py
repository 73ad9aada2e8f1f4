"""Kills, freezes and cuts at random moments and at every named phase of a change; then all bits and samples compared.

    python -m benchmarks.chaos [--faults 300] [--seed 1] [--json FILE]

A job (`chaos_job.py`: dropout, BatchNorm, augmentation, clipping, AdamW, a scheduler) trains on 1 to 4 workers while
faults are thrown at it: workers and masters are killed, frozen for longer than the limit of silence, or have their
connection cut. Sizes are changed and workers moved meanwhile, so that there are changes to disturb. Each run must end
within a limit, with the digest of an undisturbed run and every sample trained once. Same seed, same faults; when they
strike depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.backends.local import LocalBackend
from concertina.core.messages import MASTER
from concertina.report import Report
from concertina.runner import Run, RunSettings

HERE = Path(__file__).parent
VIRTUAL, STEPS, SILENCE_S, ARRIVE_S, LIMIT_S = 4, 120, 2.0, 30.0, 300.0
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

    def __init__(self, seed: int, outcome: Outcome, most: int) -> None:
        self._random = random.Random(seed)
        self._outcome = outcome
        self._left = most
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


def run_once(backend: LocalBackend, folder: Path, seed: int, faults: int) -> Outcome:
    """One job under `faults` faults; 0 of them gives what the others are compared with."""
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
    fire = Fire(seed, outcome, faults)
    began = time.monotonic()
    with Run(settings, fire, backend) as job:
        fire.aim(job, backend)
        while not job.turn():
            if time.monotonic() - began > LIMIT_S:
                outcome.problem = f"not over after {LIMIT_S:.0f} s, at step {job.report.steps}"
                return outcome
        report = job.close_report()
    outcome.seconds = time.monotonic() - began
    outcome.generations = len(report.generations)
    outcome.exit = report.exit
    outcome.digest = (out / "digest").read_text() if (out / "digest").exists() else ""
    outcome.problem = problem_of(report, outcome)
    if not outcome.problem:
        shutil.rmtree(out)
    return outcome


def problem_of(report: Report, outcome: Outcome) -> str:
    if report.exit:
        return f"exit {report.exit}: {report.error}"
    if not outcome.digest:
        return "no result was written"
    doubled = [row for row in report.samples if row["duplicated"]]
    missed = [row for row in report.samples[:-1] if row["missed"]]  # the last epoch is cut off by --steps
    return f"samples doubled {doubled} or missed {missed}" if doubled or missed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return chaos(args.faults, args.seed, args.json)


def chaos(faults: int, seed: int, to: Path | None = None) -> int:
    struck: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="concertina-chaos-") as name:
        folder = Path(name)
        backend = LocalBackend.open(folder / "logs", 1)
        try:
            wanted = {}
            for loaders_seed in range(-64, 0):  # one undisturbed run per variant of the job
                variant = random.Random(loaders_seed).choice((0, 0, 1))
                if variant not in wanted:
                    wanted[variant] = run_once(backend, folder, loaders_seed, 0).digest
            while sum(struck.values()) < faults:
                outcome = run_once(backend, folder, seed, 8)
                if not outcome.problem and outcome.digest != wanted[random.Random(seed).choice((0, 0, 1))]:
                    outcome.problem = "another digest than without faults"
                struck += outcome.faults
                rows.append({"seed": seed, **dict(outcome.faults), "generations": outcome.generations})
                print(
                    f"seed {seed}: {sum(outcome.faults.values())} faults, {outcome.generations} generations, "
                    f"{outcome.seconds:.0f} s {outcome.problem or 'same bits, every sample once'}",
                    flush=True,
                )
                if outcome.problem:
                    kept = Path(tempfile.mkdtemp(prefix="concertina-chaos-kept-"))
                    shutil.copytree(folder / f"run-{seed}", kept / "run", dirs_exist_ok=True)
                    print(f"logs kept in {kept}", flush=True)
                    return 1
                seed += 1
        finally:
            backend.close()
    kinds = Counter(dict.fromkeys(sorted({what.split(" at ")[0] for what in struck}), 0))
    phases: Counter[str] = Counter()
    for what, count in struck.items():
        kind, _, phase = what.partition(" at ")
        kinds[kind] += count
        phases[phase] += count
    print(f"{sum(struck.values())} faults in {len(rows)} runs: no hang, no differing bit, no sample lost or doubled")
    print("by kind:", dict(kinds))
    print("by phase:", dict(phases))
    if to is not None:
        to.write_text(json.dumps({"runs": rows, "kinds": kinds, "phases": phases}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
