"""How fast a job runs on how many workers, measured in one running job; and the largest batch a device takes.

`Sweep` and `largest_batch` decide and know no clock or process; `measure_curve` and `measure_batch` run jobs for them.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from concertina.core.errors import ConcertinaError, JobFailed, UsageError
from concertina.master.machine import EXIT_INTERRUPTED_BY_USER
from concertina.report import Report
from concertina.runner import Listener, Run, RunSettings

PATIENCE_S = 600.0  # that nothing may be heard of the job
PACED, TRY_BATCH = (Path(__file__).parent / "runtime" / name for name in ("paced.py", "try_batch.py"))
TRY_STEPS = 3  # the first allocates what the optimizer keeps, the second has DDP's final buckets
MOST_TRIES = 40
MOST_REFUSALS = 3  # as often as the master itself tries


def powers_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    counts = []
    count = 1
    while count < most:
        counts.append(count)
        count *= 2
    return (*counts, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured, checked."""

    workers: tuple[int, ...]  # in this order
    warm: int = 5  # steps to leave out after a change
    measured: int = 20  # steps to measure

    def __post_init__(self) -> None:
        if not self.workers or min(self.workers) < 1:
            raise UsageError(f"worker counts {list(self.workers)}: give numbers from 1 up, like 1,2,4")
        if any(a == b for a, b in pairwise(self.workers)):
            raise UsageError(f"worker counts {list(self.workers)}: the same number twice in a row measures nothing new")
        if self.measured < 1 or self.warm < 0:
            raise UsageError(
                f"--measure {self.measured} --warm {self.warm}: needs 1 step or more to measure, 0 or more to warm up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of workers. Seconds per step."""

    workers: int
    steps: int
    mean_s: float
    median_s: float
    slowest_s: float


class Sweep:
    """Goes through the worker counts of a plan: events of the job in, the number to ask for next out."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ends: dict[int, float] = {}  # step -> when it was done
        self._since: int | None = None  # the step after which the present number of workers trains
        self.points: list[Point] = []
        self.refusals: list[str] = []  # reasons for which the present number of workers did not come about

    @property
    def target(self) -> int | None:
        """The number of workers to measure now; None when all have been."""
        done = len(self.points)
        return self._plan.workers[done] if done < len(self._plan.workers) else None

    def note(self, event: Mapping[str, Any]) -> bool:
        """Takes an event; True if it completed a number of workers.

        A step may be heard of before the change that preceded it: they come by different ways.
        """
        if event["event"] == "generation_started":
            self._since = event["step"] if event["workers"] == self.target else None
        elif event["event"] == "step":
            self._ends[event["step"]] = event["at"]
        elif event["event"] == "change_abandoned":
            self.refusals.append(event["reason"])
            return False
        else:
            return False
        return self._close_point()

    def _close_point(self) -> bool:
        plan = self._plan
        if self._since is None or self.target is None:
            return False
        first = self._since + max(1, plan.warm)  # its end is where measuring begins
        ends = [self._ends.get(step) for step in range(first, first + plan.measured + 1)]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            return False
        gaps = [b - a for a, b in pairwise(known)]
        self.points.append(
            Point(
                workers=self.target,
                steps=len(gaps),
                mean_s=statistics.fmean(gaps),
                median_s=statistics.median(gaps),
                slowest_s=max(gaps),
            )
        )
        self._since = None
        self.refusals = []
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The largest batch per virtual worker, as far as it could be found out."""

    script_batch: int  # what the script asks for
    largest: int | None  # None: not known
    tried: tuple[int, ...]
    device: str
    peak_bytes: int  # with the largest that was seen to fit
    memory_bytes: int  # of the device, or free on the machine
    reason: str  # how the answer was found


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The answer."""

    script: str
    virtual: int
    points: tuple[Point, ...]
    samples_per_step: float | None  # None: the script did not say, or read from no loader of the session
    missing: tuple[int, ...] = ()  # worker counts that the script ended too early for
    steps: int = 0  # that the script made in all
    batch: Batch | None = None

    def to_json(self) -> dict[str, Any]:
        rows = []
        for point, speedup in zip(self.points, self.speedups, strict=True):
            row: dict[str, Any] = asdict(point)
            row["steps_per_s"] = 1 / point.mean_s
            row["samples_per_s"] = self.samples_per_step and self.samples_per_step / point.mean_s
            row["speedup"] = speedup
            row["efficiency"] = speedup * self.points[0].workers / point.workers
            rows.append(row)
        return {
            "script": self.script,
            "virtual": self.virtual,
            "samples_per_step": self.samples_per_step,
            "points": rows,
            "missing": list(self.missing),
            "steps": self.steps,
            "batch": asdict(self.batch) if self.batch else None,
        }

    @property
    def speedups(self) -> list[float]:
        return [self.points[0].mean_s / point.mean_s for point in self.points]


# -- the curve --------------------------------------------------------------------------------------------------------


def measure_curve(
    settings: RunSettings, plan: Plan, listener: Listener = lambda event: None, paced: bool = False
) -> Profile:
    """Runs the script once and takes it through the worker counts of the plan; it is stopped after the last.

    `paced` is for GPUs: steps are reported when they have been computed, not when they have been asked for.
    """
    beyond = [count for count in plan.workers if count > settings.virtual]
    if beyond:
        raise UsageError(
            f"{beyond[0]} workers for {settings.virtual} virtual workers: each needs one or more; raise --virtual"
        )
    trial = replace(settings, workers=plan.workers[0])
    if paced:
        trial = replace(trial, script=PACED, args=[str(settings.script.resolve()), *settings.args])
    sweep = Sweep(plan)
    report = _take_through(trial, sweep, listener)
    if report.exit not in (0, EXIT_INTERRUPTED_BY_USER):
        raise JobFailed(report.error, report.exit)
    if report.exit and sweep.target is not None:
        raise JobFailed("interrupted", report.exit)
    if not sweep.points:
        raise UsageError(
            f"{settings.script} ended after {report.steps} steps, before {plan.workers[0]} workers were measured: "
            f"needed {plan.warm + plan.measured + 1}; let it train for longer or lower --measure"
        )
    seen = sum(row["seen"] for row in report.samples)
    return Profile(
        script=str(settings.script),
        virtual=settings.virtual,
        points=tuple(sweep.points),
        samples_per_step=seen / report.steps if seen and report.steps else None,
        missing=plan.workers[len(sweep.points) :],
        steps=report.steps,
    )


def _take_through(settings: RunSettings, sweep: Sweep, listener: Listener) -> Report:
    """Runs the job and asks it for the workers that the sweep wants next, until that wants no more."""
    said = [time.monotonic()]  # when the job last showed a sign of life
    request = [""]

    def hear(event: Mapping[str, Any]) -> None:
        said[0] = time.monotonic()
        if sweep.note(event):
            if sweep.target is None:
                job.interrupt()
            else:
                request[0] = job.resize(sweep.target)
        listener(event)

    with Run(settings, hear) as job:
        while not job.turn():
            answer = job.answer(request[0])
            if answer is not None and not answer[0]:
                raise ConcertinaError(f"the job did not take {sweep.target} workers: {answer[1]}")
            if len(sweep.refusals) >= MOST_REFUSALS:
                raise ConcertinaError(f"{sweep.target} workers did not come about: {sweep.refusals[-1]}")
            if time.monotonic() - said[0] > PATIENCE_S:
                raise ConcertinaError(
                    f"nothing was heard of the job for {PATIENCE_S:.0f} s while {sweep.target} workers were measured"
                )
        return job.close_report()


# -- the batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A few steps with another batch."""

    batch: int
    own: int  # what the script asks for
    samples: int  # that a virtual worker has in an epoch
    fits: bool
    on_gpu: bool
    device: str
    peak_bytes: int
    memory_bytes: int


def largest_batch(own: int, limit: int, fits: Callable[[int], bool]) -> tuple[int, list[int]]:
    """Doubles until it does not fit, then halves the distance, to an eighth. The batch (0: none), and all tried."""
    tried: list[int] = []

    def attempt(batch: int) -> bool:
        tried.append(batch)
        return fits(batch)

    low, high = 0, max(1, min(own, limit))
    while attempt(high):
        low = high
        if low >= limit:
            return low, tried
        high = min(2 * high, limit)
    while high - low > max(1, low // 8) and len(tried) < MOST_TRIES:
        middle = (low + high) // 2
        if attempt(middle):
            low = middle
        else:
            high = middle
    return low, tried


def estimated_batch(a: Tried, b: Tried, free_bytes: int) -> int | None:
    """By the growth between two batches: the one that would fill what is free. None if there is no growth to see."""
    growth = (b.peak_bytes - a.peak_bytes) / (b.batch - a.batch) if b.batch != a.batch else 0.0
    if growth < 1.0 or b.peak_bytes - a.peak_bytes < 1 << 20:
        return None
    return a.batch + int(free_bytes / growth)


def measure_batch(settings: RunSettings, listener: Listener = lambda event: None) -> Batch:
    """On a GPU, by trying; without one, by what two sizes take."""
    results: dict[int, Tried] = {}

    def attempt(batch: int) -> Tried:
        if batch not in results:
            results[batch] = try_batch(settings, batch, listener)
        return results[batch]

    first = attempt(0)  # the script's own
    results[first.own] = first
    if first.on_gpu:
        largest, tried = largest_batch(first.own, first.samples, lambda batch: attempt(batch).fits)
        best = results.get(largest, first)
        reason = (
            f"tried out on {first.device}, {settings.virtual} virtual workers in one worker, to an eighth"
            if largest < first.samples
            else f"all {first.samples} samples that a virtual worker has fit in one batch"
        )
        return _batch(best, first.own, largest, tried, reason)
    second = attempt(min(4 * first.own, first.samples))
    estimate = estimated_batch(first, second, first.memory_bytes)
    sizes = f"a worker's peak is {_mb(first)} MB with {first.batch} and {_mb(second)} MB with {second.batch} per batch"
    if estimate is None:
        reason = f"no GPU here, and no limit to be seen: {sizes}"
    else:
        reason = (
            f"no GPU here; estimated, not tried: {sizes}, and {first.memory_bytes >> 20} MB were free; workers on one "
            "machine share that"
        )
    return _batch(second, first.own, estimate, [first.batch, second.batch], reason)


def _mb(tried: Tried) -> int:
    return tried.peak_bytes >> 20


def _batch(best: Tried, own: int, largest: int | None, tried: Sequence[int], reason: str) -> Batch:
    return Batch(
        script_batch=own,
        largest=largest,
        tried=tuple(tried),
        device=best.device,
        peak_bytes=best.peak_bytes,
        memory_bytes=best.memory_bytes,
        reason=reason,
    )


def try_batch(settings: RunSettings, batch: int, listener: Listener) -> Tried:
    """A few steps on one worker, in a process of their own; 0 means the script's own batch."""
    with tempfile.TemporaryDirectory(prefix="concertina-batch-") as folder:
        outcome = Path(folder) / "outcome.json"
        args = [str(outcome), str(batch), str(settings.script.resolve()), *settings.args]
        trial = replace(settings, script=TRY_BATCH, args=args, workers=1, steps=TRY_STEPS, run_dir=Path(folder) / "run")
        with Run(trial, listener) as job:
            report = job.to_end()
        if not outcome.exists():
            raise JobFailed(
                report.error or "the script read from no session.loader(), so there is no batch to change", 2
            )
        found = json.loads(outcome.read_text())
        if report.exit and found["fits"]:
            raise JobFailed(report.error, report.exit)
        return Tried(**found)
