"""What `runtime/recorder.py` notes down, read back: one run as turns of virtual workers and ends of steps.

All values are fingerprints: texts that are equal if all bits are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Prints = Mapping[str, str]  # name -> fingerprint
TurnKey = tuple[int, int, int]  # (step, round, virtual worker)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module during a forward."""

    module: str  # "" is the model itself
    given: str
    gave: str


@dataclass(frozen=True, slots=True)
class Generator:
    """A random generator of the script's own, over one turn."""

    kind: str
    before: str
    after: str

    @property
    def drawn(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One pass of the loop body by one virtual worker."""

    step: int  # the step it works towards, counted from 1
    round: int = 0  # several rounds belong to a step where gradients are accumulated, or an evaluation comes between
    virtual: int
    workers: int = 1  # at that time
    worker: int = 0
    params: Prints = field(default_factory=dict)  # as the turn began
    before: Prints = field(default_factory=dict)  # random states as the turn began
    with_batch: Prints = field(default_factory=dict)  # after the batch was made
    after: Prints = field(default_factory=dict)
    batch: str = ""
    calls: tuple[Call, ...] = ()
    loss_grad: tuple[str, ...] = ()  # gradient of the loss with respect to the model's output
    logged: Prints = field(default_factory=dict)
    shown: Prints = field(default_factory=dict)  # the logged values, for people
    grads: Prints = field(default_factory=dict)  # in the order in which backward made them
    buffers: Prints = field(default_factory=dict)
    state: Prints = field(default_factory=dict)  # numbers that the script's variables held as the turn began
    generators: Mapping[str, Generator] = field(default_factory=dict)
    history: str = ""  # stands for all turns that this process had run before
    own_history: str = ""  # stands for those of this virtual worker among them

    @property
    def key(self) -> TurnKey:
        return self.step, self.round, self.virtual

    def drew(self, generator: str) -> bool:
        return self.before.get(generator) != self.after.get(generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What one worker had when a step was complete. All workers must have the same."""

    step: int
    worker: int = 0
    sum: Prints = field(default_factory=dict)  # gradients as reduced
    given: Prints = field(default_factory=dict)  # gradients as the optimizer found them
    settings: Prints = field(default_factory=dict)  # learning rate and the like
    params_before: Prints = field(default_factory=dict)
    params_after: Prints = field(default_factory=dict)  # as the optimizer left them
    optim: Prints = field(default_factory=dict)
    params: Prints = field(default_factory=dict)  # as the loop body left them


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of the script."""

    name: str  # "2 workers"
    turns: Mapping[TurnKey, Turn] = field(default_factory=dict)
    ends: Mapping[int, tuple[StepEnd, ...]] = field(default_factory=dict)  # by step; virtual worker 0's host first
    meetings: Mapping[int, tuple[StepEnd, ...]] = field(default_factory=dict)  # workers between steps, by coming step
    modules: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # name -> (class, where it is defined)
    failure: str = ""
    failure_kind: str = ""

    @property
    def steps(self) -> int:
        return max(self.ends, default=0)


def read_run(folder: Path, name: str, failure: str = "", failure_kind: str = "") -> RunRecord:
    """Reads the files of all workers and generations of a run."""
    turns: dict[TurnKey, Turn] = {}
    ends: dict[int, list[StepEnd]] = {}
    meetings: dict[int, list[StepEnd]] = {}
    modules: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("g*-w*.jsonl"), key=_order):
        worker = _order(path)[1]
        history = History()
        workers = 1
        for line in _lines(path):
            kind = line.pop("kind")
            if kind == "start":
                workers = line["workers"]
                modules = {k: (v[0], v[1]) for k, v in line["modules"].items()}
            elif kind == "turn":
                turn = history.place(_turn(line, workers, worker))
                turns[turn.key] = turn
            else:
                end = StepEnd(worker=worker, **line)
                (meetings if kind == "meeting" else ends).setdefault(end.step, []).append(end)
    return RunRecord(
        name=name,
        turns=turns,
        ends={step: tuple(ends[step]) for step in sorted(ends)},
        meetings={step: tuple(meetings[step]) for step in sorted(meetings)},
        modules=modules,
        failure=failure,
        failure_kind=failure_kind,
    )


class History:
    """The turns that one process has run so far, as short texts."""

    def __init__(self) -> None:
        self._all = ""
        self._own: dict[int, str] = {}

    def place(self, turn: dict[str, Any]) -> Turn:
        v = turn["virtual"]
        placed = Turn(**turn, history=self._all, own_history=self._own.get(v, ""))
        self._all = _chain(self._all, placed.key)
        self._own[v] = _chain(self._own.get(v, ""), placed.key)
        return placed


def _chain(before: str, key: TurnKey) -> str:
    return hashlib.blake2b(f"{before}{key}".encode(), digest_size=8).hexdigest()


def _order(path: Path) -> tuple[int, int]:
    generation, worker = path.stem.split("-")
    return int(generation[1:]), int(worker[1:])


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except ValueError:  # the last line of a worker that was killed
            return


def _turn(line: dict[str, Any], workers: int, worker: int) -> dict[str, Any]:
    return line | {
        "workers": workers,
        "worker": worker,
        "calls": tuple(Call(*call) for call in line["calls"]),
        "loss_grad": tuple(line["loss_grad"]),
        "generators": {path: Generator(*states) for path, states in line["generators"].items()},
    }
