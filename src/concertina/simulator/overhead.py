"""What a change of devices costs a job: named models and the papers or measurements behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from concertina.core.errors import UnknownNameError

LARGE_CLUSTER = 256
"""Devices from which ElasticFlow's simulator charges more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadModel:
    """Seconds without progress, devices held, when a job's devices change."""

    name: str
    rescale_s: float = 0.0
    """Growing, shrinking or moving while running."""
    grow_s: float = 0.0
    """Until further devices take part. The job trains on meanwhile, and a start under way goes on."""
    resume_s: float = 0.0
    """Starting again after all devices were taken away."""
    launch_s: float = 0.0
    """The very first start."""
    per_doubling_s: float = 0.0
    """Added once for each of log2(devices) + 1."""
    large_s: float = 0.0
    """Added to every change on clusters of `LARGE_CLUSTER` devices or more."""
    restart_s: float = 0.0
    """Added to every change in a round in which all workers are started anew."""
    large_restart_s: float = 0.0
    restart_every: int = 0
    """Every so many rounds all workers are started anew (0: never)."""
    everyone: bool = False
    """Whether each round costs every running job this much, changed or not."""

    def pause(
        self,
        *,
        before: int,
        after: int,
        first: bool,
        cluster: int,
        round_number: int,
        kept: float = 1.0,
        rest: float = 0.0,
    ) -> float:
        """What it costs to go from `before` to `after` devices in this round.

        `kept` is the share of its new speed that the job has had so far, `rest` what is left of the pause it is in.
        """
        if after == 0:
            return 0.0
        if not before:
            base = self.launch_s if first else self.resume_s
        elif self.grow_s:
            base = max(self.rescale_s + self.grow_s * max(1.0 - kept, 0.0), rest)
        else:
            base = self.rescale_s
        return base + self.extra(after, cluster=cluster, round_number=round_number)

    def extra(self, devices: int, *, cluster: int, round_number: int) -> float:
        """The part that depends on sizes and on the round, not on the kind of change."""
        large = cluster >= LARGE_CLUSTER
        total = self.large_s if large else 0.0
        if self.per_doubling_s:
            total += self.per_doubling_s * (math.log2(devices) + 1)
        if self.is_restart(round_number):
            total += self.restart_s + (self.large_restart_s if large else 0.0)
        return total

    def is_restart(self, round_number: int) -> bool:
        """Whether all workers are started anew in this round."""
        return self.restart_every > 0 and round_number > 0 and round_number % self.restart_every == 0


ELASTICFLOW = OverheadModel(
    name="elasticflow",
    rescale_s=2.0,
    resume_s=2.0,
    launch_s=2.0,
    per_doubling_s=2.0,
    large_s=5.0,
    restart_s=27.0,
    large_restart_s=20.0,
    restart_every=60,
)
"""The sum in ElasticFlow's simulator: 2 s (7 s from 256 devices), 27 s (47 s) more on restart, 2 (log2 n
+ 1)."""

OVERHEADS: dict[str, OverheadModel] = {
    model.name: model
    for model in (
        OverheadModel(name="instant"),
        # Change-over of a shadow: 18 ms at most; stop, checkpoint and resume on one machine: 5.06 s.
        OverheadModel(name="concertina", rescale_s=0.02, resume_s=5.1),
        # Elan, fig. 15: about 1 s for migration, scaling in and scaling out at all scales.
        OverheadModel(name="elan", rescale_s=1.0, resume_s=30.0),
        # Elan, fig. 11 and 15: shutdown and restart is 10 to 80 times as slow as Elan.
        OverheadModel(name="stop-resume", rescale_s=30.0, resume_s=30.0),
        ELASTICFLOW,
        replace(ELASTICFLOW, name="elasticflow-everyone", everyone=True),
    )
}


def overhead_named(given: str | float | OverheadModel) -> OverheadModel:
    """A model by name, or one that charges the same number of seconds for every change."""
    if isinstance(given, OverheadModel):
        return given
    if isinstance(given, str) and given in OVERHEADS:
        return OVERHEADS[given]
    try:
        seconds = float(given)
    except ValueError:
        raise UnknownNameError(kind="overhead model", seen=str(given), known=tuple(OVERHEADS)) from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UnknownNameError(kind="overhead model", seen=str(given), known=(*OVERHEADS, "SECONDS >= 0"))
    return OverheadModel(name=f"{seconds:g}s", rescale_s=seconds, resume_s=seconds, launch_s=seconds)
