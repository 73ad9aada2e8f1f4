"""What a keeper learns of its job from the event stream. Pure: events in, figures out."""

import re
from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any

RECENT = 32  # measurements that a speed is taken from: single steps, or as many as take this long together
SHORTEST_S = 0.1
WARM_UP = 3  # steps after a change that say nothing about speed
FEWEST = 5  # measurements that make a speed
MOST_STEPS = 10**15  # that a job can be believed to make: whatever a script says is reckoned with
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def plain(text: str) -> str:
    """On one line, and without what would do something to the terminal of whoever reads it."""
    return _CONTROL.sub(" ", text).strip()


class SpeedMeter:
    """Steps per second by number of workers: of the recent steps, the usual one."""

    def __init__(self, speeds: Mapping[int, float]) -> None:
        self.speeds = dict(speeds)  # what was measured before holds until it is measured again
        self._gaps: dict[int, deque[float]] = {}  # seconds per step, by number of workers
        self._last: tuple[int, float] | None = None
        self._open = (0, 0.0)  # steps of a measurement that goes on, and the seconds they took
        self._all: dict[int, tuple[int, float]] = {}  # the same of all steps, where there is no speed yet
        self._skip = WARM_UP

    def forget(self) -> None:
        """Other devices: what was measured says nothing about them."""
        self.speeds.clear()
        self._gaps.clear()
        self._all.clear()
        self.disturbed()

    def disturbed(self) -> None:
        """Something happens beside training: the next steps are not usual ones."""
        self._last, self._skip, self._open = None, WARM_UP, (0, 0.0)

    def stepped(self, step: int, at: float, workers: int) -> None:
        last, self._last = self._last, (step, at)
        if last is None or step != last[0] + 1 or at <= last[1] or workers < 1:
            return
        if self._skip:
            self._skip -= 1
            return
        gaps = self._gaps.setdefault(workers, deque(maxlen=RECENT))
        self._open = steps, seconds = _later(self._open, at - last[1])
        if seconds >= SHORTEST_S:
            gaps.append(seconds / steps)
            self._open = (0, 0.0)
        if len(gaps) >= FEWEST:
            self.speeds[workers] = round(1.0 / median(gaps), 4)
        elif workers in self._all or workers not in self.speeds:  # a job of a second has a speed, too
            self._all[workers] = steps, seconds = _later(self._all.get(workers, (0, 0.0)), at - last[1])
            if steps >= FEWEST:
                self.speeds[workers] = round(steps / seconds, 4)


def _later(so_far: tuple[int, float], gap: float) -> tuple[int, float]:
    return so_far[0] + 1, so_far[1] + gap


class JobBook:
    """How far the job is, how fast, and who trains."""

    def __init__(self, *, steps: int = 0, speeds: Mapping[int, float] | None = None) -> None:
        """`steps`: the most that the job was asked to make; 0: as many as the script does."""
        self._bound = steps
        self.meter = SpeedMeter(speeds or {})
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self.step = 0
        self.epoch = 0
        self.epochs = 0
        self.batches = 0  # per epoch: steps, once a whole epoch was seen
        self.checkpoint_step = 0
        self.values: dict[str, float] = {}
        self.trains = False  # the first members are together
        self.changes = False  # the master is making a change
        self.finishes = False  # the script has made its last step
        self.left: frozenset[int] = frozenset()  # were members of an earlier generation
        self.carried_out = 0  # the newest order that is
        self._epoch_began: tuple[int, int, bool] | None = None  # epoch, step, whether that is its very beginning

    @property
    def total_steps(self) -> int:
        """That the script will make, as far as it can be told; 0: not known."""
        whole = min(self.epochs * self.batches, MOST_STEPS)
        return min(whole, self._bound) if whole and self._bound else whole or self._bound

    def begin(self) -> None:
        """The job is started (again)."""
        self.members, self.left, self.trains, self.changes, self.finishes = (), frozenset(), False, False, False
        self._epoch_began = None
        self.meter.disturbed()

    def note(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, event)


def _on_step(book: JobBook, event: Mapping[str, Any]) -> None:
    book.trains = True
    book.step, book.epoch = event["step"], event["epoch"]
    if event["log"]:
        book.values = {plain(name): value for name, value in event["log"].items() if isfinite(value)}
    if not book.changes:
        book.meter.stepped(event["step"], event["at"], len(book.members))


def _on_training(book: JobBook, event: Mapping[str, Any]) -> None:
    if event["worker"] in book.members:
        book.trains = True
        book.step, book.epoch = event["step"], event["epoch"]


def _on_planned(book: JobBook, event: Mapping[str, Any]) -> None:
    book.epochs = event["epochs"]
    book.batches = book.batches or event["batches"]


def _on_epoch(book: JobBook, event: Mapping[str, Any]) -> None:
    """How many steps the epoch before really took: a script may accumulate gradients over batches."""
    if event["worker"] not in book.members[:1]:
        return
    began, whole = book._epoch_began, book._epoch_began is not None or event["step"] == 0
    book._epoch_began = (event["epoch"], event["step"], whole)  # a job that goes on is in the middle of its first
    book.epochs = event["epochs"]
    if began is not None and began[2] and event["epoch"] == began[0] + 1 and event["step"] > began[1]:
        book.batches = event["step"] - began[1]


def _on_finished(book: JobBook, event: Mapping[str, Any]) -> None:
    book.step, book.finishes = max(book.step, event["step"]), True


def _on_checkpoint(book: JobBook, event: Mapping[str, Any]) -> None:
    book.checkpoint_step = max(book.checkpoint_step, event["step"])


def _on_change_begun(book: JobBook, event: Mapping[str, Any]) -> None:
    book.changes = True
    book.meter.disturbed()


def _on_change_abandoned(book: JobBook, event: Mapping[str, Any]) -> None:
    book.changes = False
    book.meter.disturbed()


def _on_generation_started(book: JobBook, event: Mapping[str, Any]) -> None:
    now = tuple(event["members"])
    book.left |= frozenset(book.members) - frozenset(now)
    book.members, book.generation, book.changes, book.finishes = now, event["generation"], False, False
    book.meter.disturbed()


_HANDLERS = {
    "step": _on_step,
    "training": _on_training,
    "planned": _on_planned,
    "epoch": _on_epoch,
    "finished": _on_finished,
    "checkpoint": _on_checkpoint,
    "change_begun": _on_change_begun,
    "change_abandoned": _on_change_abandoned,
    "generation_started": _on_generation_started,
}
