"""What a controller's turn takes and gives: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from concertina.cluster.records import (
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobSeen,
    JobState,
    NodeState,
    Reply,
    User,
)
from concertina.core.job import JobPhase, JobSpec, Reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is so, as of now. Nothing here was decided in this turn."""

    now: float
    nodes: tuple[NodeState, ...]  # as the backend sees them
    requests: Mapping[str, JobRequest]  # all there are
    fresh: tuple[JobRequest, ...] = ()  # those that have no state yet
    kinds: Mapping[str, str] = field(default_factory=dict)  # of the fresh ones; "": its script can not be read
    seen: Mapping[str, JobSeen] = field(default_factory=dict)
    registered: frozenset[str] = frozenset()  # jobs whose keeper holds its lease
    gone: frozenset[str] = frozenset()  # jobs of whose last keeper nothing is left
    curves: Mapping[str, Curve] = field(default_factory=dict)
    asks: tuple[Ask, ...] = ()
    users: Mapping[str, User] = field(default_factory=dict)
    ended: Mapping[str, JobPhase] = field(default_factory=dict)
    admit_most: int = 50  # admissions that this turn has time for
    promise_most: int = 5  # those with a strict deadline among them: they cost far more
    missing_s: Mapping[str, float] = field(default_factory=dict)  # job -> how long its keeper has held no lease
    not_started: Mapping[str, str] = field(default_factory=dict)  # job -> why its last keeper never was a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was decided before: all of it is in the store, or not worth keeping."""

    cluster: ClusterState
    live: Mapping[str, JobState] = field(default_factory=dict)  # jobs that have not ended, or still have processes
    notes: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # the policy's, by job: level and stamp
    reserved: Mapping[str, Reserved] = field(default_factory=dict)  # the policy's plans, by job
    specs: Mapping[str, tuple[JobState, JobSpec]] = field(default_factory=dict)  # as made of which state
    usable: frozenset[str] = frozenset()  # slots, as of the last round
    free: frozenset[str] = frozenset()
    dirty: bool = True  # a round is due whatever happened
    round_s: float = 0.0  # of the last one
    wake_s: float | None = None  # when the policy wants the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Something for the log."""

    event: str
    job: str = ""
    reason: str = ""
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a turn has decided."""

    memory: Memory
    states: Mapping[str, JobState] = field(default_factory=dict)  # those that are others than before
    at_rest: tuple[str, ...] = ()  # jobs that have ended and left nothing behind: not in `memory.live` any more
    nodes: tuple[NodeState, ...] = ()
    curves: tuple[Curve, ...] = ()  # to be stored
    replies: tuple[Reply, ...] = ()
    start: tuple[str, ...] = ()  # jobs whose keeper is to be started, once their state is written
    end: tuple[str, ...] = ()  # jobs whose keeper does not end by itself
    lines: tuple[Line, ...] = ()
    round: bool = False  # whether the policy was asked
    admissions: int = 0  # that it was asked for
    promises: int = 0  # with a strict deadline
