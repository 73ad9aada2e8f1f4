"""What the machine of a job's master remembers, hears and says: plain data, without behaviour."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from concertina.core.formation import Formation

EXIT_INTERRUPTED_BY_USER = 130  # as shells report Ctrl-C


class Phase(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    REGROUPING = "regrouping"  # a member was lost; waiting until every survivor has stopped
    STOPPING = "stopping"  # a worker failed or somebody interrupted; waiting for the rest to end
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


OVER = (Phase.FINISHED, Phase.INTERRUPTED, Phase.FAILED)


class Stage(StrEnum):
    """Of a change under way."""

    STARTING = "starting"  # newcomers start; nobody else knows of it
    BUILDING = "building"  # all who will train together build, newcomers catch up
    ARMED = "armed"  # members agree among themselves when to change over


@dataclass(frozen=True, slots=True)
class Change:
    """From optimizer step `step` on, train with `workers` workers."""

    step: int
    workers: int


Shares = tuple[tuple[int, ...], ...]  # virtual workers by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What is known of one process."""

    post: str = ""  # where its page for the next generation is; each is good for one
    desk: str = ""  # empty until it has arrived
    ready: bool = False  # a newcomer: everything is built, it can catch up
    leaves: str = ""  # why it is to go, if it is
    said: str = ""  # why it is about to end
    stuck: str = ""  # why it is being ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A change under way."""

    generation: int
    members: tuple[int, ...]
    shares: Shares
    joiners: tuple[int, ...]
    leavers: tuple[int, ...]
    reason: str
    hold_at: int = 0  # the step after which it is to take place; 0: when it is ready
    stage: Stage = Stage.STARTING
    built: tuple[int, ...] = ()
    synced: tuple[int, ...] = ()
    switched: tuple[int, ...] = ()
    step: int = -1  # after which the members changed over


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    virtual: int
    target: int  # workers wanted
    minimum: int = 1  # with fewer, nobody trains
    maximum: int = 0  # 0: as many as there are virtual workers
    phase: Phase = Phase.STARTING
    generation: int = 0  # in force
    members: tuple[int, ...] = ()  # by rank; the first has virtual worker 0 and is the main worker
    shares: Shares = ()
    workers: dict[int, Worker] = field(default_factory=dict)  # alive: members, leavers and newcomers
    pending: Pending | None = None
    schedule: tuple[Change, ...] = ()  # still to come
    speeds: dict[int, float] = field(default_factory=dict)  # mini-batches/s, where workers were found uneven
    uneven: str = ""  # what was found
    next_worker: int = 0
    next_generation: int = 0
    told: bool = False  # the generation in force has been announced to its members
    formed: tuple[int, ...] = ()  # members of the generation in force that have built it
    stopped: dict[int, int] = field(default_factory=dict)  # survivors that wait -> the generation they are in
    dropped: tuple[int, ...] = ()  # members that did not change over and go on as they were
    lost: tuple[int, ...] = ()  # since the last regrouping
    exits: dict[int, int] = field(default_factory=dict)  # of members that have come to their end
    failure: str = ""
    exit_code: int = 0
    interrupted: bool = False
    step: int = 0
    record: int = 0  # the farthest step that was ever reached
    pace: float = 0.0  # seconds per step, measured
    attempts: int = 0  # at the change under way
    pause_s: float = 0.0  # to wait before the next one; 0: none
    losses: int = 0  # times that members were lost since the job last came farther than ever
    resume: bool = False  # whether the next fresh start goes on from a checkpoint

    @property
    def most(self) -> int:
        return min(self.maximum or self.virtual, self.virtual)


# -- events, past tense ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerArrived:
    """A worker has reached us, with a page for its first generation."""

    worker: int
    post: str
    desk: str


@dataclass(frozen=True, slots=True)
class PostOffered:
    """A page for the generation after the one that was just told of."""

    worker: int
    post: str


@dataclass(frozen=True, slots=True)
class NewcomerReady:
    worker: int


@dataclass(frozen=True, slots=True)
class Built:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Synced:
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class Switched:
    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A survivor noticed a loss and waits; it has passed the same steps as all others."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member has heard that a newcomer is gone, did not change over, and no longer will."""

    worker: int
    generation: int  # that will never be


@dataclass(frozen=True, slots=True)
class BuildFailed:
    worker: int
    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: int
    code: int


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker said why it is about to end."""

    worker: int
    error: str


@dataclass(frozen=True, slots=True)
class Progressed:
    worker: int
    step: int
    pace: float  # seconds per step, 0 if not known


@dataclass(frozen=True, slots=True)
class UnevenFound:
    """In this generation, dealing virtual workers out by these speeds would make steps clearly shorter."""

    generation: int
    speeds: dict[int, float]  # mini-batches/s by worker
    reason: str


@dataclass(frozen=True, slots=True)
class SlowFound:
    """Without this worker, steps would be clearly shorter, even though it has as little to do as can be."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class StuckFound:
    """This worker gives no sign of life, or the others wait for it in vain."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class PauseOver:
    """A change that has failed again and again may be tried once more."""


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    request: str
    workers: int


@dataclass(frozen=True, slots=True)
class RemovalAsked:
    """These workers are to go; others come in their place if `replaced` is set."""

    request: str
    workers: tuple[int, ...]
    replaced: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """Whoever schedules wants one now; training goes on."""

    request: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """The user pressed Ctrl-C or the machine wants its slots back."""


Event = (
    WorkerArrived
    | PostOffered
    | NewcomerReady
    | Built
    | Synced
    | Switched
    | Stopped
    | Dropped
    | BuildFailed
    | WorkerExited
    | WorkerFailed
    | Progressed
    | UnevenFound
    | SlowFound
    | StuckFound
    | PauseOver
    | ResizeAsked
    | RemovalAsked
    | CheckpointAsked
    | InterruptAsked
)


# -- commands, imperative --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    worker: int
    generation: int
    members: tuple[int, ...]  # empty: it joins a job that is training
    resume: bool  # from the newest checkpoint
    hold_at: int = 0  # a change is planned after this step


@dataclass(frozen=True, slots=True)
class Form:
    """Build this generation: in the background and to be voted on, or at once."""

    formation: Formation
    to: tuple[int, ...]
    at_once: bool


@dataclass(frozen=True, slots=True)
class Arm:
    generation: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    generation: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A planned change will not take place: nobody has to wait for it, but for the one after it, if any."""

    to: tuple[int, ...]
    generation: int  # the newest that they have been told of; the words hold for all up to it
    next_hold: int = 0


@dataclass(frozen=True, slots=True)
class TellLost:
    """These have ended and will post nothing more."""

    lost: tuple[int, ...]
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint after the next step: one worker's wish is everybody's."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Nothing of what you hold is needed any more: end."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Workers are to write a checkpoint at the next step boundary and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillWorkers:
    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellStory:
    """For report, event stream and terminal."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    request: str
    accepted: bool
    reason: str


ToWorkers = Form | Arm | Abandon | Release | TellLost | Save | Dismiss
Command = StartWorker | ToWorkers | AskToStop | KillWorkers | TellStory | Answer
Commands = tuple[Command, ...]
Result = tuple[State, Commands]
