"""What the store holds about the live cluster: plain data. Times are seconds since 1970, by the wall clock.

A *slot* is named `NODE/INDEX`. A slot belongs to a job from the moment it is granted (`JobState.slots`) until neither
the controller grants it nor the keeper sees a process on it (`JobSeen.slots`); only then may another job have it.
The keeper says which order it has read (`JobSeen.heard`): from then on it starts nothing on slots that this order does
not grant, and `slots` names every slot that has a process. What was granted by orders before counts as used until then.

A keeper goes by phase and slots: an end phase (cancelled, rejected, failed): stop at once; no slots: suspend; else
train on exactly these slots. A job that is measured before admission is `submitted` with `profiling` and slots.
A keeper whose attempt is below `JobState.attempt` was given up and ends.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from concertina.core.job import JobPhase, Reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a user asked for. Never changes."""

    id: str
    name: str
    user: str
    script: str  # absolute path, on the machines that run it
    args: tuple[str, ...] = ()
    cwd: str = ""
    virtual: int = 1
    min_workers: int = 1
    max_workers: int = 0  # 0: as many as there are virtual workers
    steps: int = 0  # 0: as many as the script makes
    deadline_s: float | None = None
    soft: bool = False
    scaling: str = "consistent"
    level: str = "D1"
    submitted_s: float = 0.0
    idempotency: str = ""  # the key that a client may repeat its submission with

    @property
    def most(self) -> int:
        return min(self.max_workers or self.virtual, self.virtual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One line of a job's story."""

    at_s: float
    workers: int  # after it
    reason: str
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the controller has decided about a job."""

    id: str
    phase: JobPhase = JobPhase.SUBMITTED
    reason: str = ""  # of the last decision, one sentence
    slots: tuple[str, ...] = ()  # granted
    order: int = 0  # grows with every change of `slots` or `phase`: the keeper acts on the newest
    vacate_s: float = (
        2.0  # a slot that was taken away is free after so long, by force if need be; more where nobody waits
    )
    attempt: int = 0  # keepers started so far
    profiling: bool = False  # on its slots it only measures how fast it is; admission comes after
    pinned: int = 0  # workers that the user insists on; 0: as the policy likes
    curve: str = ""  # key of its curve; empty: not known yet
    work: float | None = None  # steps in all
    done: float = 0.0  # steps made, as last settled
    promised_s: float | None = None
    earliest_s: float | None = None  # of a refused job: what could have been promised
    admitted_s: float | None = None
    first_start_s: float | None = None
    ended_s: float | None = None
    waiting_since_s: float | None = None
    service_s: float = 0.0  # slot-seconds received
    executed_s: float = 0.0  # seconds with any slot
    settled_s: float = 0.0  # until when the two are counted
    level: int = 0
    stamp: float = 0.0
    reserved: Reserved = ()  # all three: what the policy noted, for its next round
    releasing: tuple[str, ...] = ()  # taken away; the keeper has not said yet that nothing runs there
    attempt_s: float = 0.0  # when the last keeper was started
    begun_s: float = 0.0  # when it was last given slots after it had none
    trains_s: float = 0.0  # since when it trains on them; 0: it is still on its way to its first step
    speeds: dict[int, float] = field(default_factory=dict)  # of this very job, as the policy is told (steps/s)
    speeds_type: str = ""  # the type of device on which they were seen
    failures: int = 0  # keepers that ended without being asked to, since it last made progress
    failed_at: float = 0.0  # the step at which that was
    unheard: int = 0  # keepers in a row that never said a word
    profiled_s: float | None = None  # when its first speed was measured, while it is being measured
    exit: int | None = None
    error: str = ""
    history: tuple[Change, ...] = ()  # the newest hundred

    @property
    def started_s(self) -> float:
        """When its way to its first step on these slots began: with the slots, or with another keeper."""
        return max(self.begun_s, self.attempt_s)


class Activity(StrEnum):
    """What a keeper is doing."""

    STARTING = "starting"
    TRAINING = "training"
    CHANGING = "changing"  # towards the slots it was granted
    SUSPENDING = "suspending"  # writing a checkpoint, to end
    SUSPENDED = "suspended"  # ended, state kept
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Activity.SUSPENDED, Activity.FINISHED, Activity.FAILED, Activity.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """What a job's keeper sees."""

    id: str
    attempt: int
    order: int = 0  # the newest that has been carried out
    heard: int = 0  # the newest that has been read
    activity: Activity = Activity.STARTING
    slots: tuple[str, ...] = ()  # with a process on them
    workers: int = 0  # that train together now
    generation: int = 0
    step: int = 0
    epoch: int = 0
    epochs: int = 0  # planned by the script; 0: not known
    total_steps: int = 0  # that the script will make, as far as it can be told; 0: not known
    trains_s: float = 0.0  # since when, without having been suspended; 0: not yet
    checkpoint_step: int = 0  # of the newest whole checkpoint
    values: dict[str, float] = field(default_factory=dict)  # what the script logged last
    speeds: dict[int, float] = field(default_factory=dict)  # steps/s by number of workers, as measured
    device_type: str = ""  # on which they were; empty: not known, or several at once
    pids: dict[str, int] = field(default_factory=dict)  # slot -> process
    exit: int | None = None
    error: str = ""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """Who keeps a job, while it does."""

    job: str
    attempt: int
    pid: int
    host: str
    started_s: float
    started_ticks: int = 0  # when its process began, by the kernel's count: a pid may be used again


class NodePhase(StrEnum):
    UP = "up"
    DRAINED = "drained"  # on request: its jobs move away, nothing new comes
    LOST = "lost"  # not seen any more


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A machine, or a part of one."""

    id: str
    device_type: str
    slots: int
    phase: NodePhase = NodePhase.UP
    address: str = ""  # others reach it at; empty: it is this machine
    reason: str = ""
    lent: tuple[int, ...] = ()  # indices of slots that are reclaimed for somebody else
    devices: tuple[str, ...] = ()  # names of its GPUs, which slots take in turn; empty: slot n has GPU n


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How fast a kind of job is."""

    key: str
    speeds: dict[int, float]  # steps/s by number of workers, measured; on whatever type of device
    types: dict[str, dict[int, float]] = field(default_factory=dict)  # the same by type of device, where that is known
    source: str = ""  # "measured before it started", "measured while it ran", "given"
    total_steps: int = 0  # that the script makes by itself; 0: not known

    def on(self, device_type: str) -> dict[int, float]:
        """On this type of device; where it was not seen there, on any."""
        return self.types.get(device_type) or self.speeds


class Op(StrEnum):
    CANCEL = "cancel"  # job
    RESIZE = "resize"  # job, number (0: as the policy likes again)
    DRAIN = "drain"  # node
    UNDRAIN = "undrain"
    RECLAIM = "reclaim"  # number of slots wanted back, on top of those already lent
    RETURN = "return"  # number of slots given again; 0: all
    PRUNE = "prune"  # forget jobs that ended so many seconds ago
    DOWN = "down"  # suspend everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Something that a user wants done."""

    id: str
    op: Op
    user: str
    target: str = ""  # a job or a node
    number: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of an ask."""

    id: str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """What holds for the whole cluster."""

    policy: str
    backend: str
    controller: str = ""  # who is in office
    going_down: bool = False
    down_s: float = 0.0  # when that was asked for: a controller started later takes it back
    lent: tuple[str, ...] = ()  # slots reclaimed for somebody else, in the order in which they were taken
    drained: tuple[str, ...] = ()  # nodes that are to be left
    prune_before_s: float = 0.0  # jobs that ended before are to be forgotten
    asks_done: tuple[str, ...] = ()  # the newest: so that none is done twice after a crash
    starts: tuple[float, ...] = ()  # seconds from slots to the first step, of the newest jobs that were started
    rounds: int = 0
    round_ms: float = 0.0  # that the last one took to decide
    error: str = ""  # why the last round could not decide; what was granted stays
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Somebody with a token, and what they may have at once."""

    name: str
    token: str  # its SHA-256 in hex; the token itself is shown once and kept nowhere
    admin: bool = False  # sees and touches the jobs of all
    max_jobs: int = 0  # that have not ended; 0: no limit, as below
    max_slots: int = 0  # that all of these could have together
    max_gpu_hours: float = 0.0  # slot-hours received by all jobs ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a user's jobs had received that are forgotten by now."""

    user: str
    service_s: float = 0.0  # slot-seconds
    jobs: tuple[str, ...] = ()  # the last that were counted in
