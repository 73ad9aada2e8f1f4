"""Scaling curves of jobs whose batch follows Elan's hybrid scaling (III, algorithm 1) when they grow.

A job that asks for N devices and a batch keeps the batch on N devices or fewer. On more it takes the smallest
of 1, 2, 4, ... times its batch that keeps them all busy, by the measured tables of its model. Progress is still
counted in iterations of the batch it asked for: what Elan's learning-rate rule makes them worth. Where the
table has no figure for a batch, nothing is made up: the job keeps its own.
"""

from __future__ import annotations

from concertina.core.batch_scaling import hybrid
from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import Curves, ScalingCurve, ThroughputTable

_Key = tuple[str, int, int]


class HybridCurves(Curves):
    """Curves by model, batch and devices asked for, the batch chosen for each number of workers."""

    def __init__(self, table: ThroughputTable | None = None) -> None:
        super().__init__(table)
        self._batches: dict[_Key, ScalingCurve] = {}

    def of(self, job: JobSpec) -> tuple[ScalingCurve, float]:
        """The curve and the work in its unit."""
        curve, work = super().of(job)
        if job.model is None or job.batch_size is None or self.measured(job.model, job.batch_size) is not curve:
            return curve, work
        key = (job.model, job.batch_size, job.gpus)
        if key not in self._batches:
            self._batches[key] = self._hybrid(curve, *key)
        return self._batches[key], work

    def _hybrid(self, own: ScalingCurve, model: str, batch: int, asked: int) -> ScalingCurve:
        points = {
            kind: {n: self._speed(own, model, batch, asked, kind, n) for n in own.counts(kind)} for kind in own.points
        }
        return ScalingCurve(points=points, spread=own.spread)

    def _speed(self, own: ScalingCurve, model: str, batch: int, asked: int, kind: str, workers: int) -> float:
        """Iterations/s of the batch asked for."""
        if workers <= asked:
            return own.speed(kind, workers)

        def optimal(total: int) -> int:
            curve = self.measured(model, total)
            return curve.fastest(kind, 1 << 30) if curve else 0

        total = hybrid(batch, asked, workers, optimal).total
        larger = self.measured(model, total)
        speed = larger.speed(kind, workers) * total / batch if larger else 0.0
        return speed or own.speed(kind, workers)


def curves_for(scaling: str, table: ThroughputTable | None) -> Curves:
    """The curves of jobs that keep their batch (`strong`) or let it grow (`hybrid`)."""
    return HybridCurves(table) if scaling == "hybrid" else Curves(table)
