"""Workers -> speed. Tables of measured throughput, the law of diminishing returns, envelopes, interpolation.

Speed is in iterations of the job's global batch per second. Readers find the numbers, this module uses them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.core.errors import NoCurveError
from concertina.core.job import JobSpec

LAW_EFFICIENCY = 0.8
"""What a doubling keeps of the speed per worker (MILP allocator, section 4.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One measured figure."""

    model: str
    batch_size: int
    """Global batch size (over all workers)."""
    device_type: str
    workers: int
    iterations_per_s: float
    nodes: int | None = None
    """Nodes the workers were spread over. None: as few as possible (compact)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """Measured figures, as a reader found them."""

    rows: tuple[ThroughputRow, ...]
    name: str = ""


def law(workers: float, efficiency: float = LAW_EFFICIENCY) -> float:
    """Speed of `workers` in units of one worker: n * 0.8^log2(n)."""
    return workers * efficiency ** math.log2(workers) if workers > 0 else 0.0


def _between(xs: list[int], ys: list[float], x: int) -> float:
    """Linear interpolation; `x` lies within `xs`."""
    i = min(bisect_right(xs, x), len(xs) - 1)
    x0, x1 = xs[i - 1], xs[i]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - x0) / (x1 - x0)


@dataclass(slots=True, kw_only=True)
class ScalingCurve:
    """How fast one kind of job is on each device type, by number of workers (and nodes, where known).

    Between measured counts it interpolates; outside the measured range it refuses: `speed` is 0 below the
    first and above the last count.
    """

    points: Mapping[str, Mapping[int, float]]
    """Device type -> workers -> iterations/s, placed as compactly as possible. `*` stands for any type."""
    spread: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    """(device type, workers, nodes) -> iterations/s, where it was measured on more nodes than necessary."""
    _seen: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)

    def counts(self, device_type: str) -> tuple[int, ...]:
        """The measured worker counts, rising."""
        return tuple(sorted(self._of(device_type)))

    def speed(self, device_type: str, workers: int, nodes: int | None = None) -> float:
        """Iterations/s of `workers` devices of that type on `nodes` nodes (None: compact). 0: not
        possible."""
        if nodes is not None and self.spread:
            found = self.spread.get((device_type, workers, nodes))
            if found is not None:
                return found
        key = (device_type, workers)
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = self._compact(device_type, workers)
        return known

    def fastest(self, device_type: str, limit: int) -> int:
        """The measured count, at most `limit`, that is fastest; the smallest of equals. 0: none."""
        best, best_speed = 0, 0.0
        for count in self.counts(device_type):
            speed = self.speed(device_type, count)
            if count <= limit and speed > best_speed:
                best, best_speed = count, speed
        return best

    def _of(self, device_type: str) -> Mapping[int, float]:
        return self.points.get(device_type) or self.points.get("*") or {}

    def _compact(self, device_type: str, workers: int) -> float:
        points = self._of(device_type)
        if workers in points:
            return points[workers]
        xs = sorted(points)
        if not xs or not xs[0] <= workers <= xs[-1]:
            return 0.0
        return _between(xs, [points[x] for x in xs], workers)


class LawCurve(ScalingCurve):
    """A job of which only the duration is known: the law through speed 1 at the devices it asked for."""

    def __init__(self, asked: int, efficiency: float = LAW_EFFICIENCY, top: int = 0) -> None:
        sizes = sorted({asked, *(2**k for k in range(11))})
        top = top or max(64, asked)
        points = {n: law(n, efficiency) / law(asked, efficiency) for n in sizes if n <= top}
        super().__init__(points={"*": points})


class Curves:
    """Finds a job's curve: by model and batch in a table, else by the law through its duration."""

    def __init__(self, table: ThroughputTable | None = None, *, efficiency: float = LAW_EFFICIENCY) -> None:
        self._efficiency = efficiency
        self._known = _group(table) if table else {}
        self._laws: dict[int, ScalingCurve] = {}

    def of(self, job: JobSpec) -> tuple[ScalingCurve, float]:
        """The curve and the work in its unit (iterations, or seconds on the asked devices)."""
        if job.work is not None and job.model is not None and job.batch_size is not None:
            curve = self._known.get((job.model, job.batch_size))
            if curve is not None:
                return curve, job.work
        if job.duration_s is None:
            raise NoCurveError(job_id=job.id, wanted=_wanted(job), nearest=self._nearest(job))
        return self._law(job.gpus), job.duration_s

    def measured(self, model: str, batch_size: int) -> ScalingCurve | None:
        """The curve of a model at one batch size, where the table has it."""
        return self._known.get((model, batch_size))

    def _law(self, asked: int) -> ScalingCurve:
        found = self._laws.get(asked)
        if found is None:
            found = self._laws[asked] = LawCurve(asked, self._efficiency)
        return found

    def _nearest(self, job: JobSpec) -> str:
        batches = sorted(batch for model, batch in self._known if model == job.model)
        if batches:
            return f"the table has this model with batch sizes {', '.join(map(str, batches))}"
        return "and its duration is not given; pass a throughput table that has this model"


def _wanted(job: JobSpec) -> str:
    return f"model {job.model!r}, batch size {job.batch_size}"


def _group(table: ThroughputTable) -> dict[tuple[str, int], ScalingCurve]:
    points: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    spread: dict[tuple[str, int], dict[tuple[str, int, int], float]] = {}
    for row in table.rows:
        key = (row.model, row.batch_size)
        by_type = points.setdefault(key, {}).setdefault(row.device_type, {})
        if row.nodes is None:
            by_type[row.workers] = row.iterations_per_s
        else:
            spread.setdefault(key, {})[(row.device_type, row.workers, row.nodes)] = row.iterations_per_s
    for key, rows in spread.items():  # compact means: on the fewest nodes that were measured
        for (kind, workers, nodes), speed in sorted(rows.items(), key=lambda item: -item[0][2]):
            fewest = all(nodes <= n for k, w, n in rows if (k, w) == (kind, workers))
            if fewest:
                points[key][kind].setdefault(workers, speed)
    return {key: ScalingCurve(points=by, spread=spread.get(key, {})) for key, by in points.items()}
