"""What goes in and out over HTTP. Limits are exact here, so that nothing beyond looks at odd input.

Times are seconds since 1970 unless the name says otherwise; `null` means not known.
"""

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from concertina.core.names import MOST_NAME, NAME, is_unicode

JOB_ID = r"^[a-z0-9][a-z0-9-]{0,79}$"
KEY = r"^[!-~]{1,128}$"  # an idempotency key: printable, without spaces
MOST_WORKERS = 1024
MOST_STEPS = 1_000_000_000
MOST_SECONDS = 1e11  # the year 5138
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _plain_text(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError("it has control characters; needed plain text on one line")
    if not is_unicode(text):
        raise ValueError("it has half of a character (a lone surrogate); needed text that UTF-8 can hold")
    return text


def _absolute(path: str) -> str:
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts:
        raise ValueError("needed an absolute path without '..'")
    return path


Text = Annotated[str, AfterValidator(_plain_text)]
AbsolutePath = Annotated[
    str, Field(min_length=2, max_length=4096), AfterValidator(_plain_text), AfterValidator(_absolute)
]
Name = Annotated[str, Field(pattern=NAME, min_length=1, max_length=MOST_NAME)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]


class Body(BaseModel):
    """What clients send: a field that nobody knows is a mistake worth hearing about."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JobAsk(Body):
    """A job to be run, or to be asked about."""

    script: AbsolutePath = Field(description="absolute path of the training script, on the machines that run it")
    args: list[Annotated[Text, Field(max_length=4096)]] = Field(default_factory=list, max_length=256)
    cwd: AbsolutePath | None = Field(default=None, description="folder to run it in; default: the script's own")
    name: Name | None = Field(default=None, description="default: from the script's name")
    user: Name | None = Field(default=None, description="for whom; only an admin may name somebody else")
    virtual: int = Field(default=4, ge=1, le=MOST_WORKERS, description="virtual workers; they decide the result")
    min_workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    max_workers: int = Field(default=0, ge=0, le=MOST_WORKERS, description="0: as many as there are virtual workers")
    steps: int = Field(default=0, ge=0, le=MOST_STEPS, description="0: as many as the script makes")
    deadline_s: Seconds | None = Field(default=None, description="seconds since 1970")
    deadline: Annotated[str, Field(max_length=40)] | None = Field(
        default=None, description="instead of deadline_s: ISO 8601 with a time zone, as 2026-12-01T18:00:00+01:00"
    )
    soft: bool = Field(default=False, description="the deadline is wanted, not needed: never refuse the job for it")
    scaling: Literal["consistent", "strong", "weak", "hybrid"] = "consistent"
    level: Literal["D0", "D1", "D2"] = "D1"

    @model_validator(mode="after")
    def _fits_together(self) -> "JobAsk":
        most = min(self.max_workers or self.virtual, self.virtual)
        if self.min_workers > most:
            raise ValueError(f"min_workers is {self.min_workers}, needed at most {most} (max_workers and virtual)")
        if self.deadline is not None and self.deadline_s is not None:
            raise ValueError("deadline and deadline_s are both given, needed one of them")
        due = self.due
        if self.soft and due is None:
            raise ValueError("soft needs a deadline to be soft about")
        return self

    @property
    def due(self) -> float | None:
        """The deadline in seconds since 1970."""
        if self.deadline is None:
            return self.deadline_s
        try:
            at = datetime.fromisoformat(self.deadline)
            seconds = at.timestamp()
        except (ValueError, OverflowError):
            raise ValueError("deadline is no ISO 8601 time, as 2026-12-01T18:00:00+01:00") from None
        if at.tzinfo is None:
            raise ValueError("deadline has no time zone, needed one as in 2026-12-01T18:00:00+01:00")
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError("deadline is out of range, needed a time after 1970")
        return seconds


class ResizeAsk(Body):
    workers: int = Field(ge=0, le=MOST_WORKERS, description="0: as the policy likes again")


class DrainAsk(Body):
    undrain: bool = Field(default=False, description="use the node again")


class ReclaimAsk(Body):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    slots: int = Field(default=0, ge=0, le=100_000, description="how many; with return, 0 means all")
    give_back: bool = Field(default=False, alias="return", description="the slots may be used again")


class PruneAsk(Body):
    older_s: int = Field(
        default=30 * 86_400, ge=86_400, le=1 << 40, description="jobs that ended more seconds ago than this"
    )
    dry_run: bool = Field(default=False, description="only say which")


class DownAsk(Body):
    """Nothing to say."""


class UserAsk(Body):
    """null: as it was; a new user is no admin and has no limits."""

    name: Name
    admin: bool | None = None
    max_jobs: int | None = Field(default=None, ge=0, le=1_000_000, description="live jobs at once; 0: no limit")
    max_slots: int | None = Field(default=None, ge=0, le=1_000_000, description="slots that they could have together")
    max_gpu_hours: float | None = Field(default=None, ge=0, le=1e12, allow_inf_nan=False)


# -- what is sent back ---------------------------------------------------------------------------------------------


class Fault(BaseModel):
    code: str
    message: str = Field(description="one sentence: what was seen and what was needed")
    hint: str = Field(description="what to try")


class ErrorBody(BaseModel):
    error: Fault


class HistoryLine(BaseModel):
    at_s: float
    workers: int
    reason: str
    step: int


class JobBody(BaseModel):
    """One job. In lists, `history` holds the newest three lines only."""

    id: str
    name: str
    user: str
    script: str
    args: list[str]
    cwd: str
    virtual: int
    min_workers: int
    max_workers: int
    steps: int
    scaling: str
    level: str
    phase: Literal["submitted", "rejected", "waiting", "running", "finished", "cancelled", "failed"]
    activity: str | None = Field(description="what its keeper is doing; null: it has none")
    profiling: bool = Field(description="it trains already, to see how fast it is; admission comes after")
    reason: str = Field(description="of the last decision")
    slots: list[str] = Field(description="granted, as NODE/INDEX")
    workers: int = Field(description="that train together now")
    pinned: int = Field(description="workers that the user insists on; 0: as the policy likes")
    step: int
    total_steps: int | None
    progress: float | None = Field(ge=0, le=1)
    epoch: int
    steps_per_s: float | None
    eta_s: float | None = Field(description="when it ends at this speed")
    deadline_s: float | None
    promised_s: float | None = Field(description="the deadline that was promised; null: none was")
    slack_s: float | None = Field(description="seconds between eta_s and the deadline; negative: too late")
    soft: bool
    submitted_s: float
    admitted_s: float | None
    first_start_s: float | None
    ended_s: float | None
    earliest_s: float | None = Field(description="of a refused job: the earliest deadline that can be promised")
    waiting_since_s: float | None
    generation: int
    checkpoint_step: int
    service_s: float = Field(description="slot-seconds received")
    failures: int
    values: dict[str, float | None] = Field(description="what the script logged last")
    history: list[HistoryLine]
    exit: int | None
    error: str


class JobPage(BaseModel):
    items: list[JobBody]
    total: int
    next: str | None = Field(description="give it as `after` to go on; null: this was the last page")


class LinePage(BaseModel):
    """Events of a job, as `run --events` writes them."""

    items: list[dict[str, Any]]
    next: int = Field(description="give it as `after` to go on")
    ended: bool = Field(description="nothing more will come")


class LogPage(BaseModel):
    worker: str | None
    workers: list[str] = Field(description="those that have a log")
    lines: list[str]
    next: int = Field(description="give it as `after` to go on")
    ended: bool


class Point(BaseModel):
    step: int
    at_s: float
    workers: int
    steps_per_s: float | None
    values: dict[str, float | None]


class GenerationBody(BaseModel):
    generation: int
    step: int
    workers: int
    reason: str
    at_s: float
    stop_s: float | None = Field(description="that training stood still for it; null: not measured yet, or never")
    phases: dict[str, float]


class MetricsBody(BaseModel):
    job: str
    points: list[Point]
    generations: list[GenerationBody]
    complete: bool = Field(description="false: ask again for the rest")


class BandBody(BaseModel):
    low_s: float | None
    expected_s: float | None
    high_s: float | None


class WhyBody(BaseModel):
    job: str
    phase: str
    why: str
    reason: str
    start: BandBody | None
    end: BandBody | None
    runs: int
    as_of_s: float


class DelayBody(BaseModel):
    job: str | None = Field(description="null: somebody else's")
    by_s: float | None
    before_s: float | None
    after_s: float | None


class QuoteBody(BaseModel):
    taken: bool
    reason: str
    earliest_s: float | None
    start: BandBody | None
    end: BandBody | None
    delays: list[DelayBody]
    runs: int
    profiled: bool = Field(description="whether such a job is known; if not, this rests on a guess")
    as_of_s: float


class NodeBody(BaseModel):
    id: str
    device_type: str
    slots: int
    phase: Literal["up", "drained", "lost"]
    address: str
    reason: str
    lent: list[int]
    busy: int


class NodePage(BaseModel):
    items: list[NodeBody]
    total: int
    next: str | None


class SlotBody(BaseModel):
    slot: str
    node: str
    state: Literal["free", "busy", "leaving", "lent", "drained", "lost"]
    job: str | None


class SlotCounts(BaseModel):
    total: int
    free: int
    busy: int
    lent: int
    away: int = Field(description="on nodes that are drained or lost")


class ClusterBody(BaseModel):
    policy: str
    backend: str
    controller: str
    leader: bool = Field(description="whether a controller is in office")
    going_down: bool
    rounds: int
    round_ms: float
    at_s: float
    revision: int
    slots: SlotCounts
    placement: list[SlotBody]
    jobs: dict[str, int] = Field(description="how many are in each phase")
    nodes: list[NodeBody]


class Series(BaseModel):
    job: str | None
    name: str
    points: list[tuple[float, int]] = Field(description="(when, workers from then on)")


class HistoryBody(BaseModel):
    from_s: float
    to_s: float
    slots: int
    series: list[Series]
    left_out: int = Field(description="jobs that were there too, beyond the limit")


class AnswerBody(BaseModel):
    accepted: bool
    reason: str


class PruneBody(AnswerBody):
    jobs: list[str]


class SessionBody(BaseModel):
    user: str
    admin: bool
    token_needed: bool
    max_jobs: int
    max_slots: int
    max_gpu_hours: float


class UserBody(BaseModel):
    name: str
    admin: bool
    max_jobs: int
    max_slots: int
    max_gpu_hours: float


class NewUserBody(UserBody):
    token: str = Field(description="shown this once")


class UserPage(BaseModel):
    items: list[UserBody]
    total: int
    next: str | None


class HealthBody(BaseModel):
    ok: bool
    leader: bool
    stale_s: float = Field(description="since when the store does not answer; 0: it does")
    revision: int
    version: str
