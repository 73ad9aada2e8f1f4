"""Everything that a worker process is told through its environment, and the only place that names the variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.core.batch_scaling import Scaling
from concertina.core.errors import UsageError

PREFIX = "CONCERTINA_"
LEVELS = ("D0", "D1", "D2")
REDUCTIONS = ("auto", "shared", "ring", "contexts")
LONGEST_HOST = 64  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnv:
    """What one worker of one generation knows when it starts.

    The defaults describe a script that was started with plain `python`: a job of one worker and one virtual worker.
    """

    virtual: int = 1  # P, never changes during a job
    worker: int = 0  # number of this worker; never used twice in a job
    members: tuple[int, ...] = (0,)  # who starts together, by rank; empty: joins a job that is training
    generation: int = 0
    hold_at: int = 0  # a change is planned after this step; 0: none
    launched: bool = False  # true under `concertina run`
    run_dir: str = ""  # for what workers must find in the file system
    store: str = ""  # where to learn who the master is
    job: str = ""
    key: str = ""  # that members of the job know each other by
    host: str = ""  # address that workers on other hosts reach this one at; empty: all are on this machine
    rack: str = ""  # the host's own word for where it stands; hosts with the same are near each other
    orphan_s: float = 60.0  # on several hosts: without a word from any master for so long, a worker ends itself
    resume: str = ""  # checkpoint folder to start from
    steps: int = 0  # upper bound on steps of the job; 0 means none
    checkpoint_dir: str = ""  # the user's checkpoints
    checkpoint_every: int = 0  # steps between checkpoints; 0 means only at the end or on a signal
    checkpoint_seconds: int = 0  # or so long after the last one; 0 means by steps only
    events_fd: int = -1  # pipe to whoever started us
    threads: int = 0  # intra-op threads of torch, part of the result; 0 leaves torch's default
    level: str = "D1"
    reduction: str = "auto"  # one of REDUCTIONS
    record_dir: str = ""  # where `verify` wants per-step digests
    scaling: str = "consistent"  # what a change of workers does to the batch
    from_workers: int = 1  # how many the job began with, which batches are counted from
    ramp: int = 100  # steps in which the learning rate follows a change of the batch
    largest_batch: int = 0  # samples that the device takes at once, for session.parts(); 0: any number

    def __post_init__(self) -> None:
        if self.virtual < 1:
            raise UsageError(f"a job needs at least 1 virtual worker, not {self.virtual}: use --virtual 1 or more")
        check_workers(len(self.members), self.virtual, least=0)
        if self.level not in LEVELS:
            raise UsageError(f"determinism level {self.level!r} is not one of {', '.join(LEVELS)}")
        if self.reduction not in REDUCTIONS:
            raise UsageError(f"--reduction {self.reduction!r} is not one of {', '.join(REDUCTIONS)}")
        if self.scaling not in list(Scaling):
            raise UsageError(f"--scaling {self.scaling!r} is not one of {', '.join(Scaling)}")
        if len(self.host) > LONGEST_HOST or "/" in self.host or "@" in self.host:
            raise UsageError(f"{self.host!r} is no address of a host: give an IP address or a short name")
        if self.ramp < 0 or self.largest_batch < 0:
            raise UsageError("--ramp and --largest-batch take numbers from 0 up")

    @property
    def joins(self) -> bool:
        """Whether the others are training already."""
        return not self.members

    def to_environ(self) -> dict[str, str]:
        """The variables to start a worker with."""
        return {PREFIX + name.upper(): _text(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerEnv":
        values: dict[str, int | float | str | bool | tuple[int, ...]] = {}
        for name, field in cls.__dataclass_fields__.items():
            raw = environ.get(PREFIX + name.upper())
            if raw is None:
                continue
            if isinstance(field.default, bool):
                values[name] = raw == "True"
            elif isinstance(field.default, tuple):
                values[name] = tuple(_integer(PREFIX + name.upper(), part) for part in raw.split(",") if part)
            elif isinstance(field.default, int):
                values[name] = _integer(PREFIX + name.upper(), raw)
            elif isinstance(field.default, float):
                values[name] = _seconds(PREFIX + name.upper(), raw)
            else:
                values[name] = raw
        return cls(**values)  # type: ignore[arg-type]


def check_workers(workers: int, virtual: int, least: int = 1) -> None:
    if not least <= workers <= virtual:
        raise UsageError(
            f"{workers} workers for {virtual} virtual workers: use 1 to {virtual} workers, "
            f"or raise --virtual (it decides the result, so choose it once)"
        )


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _integer(name: str, raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        raise UsageError(f"{name}={raw!r} in the environment is not a whole number") from None


def _seconds(name: str, raw: str) -> float:
    try:
        return float(raw)
    except ValueError:
        raise UsageError(f"{name}={raw!r} in the environment is not a number of seconds") from None
