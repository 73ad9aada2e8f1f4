"""Which runs to make, and the verdict over what they left."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from concertina.core.errors import JobFailed, UsageError
from concertina.report import Report
from concertina.runner import Listener, RunSettings, parse_changes
from concertina.verify.causes import Case, Cause, diagnose
from concertina.verify.compare import (
    Difference,
    Stage,
    first_difference,
    logged_differences,
    replica_difference,
    unused_random_differences,
)
from concertina.verify.places import GENERATOR_NAMES
from concertina.verify.records import RunRecord, read_run
from concertina.verify.suspects import find_suspects


class Launch(Protocol):
    """Runs a job to its end. `fresh`: in processes that share nothing with earlier runs, not even an import."""

    def __call__(self, settings: RunSettings, listener: Listener, fresh: bool) -> Report: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """What `concertina verify` was asked to do, checked."""

    script: Path
    args: Sequence[str] = ()
    virtual: int = 4
    steps: int = 12
    workers: tuple[int, ...] = ()  # empty: 1, 2 and P
    changes: str | None = None  # "STEP=N,STEP=N"; None: chosen from P and steps; "": no such run
    ignore: frozenset[str] = frozenset()  # logged values that may differ
    threads: int = 1
    level: str = "D1"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps}: needs 1 step or more to compare")
        for run in self.planned():
            run.settings(self, Path())

    def planned(self) -> tuple["PlannedRun", ...]:
        """All runs of the experiment, the one that the others are compared with first."""
        counts = self.workers or tuple(sorted({1, min(2, self.virtual), self.virtual}))
        fixed = [PlannedRun(name=_count(n), workers=n) for n in dict.fromkeys(counts)]
        again = replace(fixed[0], name=f"{fixed[0].name} again", fresh=True)
        plan = self.changes
        if plan is None:
            plan = default_changes(self.virtual, self.steps)
        runs = [fixed[0], again, *fixed[1:]]
        if plan:
            with _own_option_names():
                runs.append(PlannedRun(name=_path(counts[0], plan), workers=counts[0], changes=plan))
        return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    name: str
    workers: int
    changes: str = ""
    fresh: bool = False

    def settings(self, asked: VerifySettings, folder: Path) -> RunSettings:
        with _own_option_names():
            return RunSettings(
                script=asked.script,
                args=asked.args,
                virtual=asked.virtual,
                workers=self.workers,
                steps=asked.steps,
                changes=parse_changes(self.changes),
                threads=asked.threads,
                level=asked.level,
                record_dir=folder,
            )


@contextmanager
def _own_option_names() -> Iterator[None]:
    """What is --resize elsewhere is --changes here."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--resize", "--changes")) from None


def default_changes(virtual: int, steps: int) -> str:
    """1 -> P -> 2 -> 3 workers, spread evenly; with one virtual worker, a restart in the middle."""
    targets = [virtual, min(2, virtual), min(3, virtual)] if virtual > 1 else [1]
    at = [steps * (k + 1) // (len(targets) + 1) for k in range(len(targets))]
    return ",".join(f"{step}={n}" for step, n in dict(zip(at, targets, strict=True)).items() if step >= 1)


def parse_workers(text: str) -> tuple[int, ...]:
    """`"1,2,4"`."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f'--workers {text!r}: give numbers of workers, like "1,2,4"') from None
    if text.strip() and not counts:
        raise UsageError(f'--workers {text!r}: give numbers of workers, like "1,2,4"')
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to "is this script bitwise elastic?"."""

    settings: VerifySettings
    runs: tuple[RunRecord, ...]
    difference: Difference | None = None
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def elastic(self) -> bool:
        return self.difference is None


Progress = Callable[[str, int, int], None]  # (what is being done, steps done so far, steps in all)


@dataclass(slots=True)
class Experiment:
    """Makes the runs one after another and stops as soon as it knows enough."""

    settings: VerifySettings
    launch: Launch
    folder: Path
    progress: Progress = lambda what, done, total: None
    records: list[RunRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _done: int = 0
    _planned: int = 0
    _exit_code: int = 1  # of the last run that failed

    def verdict(self) -> Verdict:
        began = time.monotonic()
        plan = self.settings.planned()
        self._planned = len(plan)
        first = self._make(plan[0])
        if first.failure and first.failure_kind != "DivergenceError":
            raise JobFailed(f"with {first.name} the script fails: {first.failure}", self._exit_code)
        if not first.turns:
            raise UsageError(
                f"{self.settings.script} ran to its end without a single loop body over session.loader(...): there is "
                "nothing to compare"
            )
        found = self._compare_all(first, plan)
        difference, cause = found if found is not None else (None, None)
        if first.steps < self.settings.steps and difference is None:
            self.notes.append(f"the script ended after {first.steps} steps, so only those were compared")
        return Verdict(
            settings=self.settings,
            runs=tuple(self.records),
            difference=difference,
            cause=cause,
            notes=tuple(self.notes),
            seconds=time.monotonic() - began,
        )

    def _compare_all(self, first: RunRecord, plan: Sequence[PlannedRun]) -> tuple[Difference, Cause] | None:
        again = self._make(plan[1])
        chance = self._chance_in_log(first, again)
        difference = first_difference(first, again, self.settings.ignore | chance)
        if difference is not None:
            return difference, self._diagnose(difference, repeatable=False)
        differences = [(d, plan[0]) for d in (replica_difference(first),) if d is not None]
        for planned in plan[2:]:
            run = self._make(planned)
            found = (first_difference(first, run, self.settings.ignore | chance), replica_difference(run))
            differences += [(d, planned) for d in found if d is not None]
        if not differences:
            self._note_random(first)
            return None
        difference, planned = min(differences, key=lambda pair: pair[0].order)
        if planned is plan[0]:
            return difference, self._diagnose(difference, repeatable=True)
        return self._confirm(difference, planned)

    def _chance_in_log(self, first: RunRecord, again: RunRecord) -> frozenset[str]:
        """Logged values that differ between equal runs where nothing else does: times, most likely."""
        names = frozenset(logged_differences(first, again)) - self.settings.ignore
        if not names or first_difference(first, again, names | self.settings.ignore) is not None:
            return frozenset()
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        self.notes.append(f"logged {listed} differs between two equal runs while all else agrees; it was left out")
        return names

    def _confirm(self, difference: Difference, planned: PlannedRun) -> tuple[Difference, Cause]:
        """Makes the run that differs once more: chance may come in at several workers only."""
        self._planned += 1
        twin = self._make(replace(planned, name=f"{planned.name} again", fresh=True))
        one = next(run for run in self.records if run.name == planned.name)
        parted = first_difference(one, twin, self.settings.ignore)
        if parted is not None and parted.stage is not Stage.FAILED and parted.order <= difference.order:
            return parted, self._diagnose(parted, repeatable=False)
        return difference, self._diagnose(difference, repeatable=True)

    def _diagnose(self, difference: Difference, repeatable: bool) -> Cause:
        suspects = find_suspects(self.settings.script)
        return diagnose(Case(difference=difference, runs=self.records, repeatable=repeatable, suspects=suspects))

    def _note_random(self, first: RunRecord) -> None:
        names = sorted({name for run in self.records[1:] for name in unused_random_differences(first, run)})
        if names:
            listed = ", ".join(GENERATOR_NAMES[name] for name in names)
            self.notes.append(
                f"{listed}: drawn from, and not in the same state in all runs. No result depended on it "
                "within these steps; session.seed(n) would make it safe"
            )

    def _make(self, planned: PlannedRun) -> RunRecord:
        folder = self.folder / f"run-{len(self.records)}"
        failed: dict[str, str] = {}
        total = self._planned * self.settings.steps
        done_before = self._done * self.settings.steps

        def listener(event: Mapping[str, Any]) -> None:
            if event["event"] == "failed":
                failed.setdefault("kind", str(event.get("kind", "")))
            if event["event"] == "step":
                self.progress(planned.name, done_before + int(event["step"]), total)

        self.progress(planned.name, done_before, total)
        failure = ""
        try:
            self.launch(planned.settings(self.settings, folder), listener, planned.fresh)
        except JobFailed as error:
            failure, self._exit_code = str(error), error.exit_code
        self._done += 1
        self.progress(planned.name, self._done * self.settings.steps, total)
        record = read_run(folder, planned.name, failure, failed.get("kind", ""))
        self.records.append(record)
        return record


def _count(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _path(first: int, changes: str) -> str:
    return " -> ".join([str(first), *(str(change.workers) for change in parse_changes(changes))]) + " workers"
