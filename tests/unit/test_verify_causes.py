"""The reasoning of `concertina verify`, over records of jobs that only exist here.

`job` plays a training job: processes with a memory, virtual workers in blocks, results that flow into the parameters of
the next step. A fault is a function that changes what a turn computes; the tests ask whether it is found out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from concertina.core.placement import VirtualPlacement
from concertina.verify.causes import Case, Cause, CauseKind, diagnose
from concertina.verify.compare import (
    BETWEEN,
    Difference,
    Stage,
    first_difference,
    logged_differences,
    replica_difference,
    unused_random_differences,
)
from concertina.verify.dependence import KEYS, Dependence, Observation, explanations
from concertina.verify.places import locate
from concertina.verify.records import Call, Generator, History, RunRecord, StepEnd, Turn
from concertina.verify.suspects import Suspect, Suspicion

MODULES = {
    "": ("Net", "__main__"),
    "trunk": ("Linear", "torch.nn.modules.linear"),
    "noise": ("Noise", "__main__"),
    "head": ("Linear", "torch.nn.modules.linear"),
}


@dataclass
class Process:
    """One worker of one generation."""

    worker: int
    workers: int
    generation: int
    memory: dict[Any, Any] = field(default_factory=dict)


Fault = Callable[[Process, dict[str, Any]], None]


def nothing(process: Process, turn: dict[str, Any]) -> None:
    pass


def job(*plan: tuple[int, int], virtual: int = 4, steps: int = 4, fault: Fault = nothing, name: str = "") -> RunRecord:
    """A run; `plan` is (first step, workers) per generation."""
    turns: dict[tuple[int, int, int], Turn] = {}
    ends: dict[int, tuple[StepEnd, ...]] = {}
    params = "p0"
    for number, (first, workers) in enumerate(plan):
        last = plan[number + 1][0] - 1 if number + 1 < len(plan) else steps
        blocks = VirtualPlacement.blocks(virtual, workers).workers
        processes = [(Process(w, workers, number), History(), block) for w, block in enumerate(blocks)]
        for step in range(first, last + 1):
            for process, history, block in processes:
                for v in reversed(block):
                    fields = turn_fields(process, step, v, params)
                    fault(process, fields)
                    placed = history.place(flow(fields))
                    turns[placed.key] = placed
            this_step = [turn for key, turn in turns.items() if key[0] == step]
            grads = sorted((t.virtual, t.grads["head.weight"]) for t in this_step)
            params = f"p{step} {hash(tuple(grads))}"
            end = StepEnd(step=step, params={"head.weight": params}, sum={"head.weight": f"g {grads}"})
            ends[step] = tuple(replace(end, worker=w) for w in range(workers))
    return RunRecord(name=name or f"{plan}", turns=turns, ends=ends, modules=MODULES)


def turn_fields(process: Process, step: int, v: int, params: str) -> dict[str, Any]:
    random = {"torch": f"random {step} {v}", "python": "never drawn from"}
    return {
        "step": step,
        "round": 0,
        "virtual": v,
        "worker": process.worker,
        "workers": process.workers,
        "params": {"head.weight": params},
        "before": random,
        "with_batch": random,
        "after": random | {"torch": f"random {step + 1} {v}"},
        "batch": f"batch {step} {v}",
        "trunk": "",  # these change what a layer or the loss computes
        "noise": "",
        "loss": "",
        "generators": {},
        "logged": {},
        "shown": {},
        "buffers": {"noise.mean": f"mean {step} {v}"},
        "state": {},
    }


def flow(fields: dict[str, Any]) -> dict[str, Any]:
    """Batch, random numbers and parameters through the layers into the gradient."""
    first = f"{fields['batch']}|{fields['params']['head.weight']}|{fields['before']['torch']}"
    second = f"trunk({first}){fields.pop('trunk')}"
    third = f"noise({second}){fields.pop('noise')}"
    out = f"head({third})"
    loss = f"loss({out}){fields.pop('loss')}"
    calls = (Call("trunk", first, second), Call("noise", second, third), Call("head", third, out), Call("", first, out))
    return {"calls": calls, "loss_grad": (loss,), "grads": {"head.weight": loss}} | fields


def find(runs: list[RunRecord], suspects: tuple[Suspect, ...] = ()) -> tuple[Difference, Cause]:
    """The earliest difference from the first run, and its cause."""
    found = [d for run in runs[1:] if (d := first_difference(runs[0], run)) is not None]
    difference = min(found, key=lambda d: d.order)
    return difference, diagnose(Case(difference=difference, runs=runs, repeatable=True, suspects=suspects))


def experiment(fault: Fault, virtual: int = 4, steps: int = 4) -> list[RunRecord]:
    """The runs that `verify` makes: 1, 2 and P workers, and changes in between."""
    plans = [((1, 1),), ((1, min(2, virtual)),), ((1, virtual),), ((1, 1), (2, virtual), (4, 2))]
    return [job(*plan, virtual=virtual, steps=steps, fault=fault, name=str(plan)) for plan in plans]


# -- faults ---------------------------------------------------------------------------------------------------------


def scaled_by_workers(process: Process, turn: dict[str, Any]) -> None:
    turn["loss"] = f" * {process.workers}"


def only_on_main(process: Process, turn: dict[str, Any]) -> None:
    turn["loss"] = " + penalty" * (process.worker == 0)


def knows_its_worker(process: Process, turn: dict[str, Any]) -> None:
    turn["loss"] = f" + {process.worker}"


def running_average(process: Process, turn: dict[str, Any]) -> None:
    turn["loss"] = f" / {process.memory.get('average', '1')}"
    # As a turn begins, `loss` still is that of the turn before.
    turn["state"] = {"average": process.memory.get("average", "1"), "loss": process.memory.get("loss", ""), "lr": "1"}
    process.memory |= {"average": f"({turn['batch']}{turn['loss']})", "loss": turn["loss"]}


def average_per_virtual_worker(process: Process, turn: dict[str, Any]) -> None:
    v = turn["virtual"]
    turn["loss"] = f" / {process.memory.get(v, '1')}"
    process.memory[v] = f"({turn['batch']}{turn['loss']})"


def shared_generator(process: Process, turn: dict[str, Any]) -> None:
    drawn = process.memory.get("drawn", 0)
    turn["noise"] = f" + {drawn}"
    turn["generators"] = {"model.noise.rng": Generator("torch.Generator", f"s{drawn}", f"s{drawn + 1}")}
    process.memory["drawn"] = drawn + 1


def counting_dataset(process: Process, turn: dict[str, Any]) -> None:
    process.memory["taken"] = process.memory.get("taken", 0) + 1
    turn["batch"] += f" after {process.memory['taken']}"


# -- what a value depends on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("fault", "dependence"),
    [
        (scaled_by_workers, Dependence.WORKERS),
        (only_on_main, Dependence.MAIN),
        (running_average, Dependence.HISTORY),
        (average_per_virtual_worker, Dependence.RESTART),
    ],
)
def test_the_runs_tell_apart_what_a_value_depends_on(fault: Fault, dependence: Dependence, virtual: int) -> None:
    runs = experiment(fault, virtual)
    difference, _ = find(runs)
    key = (difference.step, difference.round)
    seen = [Observation(t, t.loss_grad) for run in runs for k, t in run.turns.items() if k[:2] == key]
    assert explanations(seen)[0] is dependence


def test_a_hypothesis_that_two_turns_refute_is_out() -> None:
    turn = Turn(step=1, virtual=0, workers=2)
    assert Dependence.WORKERS not in explanations([Observation(turn, "a"), Observation(turn, "b")])
    assert explanations([Observation(turn, "a"), Observation(turn, "b")]) == []


def test_every_hypothesis_has_a_key() -> None:
    assert set(KEYS) == set(Dependence)


# -- causes ---------------------------------------------------------------------------------------------------------


def test_equal_runs_have_no_difference() -> None:
    first, *others = experiment(nothing)
    assert [first_difference(first, other) for other in others] == [None, None, None]


@pytest.mark.parametrize(
    ("fault", "kind", "stage"),
    [
        (scaled_by_workers, CauseKind.WORKERS, Stage.LOSS),
        (only_on_main, CauseKind.WORKERS, Stage.LOSS),
        (knows_its_worker, CauseKind.WORKERS, Stage.LOSS),
        (running_average, CauseKind.CARRIED_STATE, Stage.LOSS),
        (average_per_virtual_worker, CauseKind.LOST_STATE, Stage.LOSS),
        (shared_generator, CauseKind.OWN_GENERATOR, Stage.OUTPUT),
        (counting_dataset, CauseKind.DATA, Stage.BATCH),
    ],
)
def test_each_fault_is_found_at_its_stage_with_its_cause(fault: Fault, kind: CauseKind, stage: Stage) -> None:
    difference, cause = find(experiment(fault))
    assert (difference.stage, cause.kind) == (stage, kind)
    assert cause.sentence
    assert cause.advice


def test_a_state_lost_on_change_shows_at_the_first_step_after_the_change() -> None:
    difference, _ = find(experiment(average_per_virtual_worker))
    assert difference.step == 2
    assert difference.right.name == "((1, 1), (2, 4), (4, 2))"


def test_own_generator_is_named_with_its_layer() -> None:
    made = Suspect(Suspicion.GENERATOR, "net.py", 7, "self.rng = torch.Generator()", "Generator")
    other = Suspect(Suspicion.GENERATOR, "net.py", 90, "torch.randn(3, generator=torch.Generator())", "Generator")
    difference, cause = find(experiment(shared_generator), (other, made))
    assert "`model.noise.rng` (torch.Generator)" in cause.sentence
    assert locate(difference).layer == "noise"
    assert cause.look_at == (made,)


def test_a_generator_nobody_can_see_is_still_carried_state() -> None:
    def hidden(process: Process, turn: dict[str, Any]) -> None:
        shared_generator(process, turn)
        turn["generators"] = {}

    assert find(experiment(hidden))[1].kind is CauseKind.CARRIED_STATE


def test_a_generator_that_is_not_drawn_from_is_not_blamed() -> None:
    def idle(process: Process, turn: dict[str, Any]) -> None:
        scaled_by_workers(process, turn)
        turn["generators"] = {"rng": Generator("torch.Generator", f"{process.workers}", f"{process.workers}")}

    assert find(experiment(idle))[1].kind is CauseKind.WORKERS


def test_carried_state_names_the_variable_that_the_loop_reads_before_it_sets_it() -> None:
    line = Suspect(Suspicion.CARRIED, "train.py", 12, "average = 0.9 * average + loss", "average")
    _, cause = find(experiment(running_average), (line,))
    assert "held another value when the turn began: `average`" in cause.evidence  # not loss, not lr
    assert cause.look_at == (line,)


def test_data_that_depends_on_the_worker_is_called_data() -> None:
    def sharded(process: Process, turn: dict[str, Any]) -> None:
        turn["batch"] += f" of {process.workers}"

    _, cause = find(experiment(sharded))
    assert cause.kind is CauseKind.DATA
    assert "the number of processes" in cause.sentence


def test_a_buffer_alone_that_differs_is_called_so() -> None:
    def counted(process: Process, turn: dict[str, Any]) -> None:
        turn["buffers"] = {"noise.mean": f"{process.workers}"}

    difference, cause = find(experiment(counted))
    assert (difference.stage, cause.kind) == (Stage.BUFFER, CauseKind.BUFFER)
    assert locate(difference).layer == "noise"


# -- random states --------------------------------------------------------------------------------------------------


def with_random(turn: dict[str, Any], before: str, after: str) -> None:
    turn["before"] = turn["with_batch"] = turn["before"] | {"torch": before}
    turn["after"] = turn["after"] | {"torch": after}


def test_random_states_that_nobody_draws_from_may_differ() -> None:
    def own_python_state(process: Process, turn: dict[str, Any]) -> None:
        turn["before"] = turn["before"] | {"python": f"{process.workers} {process.worker}"}
        turn["after"] = turn["after"] | {"python": f"{process.workers} {process.worker}"}

    first, *others = experiment(own_python_state)
    assert all(first_difference(first, other) is None for other in others)
    assert unused_random_differences(first, others[0]) == set()


def test_random_states_that_are_drawn_from_without_effect_are_only_noted() -> None:
    def draws_in_vain(process: Process, turn: dict[str, Any]) -> None:
        turn["before"] = turn["before"] | {"python": f"{process.workers}"}
        turn["after"] = turn["after"] | {"python": f"{process.workers} drawn"}

    first, other, *_ = experiment(draws_in_vain)
    assert first_difference(first, other) is None
    assert unused_random_differences(first, other) == {"python"}


def test_workers_that_seed_differently() -> None:
    def seeded_by_worker(process: Process, turn: dict[str, Any]) -> None:
        with_random(turn, f"{process.worker} {turn['step']}", f"{process.worker} {turn['step'] + 1}")

    difference, cause = find(experiment(seeded_by_worker))
    assert (difference.stage, difference.step, cause.kind) == (Stage.RANDOM, 1, CauseKind.WORKERS)
    assert "seed it differently" in cause.sentence


def test_random_numbers_drawn_between_loop_bodies() -> None:
    def epoch_of_two(process: Process, turn: dict[str, Any]) -> None:
        step, v = turn["step"], turn["virtual"]
        first_here = v == VirtualPlacement.blocks(4, process.workers).workers[process.worker][0]
        if first_here and step > 2:
            with_random(turn, f"random {step} {v} drawn", f"random {step + 1} {v} drawn")

    difference, cause = find([job((1, 1), fault=epoch_of_two), job((1, 4), fault=epoch_of_two)])
    assert (difference.stage, difference.step, cause.kind) == (Stage.RANDOM, 3, CauseKind.RANDOM_OUTSIDE)
    assert "step 2" in cause.evidence[1]


def test_a_turn_that_draws_more_numbers_is_traced_back_from_where_it_shows() -> None:
    def draws_per_worker(process: Process, turn: dict[str, Any]) -> None:
        more = "" if turn["step"] == 1 else f" {process.workers}"
        with_random(turn, f"random {turn['step']}{more}", f"random {turn['step'] + 1} {process.workers}")

    difference, cause = find(experiment(draws_per_worker))
    assert (difference.stage, difference.step) == (Stage.RANDOM, 2)
    assert cause.kind is CauseKind.WORKERS
    assert "how many numbers the loop body draws" in cause.sentence


# -- two equal runs that differ ---------------------------------------------------------------------------------------


def not_repeatable(fault: Fault, *suspects: Suspect) -> tuple[Difference, Cause]:
    one, other = job((1, 1), name="1 worker"), job((1, 1), fault=fault, name="1 worker again")
    difference = first_difference(one, other)
    assert difference is not None
    case = Case(difference=difference, runs=[one, other], repeatable=False, suspects=suspects)
    return difference, diagnose(case)


def test_chance_in_the_loss_is_not_blamed_on_the_number_of_workers() -> None:
    def clock(process: Process, turn: dict[str, Any]) -> None:
        turn["loss"] = " + 12:15"

    line = Suspect(Suspicion.CHANCE, "train.py", 3, "loss += time.time()", "time")
    difference, cause = not_repeatable(clock, line)
    assert (difference.stage, cause.kind, cause.look_at) == (Stage.LOSS, CauseKind.NOT_REPEATABLE, (line,))


def test_a_torch_layer_with_equal_inputs_and_other_outputs_is_a_kernel() -> None:
    def atomic_adds(process: Process, turn: dict[str, Any]) -> None:
        turn["trunk"] = " in another order"

    _, cause = not_repeatable(atomic_adds)
    assert cause.kind is CauseKind.KERNEL
    assert "`trunk` (Linear)" in cause.sentence


def test_a_layer_of_the_scripts_own_is_not_called_a_kernel() -> None:
    def own_layer(process: Process, turn: dict[str, Any]) -> None:
        turn["noise"] = " + urandom"

    assert not_repeatable(own_layer)[1].kind is CauseKind.NOT_REPEATABLE


def test_a_default_generator_that_was_never_seeded() -> None:
    def unseeded(process: Process, turn: dict[str, Any]) -> None:
        with_random(turn, "another state", "another state, drawn")

    _, cause = not_repeatable(unseeded)
    assert cause.kind is CauseKind.UNSEEDED
    assert "torch's default generator" in cause.sentence


def test_an_own_generator_that_was_never_seeded() -> None:
    def own(process: Process, turn: dict[str, Any]) -> None:
        turn["noise"], turn["generators"] = "?", {"rng": Generator("numpy.Generator", "b", "c")}

    one = job((1, 1), fault=lambda p, t: t.update(generators={"rng": Generator("numpy.Generator", "a", "b")}))
    difference = first_difference(one, job((1, 1), fault=own))
    assert difference is not None
    cause = diagnose(Case(difference=difference, runs=[], repeatable=False))
    assert cause.kind is CauseKind.UNSEEDED
    assert "`rng` (numpy.Generator)" in cause.sentence


# -- parameters and the step itself ---------------------------------------------------------------------------------


def change_end(run: RunRecord, step: int, worker: int | None = None, **fields: Any) -> RunRecord:
    ends = tuple(replace(e, **fields) if worker is None or e.worker == worker else e for e in run.ends[step])
    return replace(run, ends={**run.ends, step: ends})


def cause_of(left: RunRecord, right: RunRecord, *suspects: Suspect) -> tuple[Difference, Cause]:
    return find([left, right], suspects)


@pytest.mark.parametrize(
    ("field_name", "stage", "kind"),
    [
        ("sum", Stage.SUM, CauseKind.REDUCTION),
        ("settings", Stage.SETTINGS, CauseKind.SETTINGS),
        ("params_before", Stage.PARAMS_BEFORE, CauseKind.PARAMETERS),
        ("given", Stage.GIVEN, CauseKind.WORKERS),
        ("params_after", Stage.UPDATED, CauseKind.OPTIMIZER),
        ("optim", Stage.OPTIMIZER, CauseKind.OPTIMIZER),
        ("params", Stage.PARAMS_AFTER, CauseKind.PARAMETERS),
    ],
)
def test_what_differs_first_at_the_end_of_a_step_names_its_cause(
    field_name: str, stage: Stage, kind: CauseKind
) -> None:
    right = change_end(job((1, 2)), 3, **{field_name: {"head.weight": "changed"}})
    difference, cause = cause_of(job((1, 1)), right)
    assert (difference.stage, difference.step, cause.kind) == (stage, 3, kind)


def test_parameters_changed_in_a_loop_body_are_seen_by_the_next_turn() -> None:
    def clamps(process: Process, turn: dict[str, Any]) -> None:
        turns = process.memory["turns"] = process.memory.get("turns", 0) + 1
        turn["params"] = {"head.weight": turn["params"]["head.weight"] + " clamped" * (turns - 1)}

    difference, cause = find(experiment(clamps))
    assert (difference.stage, difference.step, cause.kind) == (Stage.PARAMS, 1, CauseKind.PARAMETERS)
    assert "once per turn" in cause.sentence


def test_first_parameters_that_depend_on_the_workers() -> None:
    def built_by_count(process: Process, turn: dict[str, Any]) -> None:
        turn["params"] = {"head.weight": turn["params"]["head.weight"] + f" of {process.workers}"}

    _, cause = find(experiment(built_by_count))
    assert cause.kind is CauseKind.WORKERS
    assert "first parameters" in cause.sentence


def test_workers_of_one_run_that_differ_are_told_from_a_change_on_all() -> None:
    run = change_end(job((1, 2)), 2, worker=1, params={"head.weight": "only here"})
    difference = replica_difference(run)
    assert difference is not None
    assert (difference.stage, difference.step, difference.worker) == (Stage.REPLICA, 2, 1)
    line = Suspect(Suspicion.MAIN, "train.py", 30, "if session.is_main:", "is_main")
    cause = diagnose(Case(difference=difference, runs=[run], repeatable=True, suspects=[line]))
    assert cause.kind is CauseKind.PARAMETERS
    assert "on some workers only" in cause.sentence
    assert cause.look_at == (line,)


def test_bodies_that_change_parameters_on_all_workers_are_not_called_some_workers() -> None:
    def clamps(process: Process, turn: dict[str, Any]) -> None:
        turns = process.memory["turns"] = process.memory.get("turns", 0) + 1
        turn["params"] = {"head.weight": turn["params"]["head.weight"] + " clamped" * (turns - 1)}

    uneven = job((1, 2), virtual=3, fault=clamps)  # worker 0 has one turn per step, worker 1 has two
    lone = change_end(uneven, 1, worker=0, params_after={"head.weight": "p"}, params={"head.weight": "p clamped"})
    difference = replica_difference(lone)
    assert difference is not None
    cause = diagnose(Case(difference=difference, runs=[lone], repeatable=True))
    assert "once per turn" in cause.sentence


def test_workers_that_part_between_two_steps() -> None:
    met = (StepEnd(step=3, params={"head.weight": "a"}), StepEnd(step=3, worker=1, params={"head.weight": "b"}))
    run = replace(job((1, 2)), meetings={3: met}, failure="they differ", failure_kind="DivergenceError")
    difference = replica_difference(run)
    assert difference is not None
    assert (difference.step, difference.round) == (3, BETWEEN)
    cause = diagnose(Case(difference=difference, runs=[run], repeatable=True))
    assert any("they differ" in line for line in cause.evidence)


def test_equal_workers_are_no_difference() -> None:
    assert replica_difference(job((1, 4))) is None


# -- runs that end differently ----------------------------------------------------------------------------------------


def test_a_run_that_fails_after_equal_steps() -> None:
    right = replace(job((1, 2), steps=2), failure="ValueError: two of us", failure_kind="ValueError")
    difference, cause = cause_of(job((1, 1)), right)
    assert (difference.stage, difference.step, cause.kind) == (Stage.FAILED, 3, CauseKind.FAILS)
    assert any("two of us" in line for line in cause.evidence)


def test_a_run_that_fails_is_still_compared_as_far_as_it_came() -> None:
    right = replace(job((1, 2), steps=2, fault=scaled_by_workers), failure="nan", failure_kind="ValueError")
    difference, _ = cause_of(job((1, 1), fault=scaled_by_workers), right)
    assert (difference.stage, difference.step) == (Stage.LOSS, 1)


def test_divergence_that_left_no_record_is_still_a_change_of_parameters() -> None:
    right = replace(job((1, 2), steps=2), failure="workers differ", failure_kind="DivergenceError")
    assert cause_of(job((1, 1)), right)[1].kind is CauseKind.PARAMETERS


def test_runs_of_different_length() -> None:
    difference, cause = cause_of(job((1, 1)), job((1, 2), steps=3))
    assert (difference.stage, difference.step, cause.kind) == (Stage.ABSENT, 4, CauseKind.LOOPS)


# -- order and place ------------------------------------------------------------------------------------------------


def test_the_earliest_step_wins_over_the_earlier_stage() -> None:
    def late_data(process: Process, turn: dict[str, Any]) -> None:
        if turn["step"] == 2:
            turn["loss"] = f" * {process.workers}"
        if turn["step"] == 3:
            turn["batch"] += f" of {process.workers}"

    assert find(experiment(late_data))[0].stage is Stage.LOSS


def test_within_a_step_the_cause_wins_over_the_lower_virtual_worker() -> None:
    def two_faults(process: Process, turn: dict[str, Any]) -> None:
        if turn["virtual"] == 0:
            turn["loss"] = f" * {process.workers}"
        if turn["virtual"] == 3:
            turn["batch"] += f" of {process.workers}"

    difference, _ = find(experiment(two_faults))
    assert (difference.stage, difference.virtual) == (Stage.BATCH, 3)


def test_logged_values_alone_count_unless_they_are_ignored() -> None:
    def logs_workers(process: Process, turn: dict[str, Any]) -> None:
        turn["logged"] = {"workers": f"{process.workers}", "loss": "1"}

    first, other, *_ = experiment(logs_workers)
    difference = first_difference(first, other)
    assert difference is not None
    assert (difference.stage, difference.name) == (Stage.LOGGED, "workers")
    assert first_difference(first, other, {"workers"}) is None
    assert logged_differences(first, other) == {"workers"}


def pair_of_calls(left: tuple[Call, ...], right: tuple[Call, ...]) -> Difference:
    a, b = (Turn(step=1, virtual=0, calls=calls) for calls in (left, right))
    runs = [RunRecord(name=n, turns={t.key: t}, modules=MODULES) for n, t in (("a", a), ("b", b))]
    difference = first_difference(*runs)
    assert difference is not None
    return difference


@pytest.mark.parametrize(
    ("right", "layer", "inside"),
    [
        ((Call("block.a", "1", "2x"), Call("block.b", "3x", "4x"), Call("block", "1", "4x")), "block.a", True),
        ((Call("block.a", "1", "2"), Call("block.b", "3x", "4x"), Call("block", "1", "4x")), "block", True),
        ((Call("block.a", "1", "2"), Call("block.b", "3", "4"), Call("block", "1", "4x")), "block", True),
        ((Call("block.a", "1", "2"), Call("block.c", "3", "4"), Call("block", "1", "4")), "block", True),
        ((Call("block.a", "1x", "2x"), Call("block.b", "3x", "4x"), Call("block", "1x", "4x")), "", True),
    ],
    ids=["inside a layer", "between two layers", "after the last layer", "another layer", "before the first layer"],
)
def test_the_place_of_a_difference_in_the_forward(right: tuple[Call, ...], layer: str, inside: bool) -> None:
    left = (Call("block.a", "1", "2"), Call("block.b", "3", "4"), Call("block", "1", "4"))
    place = locate(pair_of_calls(left, right))
    assert (place.layer, place.inside) == (layer, inside)


def test_an_input_of_the_model_that_differs_is_before_the_model() -> None:
    left = (Call("trunk", "1", "2"), Call("", "1", "2"))
    right = (Call("trunk", "1x", "2x"), Call("", "1x", "2x"))
    assert not locate(pair_of_calls(left, right)).inside
