"""Two runs side by side: where do they first differ?

What comes first is not what is read first: a step's records are ordered by what can influence what, so that the first
difference is the one that the others follow from.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import IntEnum

from concertina.verify.records import Prints, RunRecord, StepEnd, Turn

NOBODY = -1  # the virtual worker of a difference that belongs to the whole step
BETWEEN = -1  # the round of a difference that is there before the step begins


class Stage(IntEnum):
    """Kinds of differences within a step, from cause to effect."""

    ABSENT = 0  # one run has a turn that the other has not
    PARAMS = 1  # parameters as a turn began
    RANDOM = 2  # a random state that the turn draws from, as it began
    BATCH = 3
    OUTPUT = 4  # of a module
    LOSS = 5  # gradient of the loss with respect to the model's output
    GRADIENT = 6
    BUFFER = 7
    LOGGED = 8
    RANDOM_AFTER = 9
    SUM = 10  # the reduced gradient
    SETTINGS = 11  # of the optimizer
    PARAMS_BEFORE = 12  # the optimizer's update
    GIVEN = 13  # the gradient that the optimizer found
    UPDATED = 14  # parameters that the optimizer left
    OPTIMIZER = 15  # its state
    PARAMS_AFTER = 16  # parameters as the step ended
    REPLICA = 17  # two workers of one run have different parameters or optimizer state
    FAILED = 18  # one run failed, up to there all was equal


NOT_A_RESULT = {Stage.RANDOM, Stage.RANDOM_AFTER}  # by themselves; an unused random state may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that is not the same in two runs."""

    stage: Stage
    step: int
    round: int = 0
    virtual: int = NOBODY
    name: str = ""  # tensor, module, generator or logged value
    left: RunRecord
    right: RunRecord
    worker: int = 0  # for REPLICA: the worker of the right run that differs from the one that hosts virtual worker 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        late = 1 << 30
        at_end = self.virtual == NOBODY and self.round != BETWEEN
        return self.step, late if at_end else self.round, self.stage, self.virtual

    @property
    def turns(self) -> tuple[Turn, Turn] | None:
        key = (self.step, self.round, self.virtual)
        if key in self.left.turns and key in self.right.turns:
            return self.left.turns[key], self.right.turns[key]
        return None


def first_difference(left: RunRecord, right: RunRecord, ignore: Set[str] = frozenset()) -> Difference | None:
    """The difference that all others may follow from; None if the runs agree. `ignore` names logged values."""
    for step in _steps(left, right):
        found = [*_in_turns(left, right, step, ignore), *_in_ends(left, right, step)]
        if found:
            return min(found, key=lambda d: d.order)
    if right.failure or left.failure:
        return Difference(stage=Stage.FAILED, step=min(left.steps, right.steps) + 1, left=left, right=right)
    return None


def replica_difference(run: RunRecord) -> Difference | None:
    """The first time that workers of one run, which must be equal, are not."""
    steps = sorted({*run.meetings, *run.ends})
    return min((d for step in steps for d in _replicas(run, step)), key=lambda d: d.order, default=None)


def logged_differences(left: RunRecord, right: RunRecord) -> set[str]:
    """Names of logged values that ever differ."""
    return {
        name
        for key in left.turns.keys() & right.turns.keys()
        for name in _differing(left.turns[key].logged, right.turns[key].logged)
    }


def unused_random_differences(left: RunRecord, right: RunRecord) -> set[str]:
    """Random states that differ and are drawn from, in runs whose results agree all the same."""
    return {
        name
        for key in left.turns.keys() & right.turns.keys()
        for name in _drawn_differing(left.turns[key], right.turns[key])
    }


def _steps(left: RunRecord, right: RunRecord) -> list[int]:
    turns = {key[0] for key in left.turns.keys() | right.turns.keys()}
    return sorted(turns.union(left.ends, right.ends, left.meetings, right.meetings))


def _in_turns(left: RunRecord, right: RunRecord, step: int, ignore: Set[str]) -> Iterator[Difference]:
    keys = {key for key in left.turns.keys() | right.turns.keys() if key[0] == step}
    for key in sorted(keys):
        a, b = left.turns.get(key), right.turns.get(key)
        if a is None or b is None:
            if not (left.failure or right.failure):
                yield Difference(stage=Stage.ABSENT, step=step, round=key[1], virtual=key[2], left=left, right=right)
            continue
        found = list(_turn_differences(a, b, ignore))
        if any(stage not in NOT_A_RESULT for stage, _ in found):
            for stage, name in found:
                yield Difference(
                    stage=stage, step=step, round=key[1], virtual=key[2], name=name, left=left, right=right
                )


def _turn_differences(a: Turn, b: Turn, ignore: Set[str]) -> Iterator[tuple[Stage, str]]:
    """The first name per stage."""
    yield from _first(Stage.PARAMS, _differing(a.params, b.params))
    yield from _first(Stage.RANDOM, _drawn_differing(a, b))
    if a.batch != b.batch:
        yield Stage.BATCH, "batch"
    if a.calls != b.calls:
        yield Stage.OUTPUT, _first_call(a, b)
    if a.loss_grad != b.loss_grad:
        yield Stage.LOSS, "loss"
    yield from _first(Stage.GRADIENT, _differing(a.grads, b.grads))
    yield from _first(Stage.BUFFER, _differing(a.buffers, b.buffers))
    yield from _first(Stage.LOGGED, [name for name in _differing(a.logged, b.logged) if name not in ignore])
    same_before = [name for name in a.before if a.before[name] == b.before.get(name)]
    yield from _first(Stage.RANDOM_AFTER, [name for name in same_before if a.after.get(name) != b.after.get(name)])


def _replicas(run: RunRecord, step: int) -> Iterator[Difference]:
    for round_, together in ((BETWEEN, run.meetings.get(step, ())), (0, run.ends.get(step, ()))):
        for end in together[1:]:
            names = _differing(together[0].params, end.params) or _differing(together[0].optim, end.optim)
            for name in names[:1]:
                yield Difference(
                    stage=Stage.REPLICA, step=step, round=round_, name=name, left=run, right=run, worker=end.worker
                )


def _in_ends(left: RunRecord, right: RunRecord, step: int) -> Iterator[Difference]:
    a, b = left.ends.get(step), right.ends.get(step)
    if a and b:
        for stage, name in _end_differences(a[0], b[0]):
            yield Difference(stage=stage, step=step, name=name, left=left, right=right)


def _end_differences(a: StepEnd, b: StepEnd) -> Iterator[tuple[Stage, str]]:
    yield from _first(Stage.SUM, _differing(a.sum, b.sum))
    yield from _first(Stage.SETTINGS, _differing(a.settings, b.settings))
    yield from _first(Stage.PARAMS_BEFORE, _differing(a.params_before, b.params_before))
    yield from _first(Stage.GIVEN, _differing(a.given, b.given))
    yield from _first(Stage.UPDATED, _differing(a.params_after, b.params_after))
    yield from _first(Stage.OPTIMIZER, _differing(a.optim, b.optim))
    yield from _first(Stage.PARAMS_AFTER, _differing(a.params, b.params))


def _first(stage: Stage, names: list[str]) -> Iterator[tuple[Stage, str]]:
    if names:
        yield stage, names[0]


def _differing(a: Prints, b: Prints) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def _drawn_differing(a: Turn, b: Turn) -> list[str]:
    return [name for name in _differing(a.before, b.before) if a.drew(name) or b.drew(name)]


def _first_call(a: Turn, b: Turn) -> str:
    i = call_that_differs(a, b)
    return (a.calls if i < len(a.calls) else b.calls)[i].module


def call_that_differs(a: Turn, b: Turn) -> int:
    """Position of the first module call that differs, in the order in which modules finished."""
    for i, (one, other) in enumerate(zip(a.calls, b.calls, strict=False)):
        if one != other:
            return i
    return min(len(a.calls), len(b.calls))
