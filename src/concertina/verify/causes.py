"""From the first difference to its likely cause, with the evidence.

The reasoning always asks the same things in the same order: is the script repeatable at all; what was still equal when
the first thing differed; and on what do the values of all runs depend.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from concertina.verify.compare import BETWEEN, NOBODY, Difference, Stage
from concertina.verify.dependence import Dependence, Observation, explanations
from concertina.verify.places import GENERATOR_NAMES, equal_so_far, locate, logged_too, place_of
from concertina.verify.records import RunRecord, StepEnd, Turn
from concertina.verify.suspects import Suspect, Suspicion, bare


class CauseKind(Enum):
    UNSEEDED = "random numbers that are not seeded"
    NOT_REPEATABLE = "two equal runs differ"
    KERNEL = "nondeterministic kernel"
    OWN_GENERATOR = "draws from a generator that belongs to no virtual worker"
    RANDOM_OUTSIDE = "draws random numbers outside the virtual workers' turns"
    CARRIED_STATE = "keeps state between loop bodies that belongs to no virtual worker"
    LOST_STATE = "keeps state that is lost when workers change"
    WORKERS = "depends on the number of processes"
    DATA = "the batches themselves are not the same"
    PARAMETERS = "parameters are changed outside the optimizer"
    BUFFER = "a buffer is updated differently"
    SETTINGS = "the optimizer's settings are not the same"
    REDUCTION = "equal gradients were summed to different results"
    OPTIMIZER = "the optimizer computes differently from equal inputs"
    LOOPS = "the runs do not have the same loop bodies"
    FAILS = "the script fails at some numbers of workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The likely cause of a difference."""

    kind: CauseKind
    sentence: str  # what the script does
    evidence: tuple[str, ...] = ()  # what was seen, in the order of the reasoning
    advice: str = ""
    look_at: tuple[Suspect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known."""

    difference: Difference
    runs: Sequence[RunRecord]  # every run that was made, for questions of dependence
    repeatable: bool  # False: the two runs of the difference were made alike
    suspects: Sequence[Suspect] = field(default_factory=tuple)

    def suspected(self, *kinds: Suspicion) -> tuple[Suspect, ...]:
        return tuple(s for s in self.suspects if s.kind in kinds)


OWN_DRAW = (
    "draw from torch's, NumPy's or Python's default generator, of which every virtual worker has its own state; or "
    "make the generator anew in the loop body, seeded from session.step and session.rank"
)
KEEP_BY_RANK = (
    "keep it per virtual worker (a dict with session.rank as key, handed to session.register), or compute it from "
    "session.step, which is the same everywhere"
)
FIX_SEED = "seed once, the same on all workers, before the model is built, then call session.seed(n) after prepare()"


def diagnose(case: Case) -> Cause:
    """The likely cause of the first difference."""
    stage = case.difference.stage
    if not case.repeatable:
        return _not_repeatable(case)
    if stage is Stage.FAILED:
        return _failed(case)
    if stage is Stage.ABSENT:
        return _absent(case)
    generator = _generator_in_play(case)
    if generator is not None:
        return _own_generator(case, *generator)
    if stage in (Stage.PARAMS, Stage.PARAMS_BEFORE, Stage.PARAMS_AFTER, Stage.REPLICA):
        return _parameters(case)
    if stage is Stage.RANDOM:
        return _random(case)
    if stage in (Stage.SUM, Stage.UPDATED, Stage.OPTIMIZER):
        return _after_equal_gradients(case)
    if stage is Stage.SETTINGS:
        return _settings(case)
    return _by_dependence(case)


# -- two equal runs differ ----------------------------------------------------------------------------------------


def _not_repeatable(case: Case) -> Cause:
    d = case.difference
    first = f"two runs with {d.left.name} differ already, so the number of workers is not what matters"
    unseeded = _unseeded(case, first)
    if unseeded is not None:
        return unseeded
    evidence = [first, *equal_so_far(d), *logged_too(d)]
    if d.stage is Stage.FAILED:
        evidence.append(f"one of them ended with: {d.right.failure or d.left.failure}")
    kernel = _library_layer(d)
    if kernel and (d.stage is Stage.OUTPUT or not (case.suspected(Suspicion.CHANCE) or logged_too(d))):
        return Cause(
            kind=CauseKind.KERNEL,
            sentence=f"{kernel} gives different bits from equal inputs: one of its kernels is not deterministic",
            evidence=tuple(evidence),
            advice="replace the operation, or run on a device where it is deterministic",
        )
    return Cause(
        kind=CauseKind.NOT_REPEATABLE,
        sentence="something that no seed governs enters the computation: the clock, os.urandom, a process number, "
        "Python's hash order, or a nondeterministic kernel",
        evidence=tuple(evidence),
        advice="take it out, or draw from a generator that session.seed(n) governs",
        look_at=case.suspected(Suspicion.CHANCE),
    )


def _unseeded(case: Case, evidence: str) -> Cause | None:
    """What a seed would govern, if there was one."""
    d = case.difference
    if d.stage is Stage.RANDOM:
        return Cause(
            kind=CauseKind.UNSEEDED,
            sentence=f"it draws from {GENERATOR_NAMES[d.name]}, which starts from another state in every run",
            evidence=(evidence, _draw_evidence(d)),
            advice=FIX_SEED,
        )
    generator = _generator_in_play(case)
    if generator is not None:
        path, kind = generator
        return Cause(
            kind=CauseKind.UNSEEDED,
            sentence=f"it draws from its own generator `{path}` ({kind}), which is not seeded",
            evidence=(evidence, f"`{path}` is drawn from in that turn and had another state in the second run"),
            advice=OWN_DRAW,
            look_at=_makers(case, path),
        )
    if d.stage is Stage.PARAMS and d.step == 1:
        return Cause(
            kind=CauseKind.UNSEEDED,
            sentence="the model does not start from the same parameters: they are drawn before any seed is set",
            evidence=(evidence,),
            advice="call torch.manual_seed(n) before the model is built",
        )
    return None


def _library_layer(d: Difference) -> str:
    """The torch layer whose own computation differs, if that is where the difference begins."""
    place = locate(d)
    module = d.left.modules.get(place.layer)
    if not place.inside or module is None or not module[1].startswith("torch."):
        return ""
    return f"layer `{place.layer}` ({module[0]})"


# -- random numbers -----------------------------------------------------------------------------------------------


def _generator_in_play(case: Case) -> tuple[str, str] | None:
    """A generator of the script's own that was drawn from in the turns in question, from different states."""
    d = case.difference
    if d.stage in (Stage.PARAMS, Stage.RANDOM, Stage.SUM, Stage.SETTINGS, Stage.FAILED, Stage.ABSENT):
        return None
    keys = [(d.step, d.round, d.virtual)]
    if d.virtual == NOBODY:
        keys = [key for key in d.left.turns if key[0] == d.step]
    for key in sorted(keys):
        a, b = d.left.turns.get(key), d.right.turns.get(key)
        if a is None or b is None:
            continue
        for path, generator in a.generators.items():
            other = b.generators.get(path)
            if other is not None and generator.before != other.before and (generator.drawn or other.drawn):
                return path, generator.kind
    return None


def _own_generator(case: Case, path: str, kind: str) -> Cause:
    d = case.difference
    return Cause(
        kind=CauseKind.OWN_GENERATOR,
        sentence=f"it draws from its own generator `{path}` ({kind}), which the virtual workers of a process share and "
        "draw from in turn",
        evidence=(
            *equal_so_far(d),
            f"`{path}` was drawn from in that turn and began it in different states",
            "the default generators began the turn in equal states",
        ),
        advice=OWN_DRAW,
        look_at=_makers(case, path),
    )


def _makers(case: Case, path: str) -> tuple[Suspect, ...]:
    """Lines that make a generator, those that give it the name first."""
    lines = case.suspected(Suspicion.GENERATOR)
    given = re.compile(rf"(\w+\.)*{re.escape(bare(path))}\b\s*(:[^=]*)?=")
    return tuple(s for s in lines if given.match(s.text)) or lines


def _random(case: Case) -> Cause:
    d = case.difference
    name = GENERATOR_NAMES[d.name]
    origin, key = _origin_of_random(d)
    if origin == "within":
        earlier = Difference(
            stage=Stage.RANDOM_AFTER, step=key[0], round=key[1], virtual=key[2], name=d.name, left=d.left, right=d.right
        )
        return _by_dependence(Case(difference=earlier, runs=case.runs, repeatable=True, suspects=case.suspects))
    if origin == "start":
        return Cause(
            kind=CauseKind.WORKERS,
            sentence=f"the state of {name} that virtual worker {d.virtual} starts from depends on the number of "
            "processes: the workers seed it differently",
            evidence=(_draw_evidence(d), "the states differ from the virtual worker's first turn on"),
            advice=FIX_SEED,
            look_at=case.suspected(Suspicion.WORKERS, Suspicion.MAIN),
        )
    return Cause(
        kind=CauseKind.RANDOM_OUTSIDE,
        sentence=f"random numbers are drawn from {name} outside the loop bodies, where code runs once per worker, "
        "in the name of that worker's first virtual worker",
        evidence=(
            _draw_evidence(d),
            f"the states were equal when virtual worker {d.virtual} ended its turn of step {key[0]}, not in the next",
        ),
        advice="draw them inside the loop body, or save and restore the state around the code that draws "
        "(torch.random.fork_rng)",
        look_at=case.suspected(Suspicion.MAIN),
    )


def _origin_of_random(d: Difference) -> tuple[str, tuple[int, int, int]]:
    """Where the states of generator `d.name` parted: "start", "between" turns (after the one named) or "within" one."""
    mine = sorted(k for k in d.left.turns.keys() & d.right.turns.keys() if k[2] == d.virtual)
    earlier = [key for key in mine if key < (d.step, d.round, d.virtual)]
    for key in reversed(earlier):
        a, b = d.left.turns[key], d.right.turns[key]
        if a.after.get(d.name) == b.after.get(d.name):
            return "between", key
        if a.before.get(d.name) == b.before.get(d.name):
            return "within", key
    return "start", mine[0] if mine else (d.step, d.round, d.virtual)


def _draw_evidence(d: Difference) -> str:
    a = d.turns[0] if d.turns else None
    when = "its body runs"
    if a is not None and a.before.get(d.name) != a.with_batch.get(d.name):
        when = "its batch is made"
    return f"virtual worker {d.virtual} draws from {GENERATOR_NAMES[d.name]} while {when}, from different states"


# -- parameters ---------------------------------------------------------------------------------------------------


def _parameters(case: Case) -> Cause:
    d = case.difference
    if d.stage is Stage.PARAMS and d.step == 1 and _starts_differ(d):
        return Cause(
            kind=CauseKind.WORKERS,
            sentence="the model's first parameters depend on the number of processes",
            evidence=(f"`{d.name}` differs before the first loop body",),
            advice="build the model from the same seed on all workers",
            look_at=case.suspected(Suspicion.WORKERS, Suspicion.MAIN),
        )
    split = _replica_that_differs(d.right) or _replica_that_differs(d.left)
    evidence = [_where_changed(d)]
    if split is not None:
        run, step, worker = split
        evidence.append(f"with {run.name}, workers 0 and {worker} do not have the same parameters after step {step}")
        if run.failure:
            evidence.append(f"that run ended with: {run.failure}")
    in_bodies = split is None or all(_changes_in_bodies(split[0], w) for w in _workers_of(split[0]))
    return Cause(
        kind=CauseKind.PARAMETERS,
        sentence="parameters are changed outside the optimizer"
        + (", in the loop body: once per turn instead of once per step" if in_bodies else " on some workers only"),
        evidence=tuple(evidence),
        advice="change parameters in the optimizer's step alone; what must come besides it (clamping, averaging) "
        "belongs into optimizer.register_step_post_hook, which runs once per step on every worker",
        look_at=() if in_bodies else case.suspected(Suspicion.MAIN, Suspicion.WORKERS),
    )


def _workers_of(run: RunRecord) -> set[int]:
    return {turn.worker for turn in run.turns.values()}


def _changes_in_bodies(run: RunRecord, worker: int) -> bool:
    """Whether a worker's parameters ever change between two turns of a step, or after the optimizer's update."""
    turns = [turn for turn in run.turns.values() if turn.worker == worker]
    ends = [end for ends in run.ends.values() for end in ends if end.worker == worker]
    between = any(a.step == b.step and a.params != b.params for a, b in pairwise(turns))
    return between or any(end.params_after and end.params_after != end.params for end in ends)


def _starts_differ(d: Difference) -> bool:
    """Whether the first turns of all processes differ, and not only turns that follow another one."""
    return all(
        any(run.turns[key].params == turn.params for key in run.turns if key[0] == 1 and run.turns[key].history == "")
        for run, turn in zip((d.left, d.right), d.turns or (), strict=False)
    )


def _replica_that_differs(run: RunRecord) -> tuple[RunRecord, int, int] | None:
    together = [(step - 1, ends) for step, ends in run.meetings.items()] + list(run.ends.items())
    for step, (main, *others) in sorted(together, key=lambda pair: pair[0]):
        for end in others:
            if end.params != main.params:
                return run, step, end.worker
    return None


def _where_changed(d: Difference) -> str:
    if d.stage is Stage.PARAMS_AFTER:
        return f"the optimizer left `{d.name}` equal in both runs, the loop body did not"
    if d.round == BETWEEN:
        return f"`{d.name}` was equal on all workers when step {d.step - 1} ended, not when step {d.step} was to begin"
    if d.stage in (Stage.PARAMS_BEFORE, Stage.REPLICA):
        return f"all gradients of step {d.step} are equal, but `{d.name}` is not"
    before = _end_before(d.left, d.step), _end_before(d.right, d.step)
    if before[0] is not None and before[1] is not None and before[0].params == before[1].params:
        return (
            f"`{d.name}` was equal on the worker of virtual worker 0 after step {d.step - 1}, and no longer when "
            f"virtual worker {d.virtual} began step {d.step}"
        )
    return f"`{d.name}` changed during step {d.step}, before the optimizer's update"


def _end_before(run: RunRecord, step: int) -> StepEnd | None:
    ends = run.ends.get(step - 1)
    return ends[0] if ends else None


# -- the step itself ----------------------------------------------------------------------------------------------


def _after_equal_gradients(case: Case) -> Cause:
    d = case.difference
    if d.stage is Stage.SUM:
        return Cause(
            kind=CauseKind.REDUCTION,
            sentence="every virtual worker's gradient is equal, their sum is not: this is a fault of concertina",
            evidence=(f"first in `{d.name}`",),
            advice="please report it, with the output of --json",
        )
    return Cause(
        kind=CauseKind.OPTIMIZER,
        sentence="the optimizer got equal gradients, settings and parameters and made different ones of them",
        evidence=(f"first in `{d.name}`",),
        advice="look for state of the optimizer's own that is not in its state_dict, or for a nondeterministic kernel",
        look_at=case.suspected(Suspicion.GENERATOR, Suspicion.CARRIED),
    )


def _settings(case: Case) -> Cause:
    d = case.difference
    setting = d.name.rpartition(".")[2]
    return Cause(
        kind=CauseKind.SETTINGS,
        sentence=f"the optimizer's `{setting}` is not the same: it is set once per loop body, or from the number of "
        "workers",
        evidence=(f"all gradients of step {d.step} are equal",),
        advice="give the scheduler to session.prepare(), which lets it step once per optimizer step; compute settings "
        "from session.step and session.size",
        look_at=case.suspected(Suspicion.WORKERS, Suspicion.CARRIED),
    )


def _failed(case: Case) -> Cause:
    d = case.difference
    run = d.right if d.right.failure else d.left
    if run.failure_kind == "DivergenceError":
        return Cause(
            kind=CauseKind.PARAMETERS,
            sentence="parameters are changed outside the optimizer on some workers only",
            evidence=(f"with {run.name}: {run.failure}",),
            advice="change parameters in the optimizer's step alone, on all workers",
            look_at=case.suspected(Suspicion.MAIN, Suspicion.WORKERS),
        )
    return Cause(
        kind=CauseKind.FAILS,
        sentence=f"it fails with {run.name}",
        evidence=(f"with {run.name}: {run.failure}", f"all steps until then agree with {d.left.name}"),
        advice="make it run at that number of workers first",
        look_at=case.suspected(Suspicion.WORKERS, Suspicion.MAIN),
    )


def _absent(case: Case) -> Cause:
    d = case.difference
    has, lacks = (d.left, d.right) if (d.step, d.round, d.virtual) in d.left.turns else (d.right, d.left)
    return Cause(
        kind=CauseKind.LOOPS,
        sentence=f"with {has.name} the loop goes on where it has ended with {lacks.name}",
        evidence=(f"step {d.step} has a loop body of virtual worker {d.virtual} with {has.name} only",),
        advice="let nothing but session.step, session.epoch and agreed values decide how long a loop lasts",
        look_at=case.suspected(Suspicion.WORKERS, Suspicion.MAIN, Suspicion.CARRIED),
    )


# -- what a value depends on --------------------------------------------------------------------------------------


VALUES: dict[Stage, Callable[[Turn], Hashable]] = {
    Stage.BATCH: lambda t: t.batch,
    Stage.BUFFER: lambda t: tuple(t.buffers.items()),
    Stage.RANDOM_AFTER: lambda t: tuple(t.after.items()),
    Stage.LOGGED: lambda t: tuple(t.logged.items()),
}


def _result(turn: Turn) -> Hashable:
    return turn.calls, turn.loss_grad, tuple(turn.grads.items())


def _by_dependence(case: Case) -> Cause:
    d = case.difference
    fitting = explanations(_observations(case))
    dependence, suspects = _choose(case, fitting)
    carried = _carried_numbers(case) if dependence in (Dependence.HISTORY, Dependence.RESTART) else []
    evidence = [*equal_so_far(d), *logged_too(d)]
    if dependence is not None:
        evidence.append(f"over all runs, the value is a function of {dependence.value}")
    if carried:
        named = ", ".join(f"`{name}`" for name in carried[:4])
        evidence.append(f"held another value when the turn began: {named}")
        names = {bare(name) for name in carried}
        suspects = tuple(s for s in suspects if bare(s.name) in names) or suspects
    kind, what = _kind_of(dependence)
    advice = KEEP_BY_RANK
    if kind is CauseKind.WORKERS:
        advice = "compute from session.size and session.rank, which are the same at any number of workers"
    elif kind is CauseKind.LOST_STATE:
        advice = "hand it to session.register(name, thing), so that it travels with the job"
    sentence = f"{place_of(d)} {what}"
    if d.stage is Stage.BATCH:
        kind, sentence = CauseKind.DATA, f"the batches themselves are not the same: making them {what}"
    elif d.stage is Stage.BUFFER:
        kind, sentence = CauseKind.BUFFER, f"buffer `{d.name}` is updated differently: the update {what}"
    return Cause(kind=kind, sentence=sentence, evidence=tuple(evidence), advice=advice, look_at=suspects)


def _observations(case: Case) -> list[Observation]:
    """The same round in all runs."""
    d = case.difference
    if d.stage is Stage.GIVEN:
        return _given_observations(case)
    value = VALUES.get(d.stage, _result)
    return [
        Observation(turn, value(turn))
        for run in case.runs
        for key, turn in run.turns.items()
        if key[:2] == (d.step, d.round)
    ]


def _given_observations(case: Case) -> list[Observation]:
    """What the optimizer was given, as seen by virtual worker 0's turn."""
    found = []
    for run in case.runs:
        turns = [turn for key, turn in run.turns.items() if key[0] == case.difference.step and key[2] == 0]
        ends = run.ends.get(case.difference.step)
        if turns and ends:
            found.append(Observation(turns[-1], tuple(ends[0].given.items())))
    return found


SUSPICIONS = {
    Dependence.RESTART: (Suspicion.CARRIED,),
    Dependence.MAIN: (Suspicion.MAIN,),
    Dependence.WORKERS: (Suspicion.WORKERS,),
    Dependence.WORKER: (Suspicion.WORKERS,),
    Dependence.HISTORY: (Suspicion.CARRIED, Suspicion.GENERATOR),
}


def _choose(case: Case, fitting: Iterable[Dependence]) -> tuple[Dependence | None, tuple[Suspect, ...]]:
    """Among equally good hypotheses the first that a line of the script speaks for."""
    found = [(dependence, case.suspected(*SUSPICIONS[dependence])) for dependence in fitting]
    if not found:
        return None, case.suspected(Suspicion.WORKERS, Suspicion.MAIN, Suspicion.CARRIED)
    return next((pair for pair in found if pair[1]), found[0])


def _kind_of(dependence: Dependence | None) -> tuple[CauseKind, str]:
    if dependence is Dependence.HISTORY:
        return CauseKind.CARRIED_STATE, (
            "uses state that lives on from one loop body to the next and belongs to no virtual worker (a counter, a "
            "running average, a generator)"
        )
    if dependence is Dependence.RESTART:
        return CauseKind.LOST_STATE, "uses state that a newly started worker does not have"
    if dependence is Dependence.MAIN:
        return CauseKind.WORKERS, "depends on whether it runs on the worker of virtual worker 0 (session.is_main)"
    return CauseKind.WORKERS, (
        "depends on the number of processes or on which of them it runs in (session.workers, the environment, the "
        "machine)"
    )


def _carried_numbers(case: Case) -> list[str]:
    """Variables that held another number as the turn began, and that a loop body reads before it sets them."""
    turns = case.difference.turns
    if turns is None:
        return []
    a, b = turns
    differing = [name for name in {**a.state, **b.state} if a.state.get(name) != b.state.get(name)]
    names = {bare(s.name) for s in case.suspected(Suspicion.CARRIED)}
    return [name for name in differing if bare(name) in names]
