"""What a run leaves behind: its report by generation, and the proof that every sample was trained on once."""

import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concertina.core.cut_plan import position_of
from concertina.core.sample_ledger import SampleLedger

_NO_NAME = re.compile(r"NameError: name '|UnboundLocalError: ")
TAIL_BYTES, LONGEST_LINE = 4096, 200
RECENT = 64  # steps whose times are remembered
SETTLED = 5  # steps of a generation that say how long a usual one takes


@dataclass(slots=True)
class Generation:
    """One row of the report."""

    generation: int
    step: int
    workers: int
    reason: str
    stop_s: float = 0.0  # what the gap between the last step before and the first one after exceeds a usual one by
    phases: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "step": self.step,
            "workers": self.workers,
            "reason": self.reason,
            "stop_s": round(self.stop_s, 4),
            "phases": {name: round(seconds, 4) for name, seconds in self.phases.items()},
        }


@dataclass(slots=True)
class Report:
    """What `--report` writes."""

    virtual: int
    scaling: str = "consistent"
    steps: int = 0
    epochs: int = 0
    reduction: str = ""
    generations: list[Generation] = field(default_factory=list)
    samples: list[dict[str, int]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)  # every change of the total batch, with its reason
    exit: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "virtual": self.virtual,
            "scaling": self.scaling,
            "reduction": self.reduction,
            "generations": [generation.to_json() for generation in self.generations],
            "samples": self.samples,
            "batches": self.batches,
            "exit": self.exit,
            "error": self.error,
        }


def hint_of_a_late_start(error: str) -> str:
    """What to add to the error of a script that missed a name, if its workers did not begin at the beginning."""
    if not _NO_NAME.match(error):
        return ""
    return "; a worker that comes in at the end of an epoch has none of the variables that the loop sets: set it before"


def last_words(log: Path) -> str:
    """The last line that a worker printed, to be added to an error that does not say why: a parser's, for instance."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; the last it printed is: {said[:LONGEST_LINE]}" if said else ""


Place = tuple[int, int, int]  # epoch, loader, pass over the loader in that epoch


class SampleBook:
    """The ledger of a run, fed by what workers report of their passes.

    Several workers may report the same rounds; a batch that was trained on in two different rounds is what must not be.
    """

    def __init__(self, resumed: bool = False) -> None:
        self._resumed = resumed  # what was trained before the checkpoint is known from the checkpoint alone
        self._earlier = 0  # rounds that it held
        self._told: dict[Place, dict[int, list[Mapping[str, Any]]]] = {}  # pass -> lag -> reports
        self._began = -1  # the generation that last began from a checkpoint, or from nothing

    def add(self, event: Mapping[str, Any]) -> None:
        place = (event["epoch"], event["loader"], event["turn"])
        lag = event["round"] - event["first"]  # the same for all batches of a pass that went on undisturbed
        self._told.setdefault(place, {}).setdefault(lag, []).append(event)

    def go_back(self, generation: int, rounds: int) -> bool:
        """All workers begin anew after so many rounds: what was trained on later is lost, and so counts no more.

        Each member says so, before anything that it trains on; the first one is enough, for which this is true.
        """
        if generation <= self._began:
            return False
        if self._resumed and self._began < 0:
            self._earlier = rounds
        self._began = generation
        for place, by_lag in list(self._told.items()):
            kept = {lag: _until(events, rounds - lag) for lag, events in by_lag.items()}
            self._told[place] = {lag: events for lag, events in kept.items() if events}
            if not self._told[place]:
                del self._told[place]
        return True

    def begin_again(self) -> None:
        """The job is started anew, with generations that count from the beginning; what came before has been told."""
        self._began = -1
        self._resumed = False

    def rows(self) -> list[dict[str, int]]:
        """Per epoch and loader: samples expected, seen, duplicated and missed.

        Where a job goes on from a checkpoint, also `earlier`: how many of those seen were trained on before it.
        """
        ledger = SampleLedger()
        earlier: Counter[tuple[int, int]] = Counter()
        for (epoch, loader, turn), by_lag in sorted(self._told.items()):
            newest = max((event for events in by_lag.values() for event in events), key=_reach)
            for v in range(newest["virtual"]):
                ledger.expect(epoch, v, newest["expected"], loader=loader, turn=turn)
                held = _position(max(0, self._earlier - min(by_lag)), newest)
                if held:
                    ledger.record(epoch, v, 0, held, loader=loader, turn=turn)
                    earlier[epoch, loader] += held
                for events in by_lag.values():
                    for lo, hi in _joined([_span(event) for event in events]):
                        ledger.record(epoch, v, lo, min(hi, newest["expected"]), loader=loader, turn=turn)
        rows = ledger.rows()
        for row in rows:
            if held := earlier[row["epoch"], row["loader"]]:
                row["earlier"] = held
        return rows


def _until(events: list[Mapping[str, Any]], batch: int) -> list[Mapping[str, Any]]:
    return [{**event, "end": min(event["end"], batch)} for event in events if event["first"] < batch]


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    return _position(event["first"], event), _position(event["end"], event)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > first:
            out.append((first, end))
    return out


def _position(batch: int, event: Mapping[str, Any]) -> int:
    """Where a batch begins among a virtual worker's samples: all batches are full but the last of an epoch."""
    flat = event.get("cuts") or [0, 0, event["size"]]
    return position_of(batch, event["expected"], [flat[k : k + 3] for k in range(0, len(flat), 3)])


def _reach(event: Mapping[str, Any]) -> tuple[int, int]:
    """Of two reports on a pass, the one that got further knows how its rest was cut."""
    return event["end"], len(event.get("cuts") or ())


class GenerationBook:
    """Follows the story of the generations: who started when, how long each part of a change took."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._first: Generation | None = None  # that this run began with
        self._joiners: dict[int, int] = {}  # worker -> generation that it is to join
        self._phases: dict[int, dict[str, float]] = {}
        self._last_sign: dict[int, float] = {}  # by worker
        self._gaps: deque[tuple[int, float]] = deque(maxlen=RECENT)  # a step, and the time since the one before
        self._last_step = (0, 0.0)  # step and when it was done
        self._untimed: list[Generation] = []  # whose change is still being measured
        self._timed: list[Generation] = []  # whose was, and were not asked for yet

    def story(self, story: Mapping[str, Any]) -> None:
        if story["event"] == "change_begun":
            self._expect(story, story["joiners"])
        elif story["event"] == "generation_started":
            row = Generation(story["generation"], story["step"], story["workers"], story["reason"])
            row.phases = self._phases.setdefault(row.generation, {})
            self._report.generations.append(row)  # there may be those of earlier runs
            self._untimed.append(row)
            if self._first is None:
                self._first = row
                self._expect(story, story["members"])

    def timed(self, at_the_end: bool = False) -> list[Generation]:
        """Generations whose change has been measured since the last call: it takes a few steps to see what is usual.

        `at_the_end` gives all that were not given yet.
        """
        done, self._timed = self._timed, []
        if at_the_end:
            self._look(self._last_step[0])
            done, self._timed = done + self._timed, []
            done, self._untimed = done + self._untimed, []
        return done

    def _expect(self, story: Mapping[str, Any], workers: Sequence[int]) -> None:
        """From now on, or, when a story is read again later, from `at`."""
        now = float(story.get("at", time.monotonic()))
        for worker in workers:
            self._joiners[worker] = story["generation"]
            self._last_sign[worker] = now

    def note(self, event: Mapping[str, Any]) -> None:
        kind, worker = event["event"], event.get("worker", -1)
        phase = PHASES.get(kind)
        if kind == "step":
            self._note_step(event)
        elif phase is not None and worker in self._last_sign and worker in self._joiners:
            took = max(0.0, event["at"] - self._last_sign[worker])
            self._last_sign[worker] = event["at"]
            found = self._phases.setdefault(self._joiners[worker], {})
            found[phase] = max(found.get(phase, 0.0), took)
        if kind == "changed_over":
            found = self._phases.setdefault(event["joined"], {})
            found["switch"] = max(found.get("switch", 0.0), event["seconds"])

    def _note_step(self, event: Mapping[str, Any]) -> None:
        step, at = event["step"], event["at"]
        before, then = self._last_step
        self._last_step = (step, at)
        if step <= before:
            self._gaps.clear()  # it went back
        elif then:
            untold = (step - before - 1) * self._usual_gap  # were lost with the worker that was about to tell of them
            self._gaps.append((step, max(0.0, at - then - untold)))
        self._look(step)

    @property
    def _usual_gap(self) -> float:
        return statistics.median(gap for _, gap in self._gaps) if self._gaps else 0.0

    def _look(self, step: int) -> None:
        if not self._untimed:
            return
        ends = [*(row.step for row in self._untimed[1:]), step]  # of each of these generations
        done = [self._measure(row, end) or end < step for row, end in zip(self._untimed, ends, strict=True)]
        self._timed += [row for row, is_done in zip(self._untimed, done, strict=True) if is_done]
        self._untimed = [row for row, is_done in zip(self._untimed, done, strict=True) if not is_done]

    def _measure(self, row: Generation, end: int) -> bool:
        """How long training stood still for a generation that has come to step `end`; whether that is settled.

        Steps after a change may be longer or shorter than those before it; that is no pause.
        """
        first = row.step + 1
        across = [gap for step, gap in self._gaps if step == first <= end]
        after = [gap for step, gap in self._gaps if first < step <= end][:SETTLED]
        if across and row is not self._first:
            before = [gap for step, gap in self._gaps if step < first]
            row.stop_s = max(0.0, across[0] - statistics.median(after or before or across))
        return len(after) >= SETTLED or (end >= first and not across)


# What a worker's sign says has just ended.
PHASES = {
    "worker_started": "start",
    "joined": "import",
    "prepared": "build",
    "ready": "warm-up",
    "following": "wait",
    "rehearsed": "rehearsal",
    "copied": "snapshot",
    "synced": "catch-up",
    "training": "switch of newcomers",
}
