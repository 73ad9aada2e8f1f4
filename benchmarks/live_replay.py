"""The simulator's side of the live trace: the same jobs, the measured curves and costs, the same policy. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from concertina.cluster.curves import points
from concertina.cluster.views import live_policy
from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase, JobSpec
from concertina.policies.scaling_curve import ThroughputRow, ThroughputTable
from concertina.simulator.metrics import Result
from concertina.simulator.overhead import OverheadModel
from concertina.simulator.recorder import Record
from concertina.simulator.run import simulate

DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What starting costs, as measured on the live cluster before the run, in seconds."""

    launch_s: float
    """From the grant of slots until a job that starts trains on them."""
    grow_s: float
    """From the grant of further slots until it trains on them, too; meanwhile it trains on those it has."""


def overhead_of(costs: Costs) -> OverheadModel:
    """A grow delays the gain, it does not stop the job; to shrink costs nothing that shows."""
    return OverheadModel(name="measured", launch_s=costs.launch_s, resume_s=costs.launch_s, grow_s=costs.grow_s)


def replay(
    jobs: Sequence[JobSpec], slots: int, speeds: Mapping[str, Mapping[int, float]], costs: Costs, policy: str
) -> Result:
    rows = tuple(
        ThroughputRow(model=kind, batch_size=1, device_type=DEVICE, workers=n, iterations_per_s=speed)
        for kind, curve in speeds.items()
        for n, speed in points(curve, slots).items()
    )
    # The live controller asks for a job's fewest workers (cluster/views.py `spec_of`): its fair share.
    jobs = [replace(job, gpus=job.min_workers or 1) for job in jobs]
    return simulate(
        jobs,
        cluster=Cluster.parse(f"1x{slots}:{DEVICE}"),
        policy=live_policy(policy),
        throughput=ThroughputTable(rows=rows, name="measured"),
        overhead=overhead_of(costs),
        gap_s=0.2,
        trace="live",
        record=Record(spans=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison."""

    makespan_s: float
    mean_jct_s: float
    refused: tuple[str, ...]
    missed: tuple[str, ...]
    jct_s: Mapping[str, float]
    slots: Mapping[str, Sequence[tuple[float, int]]]
    """By job: from this second of the trace on so many slots."""


def simulated(result: Result) -> Side:
    done = {job.job_id: job.jct_s for job in result.outcomes if job.jct_s is not None}
    return Side(
        makespan_s=max(job.end_s for job in result.outcomes if job.end_s is not None),
        mean_jct_s=statistics.fmean(done.values()),
        refused=tuple(sorted(job.job_id for job in result.outcomes if job.phase is JobPhase.REJECTED)),
        missed=tuple(
            sorted(j.job_id for j in result.outcomes if j.jct_s is not None and j.deadline_s and not j.deadline_met)
        ),
        jct_s=done,
        slots=_slots(result),
    )


def _slots(result: Result) -> dict[str, list[tuple[float, int]]]:
    found: dict[str, list[tuple[float, int]]] = {}
    for span in result.spans:
        steps = found.setdefault(span.job_id, [])
        if steps and steps[-1][0] == span.start_s:
            steps.pop()  # it went on at once
        if not steps or steps[-1][1] != span.workers:
            steps.append((span.start_s, span.workers))
        steps.append((span.end_s, 0))
    return found


def live(jobs: Sequence[Mapping[str, Any]], began_s: float, held: Mapping[str, Sequence[tuple[float, int]]]) -> Side:
    """`held`: as the watcher saw it, in seconds since 1970."""
    done = {job["name"]: job["ended_s"] - job["submitted_s"] for job in jobs if job["phase"] == "finished"}
    late = [j["name"] for j in jobs if j["phase"] == "finished" and j["deadline_s"] and j["ended_s"] > j["deadline_s"]]
    return Side(
        makespan_s=max(job["ended_s"] for job in jobs if job["phase"] == "finished") - began_s,
        mean_jct_s=statistics.fmean(done.values()),
        refused=tuple(sorted(job["name"] for job in jobs if job["phase"] == "rejected")),
        missed=tuple(sorted(late)),
        jct_s=done,
        slots={name: [(at - began_s, slots) for at, slots in steps] for name, steps in held.items()},
    )


def differs(ours: float, theirs: float) -> float:
    """How much the live figure is above the simulated one, as a share of the live one."""
    return (ours - theirs) / ours
