"""Everything that a worker process is told through its environment, and the only place that names the variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from concertina.core.errors import UsageError
from concertina.core.placement import VirtualPlacement

PREFIX = "CONCERTINA_"
LEVELS = ("D0", "D1", "D2")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnv:
    """What one worker of one generation knows when it starts.

    The defaults describe a script that was started with plain `python`: a job of one worker and one virtual worker.
    """

    virtual: int = 1  # P, never changes during a job
    workers: int = 1  # W of this generation
    worker: int = 0  # place of this worker, 0..W-1
    generation: int = 0
    launched: bool = False  # true under `concertina run`
    run_dir: str = ""  # where this generation's workers find each other
    resume: str = ""  # checkpoint folder to start from
    stop_at: int = 0  # end of this generation: hand over after this step; 0 means never
    steps: int = 0  # upper bound on steps of the job; 0 means none
    handover_dir: str = ""  # where a generation that ends leaves its state
    checkpoint_dir: str = ""  # the user's checkpoints
    checkpoint_every: int = 0  # steps between checkpoints; 0 means only at the end or on a signal
    events_fd: int = -1  # pipe to whoever started us
    threads: int = 0  # intra-op threads of torch, part of the result; 0 leaves torch's default
    level: str = "D1"
    reduction: str = "auto"  # auto, ring or contexts
    record_dir: str = ""  # where `verify` wants per-step digests

    def __post_init__(self) -> None:
        if self.virtual < 1:
            raise UsageError(f"a job needs at least 1 virtual worker, not {self.virtual}: use --virtual 1 or more")
        if not 1 <= self.workers <= self.virtual:
            raise UsageError(
                f"{self.workers} workers for {self.virtual} virtual workers: use 1 to {self.virtual} workers, "
                f"or raise --virtual (it decides the result, so choose it once)"
            )
        if self.level not in LEVELS:
            raise UsageError(f"determinism level {self.level!r} is not one of {', '.join(LEVELS)}")

    @property
    def placement(self) -> VirtualPlacement:
        return VirtualPlacement.blocks(self.virtual, self.workers)

    def to_environ(self) -> dict[str, str]:
        """The variables to start a worker with."""
        return {PREFIX + name.upper(): str(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerEnv":
        values: dict[str, int | str | bool] = {}
        for name, field in cls.__dataclass_fields__.items():
            raw = environ.get(PREFIX + name.upper())
            if raw is None:
                continue
            if isinstance(field.default, bool):
                values[name] = raw == "True"
            elif isinstance(field.default, int):
                values[name] = _integer(PREFIX + name.upper(), raw)
            else:
                values[name] = raw
        return cls(**values)  # type: ignore[arg-type]


def _integer(name: str, raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        raise UsageError(f"{name}={raw!r} in the environment is not a whole number") from None
