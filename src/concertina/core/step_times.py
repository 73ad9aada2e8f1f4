"""Measured step times, and what they say about sizes that were not measured: which number of workers suits a batch.

Pure. The model is the least that shows the rise and fall of strong scaling (Elan fig. 3): a fixed part, a part per
sample, and communication that grows with the workers, once as a ring's volume and once as its number of hops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from concertina.core.errors import UsageError

Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step by (workers, samples per worker). What was measured is believed, the rest is fitted."""

    measured: Mapping[tuple[int, int], float]
    fitted: Coefficients

    @classmethod
    def fit(cls, measured: Mapping[tuple[int, int], float]) -> "StepTimes":
        if not measured:
            raise UsageError("no step time was measured, needed one at least; run `concertina profile` first")
        for (workers, local), seconds in measured.items():
            if workers < 1 or local < 1 or not 0 < seconds < float("inf"):
                raise UsageError(
                    f"{seconds} s per step for {workers} workers with {local} samples each: "
                    "needed numbers of 1 or more and a time above 0"
                )
        return cls(dict(measured), _least_squares(measured))

    def seconds(self, workers: int, local: int) -> float:
        known = self.measured.get((workers, local))
        if known is not None:
            return known
        return sum(c * x for c, x in zip(self.fitted, _features(workers, local), strict=True))

    def throughput(self, workers: int, total: int) -> float:
        """Samples per second of a total batch; everybody waits for the worker with the largest part."""
        return total / self.seconds(workers, -(-total // workers))

    def optimal_workers(self, total: int, most: int) -> int:
        """The fewest workers, up to `most`, with the highest throughput for this total batch."""
        if total < 1 or most < 1:
            raise UsageError(f"a total batch of {total} on up to {most} workers, needed 1 or more of both")
        return max(range(1, min(most, total) + 1), key=lambda n: (self.throughput(n, total), -n))


def _features(workers: int, local: int) -> Coefficients:
    return 1.0, float(local), (workers - 1) / workers, float(workers - 1)


def _least_squares(measured: Mapping[tuple[int, int], float]) -> Coefficients:
    """Smallest relative error with no negative coefficient: the best of all subsets that a plain solution allows."""
    rows = [[x / t for x in _features(*key)] for key, t in sorted(measured.items())]
    best: tuple[float, Coefficients] | None = None
    for size in range(1, 5):
        for chosen in combinations(range(4), size):
            solved = _solve([[row[i] for i in chosen] for row in rows])
            if solved is None or min(solved) < 0:
                continue
            full = [0.0] * 4
            for i, value in zip(chosen, solved, strict=True):
                full[i] = value
            error = sum((sum(c * x for c, x in zip(full, row, strict=True)) - 1.0) ** 2 for row in rows)
            # A larger subset has to be better by more than rounding.
            if best is None or error < best[0] - 1e-12:
                best = (error, (full[0], full[1], full[2], full[3]))
    assert best is not None  # the part per sample alone always has a solution above 0
    return best[1]


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Normal equations for `rows @ c = 1` by elimination; None where the measurements cannot tell the parts apart."""
    size = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    scaled = [[x / s for x, s in zip(row, scale, strict=True)] for row in rows]
    table = [[sum(r[i] * r[j] for r in scaled) for j in range(size)] + [sum(r[i] for r in scaled)] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(table[k][i]))
        if abs(table[pivot][i]) < 1e-10 * len(rows):
            return None
        table[i], table[pivot] = table[pivot], table[i]
        for k in range(size):
            if k != i:
                ratio = table[k][i] / table[i][i]
                table[k] = [a - ratio * b for a, b in zip(table[k], table[i], strict=True)]
    return [table[i][size] / table[i][i] / scale[i] for i in range(size)]
