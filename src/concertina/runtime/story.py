"""What a worker tells the world about training: events for whoever started it, notes for `verify`, the user's hooks."""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from concertina.runtime.course import Course
from concertina.runtime.data import Feed
from concertina.runtime.events import EventPipe
from concertina.runtime.recorder import Recorder

if TYPE_CHECKING:
    from concertina.runtime.member import Member

MOST_LOGGED = 40  # values per step in the event stream


class Story:
    """One worker's."""

    def __init__(self, events: EventPipe, course: Course) -> None:
        self.events = events
        self.recorder: Recorder | None = None
        self.hooks: list[Callable[[int, int], None]] = []  # of the user, for every generation that begins to train
        self._course = course
        self._logged: dict[str, Any] = {}
        self._unsent: tuple[int, int, float, dict[str, Any]] | None = None
        self._owed: list[dict[str, Any]] = []  # of `samples` that the main worker has to tell

    def plan(self, epochs: int) -> None:
        """What the script will make, as far as it can be told: it mostly trains on its first loader."""
        loaders = self._course.loaders
        first = loaders[0].feed if loaders else None
        batches = first.batches_per_epoch if isinstance(first, Feed) else 0  # a stream's are known when it was read
        self.events.emit("planned", epochs=epochs, batches=batches, step=self._course.step)

    # -- steps -------------------------------------------------------------------------------------------------------

    def log(self, values: dict[str, Any]) -> None:
        """Values of virtual worker 0 in the step that is under way."""
        self._logged.update({k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()})

    def step(self, is_main: bool) -> None:
        """Reports the step before this one, whose numbers the GPU has surely computed by now."""
        if is_main and self.events.connected:
            self.flush_step()
            self._unsent = (self._course.step, self._course.epoch, time.monotonic(), self._logged)
        self._logged = {}

    def flush_step(self) -> None:
        if self._unsent is not None:
            step, epoch, at, values = self._unsent
            self.events.emit("step", step=step, epoch=epoch, at=at, log=numbers_among(values))
            self._unsent = None

    # -- in the place of the main worker -----------------------------------------------------------------------------

    def owe_samples(self, fields: dict[str, Any]) -> None:
        """The main worker tells this, and comes to the next meeting after that; who knows whether it lives so long."""
        self._owed.append(fields)

    def met(self) -> None:
        """Everybody has come to a meeting."""
        self._owed.clear()

    def tell_owed(self) -> None:
        """Somebody is lost: should it be the main worker, others say what it was about to say. To say it twice does no
        harm."""
        for fields in self._owed:
            self.events.emit("samples", **fields)
        self._owed.clear()

    # -- changes -----------------------------------------------------------------------------------------------------

    def batch(self, is_main: bool) -> None:
        """Batches have another size from now on."""
        scale = self._course.scale
        if is_main and scale.total:
            self.events.emit("batch", step=self._course.step, total=scale.total, reason=scale.reason)

    def generation(self, event: str, member: "Member") -> None:
        """Training goes on in another generation."""
        elastic, step = member.elastic, self._course.step
        number, workers = elastic.generation.formation.generation, elastic.generation.fabric.size
        self.events.emit(event, step=step, joined=number, workers=workers, seconds=elastic.switched_at)
        if self.recorder is not None:
            self.recorder.began(step)
        self.call_hooks(number, workers)

    def call_hooks(self, generation: int, workers: int) -> None:
        for hook in self.hooks:
            hook(generation, workers)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()


def numbers_among(values: dict[str, Any]) -> dict[str, float]:
    """What of logged values can be shown as numbers; logging must never end a training run."""
    found: dict[str, float] = {}
    for name, value in list(values.items())[:MOST_LOGGED]:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            found[name[:40]] = float(value)
    return found
