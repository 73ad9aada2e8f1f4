"""What an answer rests on besides the snapshot: the rules of the cluster, and what is known about chance."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from concertina.core.cluster import Snapshot
from concertina.core.errors import ConcertinaError
from concertina.core.job import JobSpec
from concertina.policies.base import Policy
from concertina.policies.scaling_curve import Curves
from concertina.simulator.cluster import PLACEMENTS
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import OVERHEADS, OverheadModel


class QuestionError(ConcertinaError, ValueError):
    """A question that can not be answered as it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The same policy, curves and costs that the cluster runs with, and where to take chance from."""

    policy: Policy
    curves: Curves
    overhead: OverheadModel = OVERHEADS["concertina"]
    noise: Noise = field(default_factory=lambda: Noise(step_time=0.1))
    """How much step times vary around the curves."""
    placement: str = "best-fit"
    gap_s: float = 0.0
    """Least time between two rounds."""
    past: Sequence[JobSpec] = ()
    """Jobs submitted lately, those that have ended or were refused included: the future is expected to bring the
    like. Empty: nothing more is expected to come."""
    window_s: float = 86_400.0
    """How far back the past counts."""
    seed: int = 0
    runs: int = 11
    """How often the future is drawn, if `budget_ms` allows it."""
    budget_ms: float = 600.0
    """What an answer may cost in computing, as counted and not by the clock, so that the same question has the
    same answer: beyond, rounds are held less often and fewer futures are drawn."""

    def __post_init__(self) -> None:
        if self.runs < 1 or self.budget_ms <= 0 or self.window_s <= 0 or self.gap_s < 0:
            raise QuestionError(
                f"runs is {self.runs}, budget_ms {self.budget_ms}, window_s {self.window_s}, gap_s {self.gap_s}; "
                "needed 1 or more, above 0, above 0, 0 or more"
            )
        if self.placement not in PLACEMENTS:
            raise QuestionError(f"placement is {self.placement!r}, needed one of {', '.join(PLACEMENTS)}")


def check_job(snapshot: Snapshot, job_id: str) -> int:
    """The place of a job in a snapshot, or a sentence that says what is there."""
    ids = [view.spec.id for view in snapshot.jobs]
    if job_id in ids:
        return ids.index(job_id)
    near = difflib.get_close_matches(job_id, ids, n=3)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    raise QuestionError(f"no job {job_id!r} among the {len(ids)} that have not ended{hint}")
