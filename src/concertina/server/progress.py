"""Loss and speed over time, for charts: a job's events read as far as they go, kept, and thinned out evenly.

However long a job is, at most `MOST` points are kept: when there are more, every second one goes, and from then on
only every second, fourth, ... step is taken up.
"""

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.report import Generation, GenerationBook, Report
from concertina.server.files import events_path, parse, read_lines
from concertina.server.views import finite

MOST = 1000  # points
CHUNK_BYTES = 1 << 20
CALL_BYTES = 4 << 20  # read in one call; the rest in the next
JOBS = 64  # whose charts are remembered
STORY = ("change_begun", "generation_started")


@dataclass(slots=True)
class Begun:
    """A generation, as far as it is known by now."""

    at_s: float
    row: Generation
    stop_s: float | None = None  # as its runner measured it: of a long job, not all steps are in the events


@dataclass(slots=True)
class Chart:
    """One job's."""

    after: int = 0  # bytes read
    every: int = 1  # steps between two points
    workers: int = 0
    points: list[dict[str, Any]] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)  # of every run
    ahead: float | None = None  # of the wall clock against the one that workers measure by
    report: Report = field(init=False)
    book: GenerationBook = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._begin_run()

    def _begin_run(self) -> None:
        self.report = Report(virtual=1)
        self.book = GenerationBook(self.report)

    def _is_new_run(self, generation: int) -> bool:
        """Generations and workers are counted anew when a job goes on after it was suspended."""
        had = self.report.generations
        return bool(had) and (generation == 0 or generation < had[-1].generation)

    def note(self, event: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError if the event is not what its name says."""
        kind = event["event"]
        if kind == "generation_started" and self._is_new_run(int(event["generation"])):
            self._begin_run()
        if kind in STORY:
            at = {} if self.ahead is None else {"at": float(event["time"]) - self.ahead}
            self.book.story({**event, **at})
            if kind == "generation_started":
                self.workers = int(event["workers"])
                self.begun.append(Begun(float(event["time"]), self.report.generations[-1]))
            return
        if "worker" in event and "at" in event:
            self.ahead = float(event["time"]) - float(event["at"])
        if kind == "generation_timed":
            self._timed(event)
        elif kind != "step":
            self.book.note(event)
        elif int(event["step"]) % self.every == 0:
            self._point(event)

    def _timed(self, event: dict[str, Any]) -> None:
        for begun in reversed(self.begun):  # the newest with that number: earlier runs had theirs
            if begun.row.generation == int(event["generation"]):
                begun.stop_s = float(event["stop_s"])
                return

    def _point(self, event: dict[str, Any]) -> None:
        step, at = int(event["step"]), float(event["time"])
        while self.points and self.points[-1]["step"] >= step:
            self.points.pop()  # it went back to a checkpoint
        speed = None
        if self.points and at > self.points[-1]["at_s"]:
            speed = (step - self.points[-1]["step"]) / (at - self.points[-1]["at_s"])
        log = event.get("log") or {}
        # null: it was not a number, and a chart goes on without it
        values = {str(name): None if value is None else finite(float(value)) for name, value in log.items()}
        self.points.append(
            {"step": step, "at_s": at, "workers": self.workers, "steps_per_s": finite(speed), "values": values}
        )
        if len(self.points) > MOST:
            self.every *= 2
            self.points = [point for point in self.points if point["step"] % self.every == 0]

    def generations(self) -> list[dict[str, Any]]:
        return [
            {
                "generation": begun.row.generation,
                "step": begun.row.step,
                "workers": begun.row.workers,
                "reason": begun.row.reason,
                "at_s": begun.at_s,
                "stop_s": begun.stop_s,
                "phases": dict(begun.row.phases),
            }
            for begun in self.begun[-200:]
        ]


class Progress:
    """The charts of the jobs that somebody looks at. Touches the disk: call it from a thread."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._charts: OrderedDict[str, Chart] = OrderedDict()
        self._lock = threading.Lock()

    def chart(self, job_id: str) -> dict[str, Any]:
        with self._lock:
            chart = self._charts.setdefault(job_id, Chart())
            self._charts.move_to_end(job_id)
            while len(self._charts) > JOBS:
                self._charts.popitem(last=False)
        with chart.lock:
            complete = self._read_on(job_id, chart)
            return {
                "job": job_id,
                "points": list(chart.points),
                "generations": chart.generations(),
                "complete": complete,
            }

    def _read_on(self, job_id: str, chart: Chart) -> bool:
        path, end = events_path(self._state, job_id), chart.after + CALL_BYTES
        while chart.after < end:
            found = read_lines(path, chart.after, 1 << 30, CHUNK_BYTES)
            for line in found.lines:
                event = parse(line)
                if event is not None:
                    _note(chart, event)
            chart.after = found.next
            if found.at_end:
                return True
        return False


def _note(chart: Chart, event: dict[str, Any]) -> None:
    with contextlib.suppress(KeyError, TypeError, ValueError):  # a line of a version that we do not know
        chart.note(event)
