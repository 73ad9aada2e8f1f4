"""How the cluster was shared over time, from the jobs' own stories. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from concertina.cluster.mirror import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A job had so many slots from one moment to another; None: it still has."""

    job: str
    name: str
    start_s: float
    end_s: float | None
    slots: int
    reason: str


def slots_over_time(jobs: Iterable[Job], since_s: float = 0.0) -> list[Stretch]:
    """Every stretch with slots that did not end before `since_s`, by job and then by time."""
    found: list[Stretch] = []
    for job in jobs:
        lines = job.state.history
        for i, line in enumerate(lines):
            end = lines[i + 1].at_s if i + 1 < len(lines) else None
            if line.workers and (end is None or end > since_s):
                found.append(
                    Stretch(
                        job=job.id,
                        name=job.request.name,
                        start_s=line.at_s,
                        end_s=end,
                        slots=line.workers,
                        reason=line.reason,
                    )
                )
    return found
