"""What a simulation gives back: per-job outcomes, the timeline, the decisions, and the summary.

Definitions follow the papers: JCT is end minus submission; pending time is all time without devices before
the end; utilization is device-seconds held over device-seconds there were; cluster efficiency is
ElasticFlow's equation 8; finish-time fairness is Themis's rho.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from concertina.core.cluster import Cluster
from concertina.core.job import JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How one job fared. Times are seconds on the trace's clock."""

    job_id: str
    user: str
    gpus: int
    """Devices asked for."""
    submit_s: float
    start_s: float | None
    """First moment with devices. None: never."""
    end_s: float | None
    """When it finished, failed or was cancelled. None: rejected, or not over when the simulation ended."""
    deadline_s: float | None
    soft: bool
    phase: JobPhase
    """The phase it ended in: FINISHED, REJECTED, CANCELLED, FAILED (or WAITING/RUNNING if cut short)."""
    queue_s: float
    """All time without devices between submission and end."""
    device_s: float
    """Device-seconds held."""
    rescales: int
    """Changes of its devices while it went on running."""
    preemptions: int
    """Times it lost all its devices."""
    workers_last: int
    """Devices held when it ended."""
    alone_s: float
    """How long it would take alone on `gpus` devices, at its true speed."""
    fair_share: float
    """Finish-time fairness rho: JCT / (alone_s x average contention). 0 if it did not finish."""
    reason: str
    """The last word about it: why it was rejected, or how it ended."""

    @property
    def jct_s(self) -> float | None:
        """Job completion time; None unless it finished."""
        if self.phase is not JobPhase.FINISHED or self.end_s is None:
            return None
        return self.end_s - self.submit_s

    @property
    def deadline_met(self) -> bool:
        """Whether it had a deadline and finished by then."""
        return (
            self.phase is JobPhase.FINISHED
            and self.deadline_s is not None
            and self.end_s is not None
            and self.end_s <= self.deadline_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in which a job held the same devices."""

    job_id: str
    start_s: float
    end_s: float
    workers: int
    device_type: str
    """The type; several are joined with `+`."""
    nodes: tuple[tuple[str, int], ...]
    """(node id, devices) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """The cluster from `time_s` until the next point."""

    time_s: float
    devices: int
    """Devices that are up."""
    used: int
    running: int
    waiting: int
    efficiency: float
    """Sum over running jobs of (speed now / speed on one device), over `devices` (ElasticFlow eq. 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing that was decided, with its reason: a line of `simulate --log`."""

    time_s: float
    job_id: str
    action: str
    """admit, reject, launch, resize, move, stop, wait, finish, cancel, fail"""
    before: int
    after: int
    """Devices before and after."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The fields of `simulate --json`, in its order."""

    trace: str
    policy: str
    jobs: int
    finished: int
    admitted: int
    rejected: int
    deadline_met: int
    admitted_missed: int
    """Jobs with a strict deadline that were admitted and did not finish by it."""
    avg_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    avg_queue_s: float
    makespan_s: float
    """Last end minus first submission."""
    utilization: float
    cluster_efficiency: float
    rescales: int
    rounds: int
    decision_ms_mean: float
    decision_ms_p95: float
    decision_ms_max: float
    wall_s: float

    def as_dict(self) -> dict[str, str | int | float]:
        """The JSON object, keys in the documented order."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything a simulation found out."""

    cluster: Cluster
    summary: Summary
    outcomes: tuple[JobOutcome, ...]
    """One per job of the trace, in order of submission (then of the trace)."""
    spans: tuple[Span, ...] = ()
    """The allocation timeline by start; empty unless recorded."""
    load: tuple[LoadPoint, ...] = ()
    """The cluster's load by time; empty unless recorded."""
    decisions: tuple[Decision, ...] = ()
    """Everything decided, by time; empty unless recorded."""
