"""Writes down what happens in a simulation and adds it up at the end. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase, JobSpec
from concertina.simulator.metrics import Decision, JobOutcome, LoadPoint, Result, Span, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What to keep besides outcomes and summary. All of it costs memory on long traces."""

    spans: bool = False
    load: bool = False
    decisions: bool = False


class JobNotes:
    """What is being found out about one job."""

    __slots__ = (
        "alone_s", "contention_0", "device_s", "end_s", "fair_share", "phase", "preemptions",
        "queue_s", "reason", "rescales", "since_s", "spec", "speed_last", "start_s", "workers_last",
    )  # fmt: skip

    def __init__(self, spec: JobSpec, alone_s: float) -> None:
        self.spec = spec
        self.alone_s = alone_s
        self.phase = JobPhase.SUBMITTED
        self.start_s: float | None = None
        self.end_s: float | None = None
        self.queue_s = self.device_s = self.fair_share = self.contention_0 = self.speed_last = 0.0
        self.since_s = spec.submit_s
        self.rescales = self.preemptions = self.workers_last = 0
        self.reason = ""

    def outcome(self) -> JobOutcome:
        """The frozen result."""
        return JobOutcome(
            job_id=self.spec.id,
            user=self.spec.user,
            gpus=self.spec.gpus,
            submit_s=self.spec.submit_s,
            start_s=self.start_s,
            end_s=self.end_s,
            deadline_s=self.spec.deadline_s,
            soft=self.spec.soft,
            phase=self.phase,
            queue_s=self.queue_s,
            device_s=self.device_s,
            rescales=self.rescales,
            preemptions=self.preemptions,
            workers_last=self.workers_last,
            alone_s=self.alone_s,
            fair_share=self.fair_share,
            reason=self.reason,
        )


class Recorder:
    """Integrals over time, per-job notes, and what was asked to be kept."""

    def __init__(self, record: Record, devices: int) -> None:
        self.record = record
        self.now = 0.0
        self.devices = devices
        self.used = self.running = self.waiting = self.demand = 0
        self.efficiency = 0.0
        """Sum over running jobs of speed now over speed on one device."""
        self.device_s = self.used_s = self.efficient_s = self.contention_s = 0.0
        self.spans: list[Span] = []
        self.load: list[LoadPoint] = []
        self.decisions: list[Decision] = []
        self.decision_s: list[float] = []
        self.rescales = 0

    def advance(self, now: float) -> None:
        """Add up until `now`."""
        step = now - self.now
        if step > 0:
            self.device_s += self.devices * step
            self.used_s += self.used * step
            self.efficient_s += self.efficiency * step
            crowd = self.demand / self.devices if self.devices else 1.0
            self.contention_s += step * (crowd if crowd > 1.0 else 1.0)
        self.now = now

    def decide(self, job_id: str, action: str, before: int, after: int, reason: str) -> None:
        """Keep a decision, if decisions are kept."""
        if self.record.decisions:
            self.decisions.append(
                Decision(time_s=self.now, job_id=job_id, action=action, before=before, after=after, reason=reason)
            )

    def point(self) -> None:
        """Keep the load as it is now, one point for each moment."""
        if not self.record.load:
            return
        if self.load and self.load[-1].time_s == self.now:
            self.load.pop()
        self.load.append(
            LoadPoint(
                time_s=self.now,
                devices=self.devices,
                used=self.used,
                running=self.running,
                waiting=self.waiting,
                efficiency=self.efficiency / self.devices if self.devices else 0.0,
            )
        )

    def result(self, *, trace: str, policy: str, cluster: Cluster, notes: Sequence[JobNotes], wall_s: float) -> Result:
        """Everything, frozen."""
        outcomes = tuple(note.outcome() for note in notes)
        return Result(
            cluster=cluster,
            summary=summarize(trace, policy, outcomes, self, wall_s),
            outcomes=outcomes,
            spans=tuple(sorted(self.spans, key=lambda span: (span.start_s, span.job_id))),
            load=tuple(self.load),
            decisions=tuple(self.decisions),
        )


def summarize(trace: str, policy: str, outcomes: Sequence[JobOutcome], recorder: Recorder, wall_s: float) -> Summary:
    """The one line of numbers."""
    jcts = [o.end_s - o.submit_s for o in outcomes if o.phase is JobPhase.FINISHED and o.end_s is not None]
    admitted = [o for o in outcomes if o.phase is not JobPhase.REJECTED]
    ends = [o.end_s for o in outcomes if o.end_s is not None]
    first = min((o.submit_s for o in outcomes), default=0.0)
    times = np.asarray(recorder.decision_s or [0.0]) * 1000.0
    strict = [o for o in admitted if o.deadline_s is not None and not o.soft]
    return Summary(
        trace=trace,
        policy=policy,
        jobs=len(outcomes),
        finished=len(jcts),
        admitted=len(admitted),
        rejected=len(outcomes) - len(admitted),
        deadline_met=sum(o.deadline_met for o in outcomes),
        admitted_missed=sum(not o.deadline_met for o in strict),
        avg_jct_s=_mean(jcts),
        p50_jct_s=_percentile(jcts, 50),
        p99_jct_s=_percentile(jcts, 99),
        avg_queue_s=_mean([o.queue_s for o in admitted]),
        makespan_s=max(ends, default=first) - first,
        utilization=recorder.used_s / recorder.device_s if recorder.device_s else 0.0,
        cluster_efficiency=recorder.efficient_s / recorder.device_s if recorder.device_s else 0.0,
        rescales=recorder.rescales,
        rounds=len(recorder.decision_s),
        decision_ms_mean=float(times.mean()),
        decision_ms_p95=float(np.percentile(times, 95)),
        decision_ms_max=float(times.max()),
        wall_s=wall_s,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else 0.0
