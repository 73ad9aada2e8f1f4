"""Ours beside other people's results: the same trace, the same assumptions, compared job by job.

Each function states what the other simulator assumes by the arguments it passes. `traces` is the folder
with the shared traces.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import GandivaRules, LateTiresias, RetoldGandiva, RetoldJob
from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.policies.base import Policy
from concertina.policies.edf import EdfPolicy
from concertina.policies.gandiva import GandivaPolicy
from concertina.policies.las import LasPolicy
from concertina.policies.tiresias import TiresiasPolicy
from concertina.policies.yarn_cs import YarnCsPolicy
from concertina.simulator.readers import read_throughput, read_trace
from concertina.simulator.run import simulate
from concertina.simulator.scenario import load_scenarios

CLUSTERS = {
    "195job": "16x8:A100",
    "philly_103959": "32x8:A100",
    "cluster10": "32x8:A100",
    "cluster01": "64x8:A100",
    "elasticVpollux_e": "16x4:T4",
}
VC_CLUSTERS = {"ee9e8c": "16x8", "b436b2": "8x8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job in both simulators. Times from submission, in seconds."""

    id: str
    gpus: int
    theirs_s: float
    ours_s: float
    due_s: float | None
    """The deadline, from submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two simulators on one trace."""

    jobs: tuple[Job, ...]

    @property
    def mean_ours(self) -> float:
        """Mean completion time."""
        return sum(job.ours_s for job in self.jobs) / len(self.jobs)

    @property
    def mean_theirs(self) -> float:
        """Mean completion time."""
        return sum(job.theirs_s for job in self.jobs) / len(self.jobs)

    @property
    def met_ours(self) -> int:
        """Deadlines met."""
        return sum(job.due_s is not None and job.ours_s <= job.due_s for job in self.jobs)

    @property
    def met_theirs(self) -> int:
        """Deadlines met."""
        return sum(job.due_s is not None and job.theirs_s <= job.due_s for job in self.jobs)

    def differing(self, *, seconds: float = 0.0, share: float = 0.0) -> list[Job]:
        """Jobs whose completion times differ by more than this."""
        return [job for job in self.jobs if abs(job.ours_s - job.theirs_s) > max(seconds, share * job.theirs_s)]


def compare(jobs: list[JobSpec], ends: dict[str, float], theirs: dict[str, float]) -> Comparison:
    """Put ends of ours and completion times of theirs side by side."""
    return Comparison(
        jobs=tuple(
            Job(
                id=job.id,
                gpus=job.gpus,
                theirs_s=theirs[job.id],
                ours_s=ends[job.id] - job.submit_s,
                due_s=None if job.deadline_s is None else job.deadline_s - job.submit_s,
            )
            for job in jobs
        )
    )


def _anchor(traces: Path, file: str, **where: str) -> dict[str, float]:
    with gzip.open(traces / "anchors" / file, "rt") as lines:
        rows = [row for row in csv.DictReader(lines) if all(row[k] == v for k, v in where.items())]
    return {row.get("job_id") or row["name"]: float(row["jct_s"]) for row in rows}


def _ends(jobs: list[JobSpec], cluster: str, policy: Policy, **how: object) -> dict[str, float]:
    result = simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, **how)  # type: ignore[arg-type]
    return {o.job_id: o.end_s for o in result.outcomes if o.end_s is not None}


def philly_vc(traces: Path, vc: str) -> list[JobSpec]:
    """A virtual cluster as the anchors number it: jobs of at most 64 devices, from time zero."""
    path = traces / "philly" / "philly_jobs.csv.gz"
    rows = read_trace(f"{path}#vc={vc},max_gpus=64").jobs
    first = min(job.submit_s for job in rows)
    return [
        JobSpec(id=str(i), submit_s=job.submit_s - first, gpus=job.gpus, duration_s=job.duration_s)
        for i, job in enumerate(rows)
    ]


def tiresias_fifo(traces: Path, vc: str) -> Comparison:
    """FIFO in the Tiresias authors' simulator: `yarn` placement, that is compact or not at all, first fit."""
    jobs = philly_vc(traces, vc)
    ends = _ends(jobs, VC_CLUSTERS[vc], YarnCsPolicy(first_fit=True))
    return compare(jobs, ends, _anchor(traces, "tiresias_jobs.csv.gz", trace=f"philly_{vc}", policy="fifo"))


def tiresias_las(traces: Path, vc: str, *, late: bool = False) -> Comparison:
    """2D-LAS there: limits 3250 and 7200 device-seconds, preemption for free; `late` retells their
    sinking."""
    jobs = philly_vc(traces, vc)
    ends = _ends(jobs, VC_CLUSTERS[vc], LateTiresias() if late else TiresiasPolicy())
    theirs = _anchor(traces, "tiresias_jobs.csv.gz", trace=f"philly_{vc}", policy="dlas-gpu")
    return compare(jobs, ends, theirs)


def elasticflow_jobs(traces: Path, trace: str) -> list[JobSpec]:
    """A trace of ElasticFlow's."""
    for folder in ("elasticflow-itp", "elasticflow"):
        path = traces / folder / f"{trace}.csv.gz"
        if path.is_file():
            return list(read_trace(str(path)).jobs)
    raise FileNotFoundError(trace)


def elasticflow(traces: Path, trace: str, policy: str) -> Comparison:
    """EDF, Tiresias (`dlas-gpu`) and Gandiva in ElasticFlow's simulator: a round at most every 60 s.

    EDF is elastic by the throughput table, always up to the largest measured count (64 and the batch size
    at most), and rescales for free. The others are static with the trace's durations and pay
    ElasticFlow's overhead.
    """
    jobs = elasticflow_jobs(traces, trace)
    theirs = _anchor(traces, "elasticflow_jobs.csv.gz", trace=trace, policy=policy)
    if policy == "edf":
        table = read_throughput(traces / "elasticflow" / "throughput.csv").table
        limited = [_limited(job) for job in jobs]
        ends = _ends(limited, CLUSTERS[trace], EdfPolicy(largest=True), throughput=table, gap_s=60)
    else:
        ours: Policy = TiresiasPolicy() if policy == "dlas-gpu" else GandivaPolicy()
        ends = _ends(jobs, CLUSTERS[trace], ours, overhead="elasticflow", gap_s=60)
    return compare(jobs, ends, theirs)


def _limited(job: JobSpec) -> JobSpec:
    return JobSpec(
        id=job.id,
        submit_s=job.submit_s,
        gpus=job.gpus,
        model=job.model,
        batch_size=job.batch_size,
        work=job.work,
        deadline_s=job.deadline_s,
        max_workers=min(64, job.batch_size or 64),
    )


def gandiva_retold(traces: Path, trace: str, rules: GandivaRules | None = None) -> Comparison:
    """ElasticFlow's Gandiva with its oddities, or without some of them."""
    return _retell(traces, trace, rules or GandivaRules())[0]


def gandiva_stories(traces: Path, trace: str) -> list[tuple[Job, RetoldJob]]:
    """Every job in theirs and in theirs retold, with what the retelling found out about it."""
    found, told = _retell(traces, trace, GandivaRules())
    return [(job, told[job.id]) for job in found.jobs]


def _retell(traces: Path, trace: str, rules: GandivaRules) -> tuple[Comparison, dict[str, RetoldJob]]:
    jobs = elasticflow_jobs(traces, trace)
    cluster = Cluster.parse(CLUSTERS[trace])
    retold = RetoldGandiva(len(cluster.nodes), cluster.nodes[0].slots, rules).run(jobs)
    theirs = _anchor(traces, "elasticflow_jobs.csv.gz", trace=trace, policy="gandiva")
    return compare(jobs, {name: job.end_s for name, job in retold.items()}, theirs), retold


def pollux_tiresias(traces: Path) -> Comparison:
    """Tiresias in Pollux' simulator: one limit of 16 device-hours, plain order within a queue, a round
    each minute,
    the emptiest nodes first, 30 s for every start."""
    (scenario,) = load_scenarios([f"{traces / 'pollux' / 'workloads.csv.gz'}#load=1.0,workload=6"])
    ends = _ends(
        list(scenario.jobs),
        "16x4:T4",
        TiresiasPolicy(limits=(16 * 3600.0,), running_first=False),
        throughput=scenario.throughput,
        overhead=30,
        tick_s=60,
        placement="roomiest",
    )
    theirs = _anchor(traces, "pollux_sia_jct.csv.gz", simulator="pollux-simulator", policy="tiresias")
    return compare(list(scenario.jobs), ends, theirs)


def shockwave_las(traces: Path) -> tuple[float, float]:
    """Makespans (ours, theirs) of max-min fairness on Shockwave's 120 jobs: rounds of 120 s on 32 devices."""
    with gzip.open(traces / "shockwave" / "traces.csv.gz", "rt") as lines:
        rows = [row for row in csv.DictReader(lines) if row["trace"].startswith("120_")]
    jobs = [
        JobSpec(
            id=str(i),
            submit_s=float(row["arrival_s"]),
            gpus=int(row["num_gpus"]),
            duration_s=float(row["isolated_duration_s"]),
        )
        for i, row in enumerate(rows)
    ]
    with (traces / "anchors" / "shockwave_published.csv").open() as lines:
        (theirs,) = [
            float(row["makespan_s"])
            for row in csv.DictReader(lines)
            if row["experiment"] == "tacc_32gpus" and row["policy"] == "max_min_fairness"
        ]
    result = simulate(jobs, cluster=Cluster.parse("8x4"), policy=LasPolicy(quantum_s=120), tick_s=120)
    return result.summary.makespan_s, theirs
