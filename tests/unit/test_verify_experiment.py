"""Which runs `concertina verify` makes, what it reads, and how it answers; nothing is started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concertina.core.errors import JobFailed, UsageError
from concertina.runner import Listener, Report, RunSettings
from concertina.verify.answer import as_json, in_words
from concertina.verify.causes import CauseKind
from concertina.verify.experiment import Experiment, VerifySettings, default_changes, parse_workers
from concertina.verify.records import read_run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import concertina\n")
    return path


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_the_default_is_1_2_and_p_workers_the_first_twice_and_one_run_with_changes(script: Path) -> None:
    planned = VerifySettings(script=script).planned()
    assert [(run.workers, run.changes, run.fresh) for run in planned] == [
        (1, "", False),
        (1, "", True),
        (2, "", False),
        (4, "", False),
        (1, "3=4,6=2,9=3", False),
    ]
    assert planned[-1].name == "1 -> 4 -> 2 -> 3 workers"


@pytest.mark.parametrize(
    ("virtual", "steps", "plan"),
    [(1, 12, "6=1"), (2, 12, "3=2,6=2,9=2"), (8, 4, "1=8,2=2,3=3"), (4, 2, "1=3"), (4, 1, "")],
)
def test_changes_are_spread_over_the_steps_there_are(virtual: int, steps: int, plan: str) -> None:
    assert default_changes(virtual, steps) == plan


def test_worker_counts_and_changes_as_asked(script: Path) -> None:
    settings = VerifySettings(script=script, workers=parse_workers("2, 3,2"), changes="5=1")
    assert [(run.workers, run.changes) for run in settings.planned()] == [(2, ""), (2, ""), (3, ""), (2, "5=1")]


def test_the_run_with_changes_can_be_left_out(script: Path) -> None:
    assert len(VerifySettings(script=script, changes="").planned()) == 4


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"virtual": 0}, "at least 1 virtual worker"),
        ({"workers": (1, 5)}, "5 workers for 4 virtual workers"),
        ({"steps": 0}, "needs 1 step or more"),
        ({"changes": "3=9"}, "--changes 3=9: needs 1 to 4 workers"),
        ({"changes": "soon"}, "--changes 'soon'"),
        ({"script": Path("missing.py")}, "missing.py is not a file"),
        ({"level": "D7"}, "D7"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(script: Path, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace("'", ".")):
        VerifySettings(**{"script": script, **asked})


@pytest.mark.parametrize("text", ["one", "1,two", ","])
def test_worker_counts_that_are_no_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=r"like .1,2,4."):
        parse_workers(text)


# -- records ----------------------------------------------------------------------------------------------------------


def lines_of(settings: RunSettings, loss: Callable[[int, int], str]) -> list[dict[str, Any]]:
    """What one worker with all virtual workers would note down."""
    found: list[dict[str, Any]] = [
        {"step": 1, "kind": "start", "workers": settings.workers, "modules": {"": ["Net", "x"]}, "params": {}}
    ]
    for step in range(1, settings.steps + 1):
        for v in reversed(range(settings.virtual)):
            turn = {"step": step, "kind": "turn", "round": 0, "virtual": v, "params": {}, "batch": f"{step} {v}"}
            turn |= {"before": {}, "with_batch": {}, "after": {}, "state": {}, "generators": {}, "buffers": {}}
            turn |= {"calls": [], "loss_grad": [], "grads": {}, "shown": {"loss": loss(step, v)}}
            found.append(turn | {"logged": {"loss": loss(step, v)}})
        found.append({"step": step, "kind": "step", "params": {"w": f"{step}"}, "optim": {}})
    return found


def write(folder: Path, lines: list[dict[str, Any]], name: str = "g0-w0.jsonl") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_torn_last_line_is_left_out(script: Path, tmp_path: Path) -> None:
    lines = lines_of(RunSettings(script=script, virtual=2, steps=2), lambda step, v: "1")
    write(tmp_path / "run", lines)
    path = tmp_path / "run" / "g0-w0.jsonl"
    path.write_text(path.read_text()[:-20])
    run = read_run(tmp_path / "run", "torn")
    assert len(run.turns) == 4
    assert run.steps == 1


def test_histories_start_anew_with_every_process(script: Path, tmp_path: Path) -> None:
    lines = lines_of(RunSettings(script=script, virtual=2, steps=2), lambda step, v: "1")
    write(tmp_path / "run", lines[:4], "g0-w0.jsonl")
    write(tmp_path / "run", [lines[0], *lines[4:]], "g1-w0.jsonl")
    turns = read_run(tmp_path / "run", "changed").turns
    assert turns[1, 0, 1].history == turns[2, 0, 1].history == ""
    assert turns[1, 0, 0].history != ""
    assert turns[1, 0, 0].own_history == turns[2, 0, 0].own_history == ""


# -- the experiment ---------------------------------------------------------------------------------------------------


class Machine:
    """Launches nothing: notes what it was asked and writes what the workers would have."""

    def __init__(self, loss: Callable[[RunSettings, int, int], str], fails: Callable[[RunSettings], str] | None = None):
        self.loss = loss
        self.fails = fails
        self.runs: list[tuple[int, bool]] = []

    def __call__(self, settings: RunSettings, listener: Listener, fresh: bool) -> Report:
        self.runs.append((settings.workers, fresh))
        assert settings.record_dir is not None
        write(settings.record_dir, lines_of(settings, lambda step, v: self.loss(settings, step, v)))
        listener({"event": "step", "step": settings.steps})
        why = self.fails(settings) if self.fails is not None else ""
        if why:
            listener({"event": "failed", "kind": "ValueError", "error": why})
            raise JobFailed(why, 7)
        return Report(virtual=settings.virtual)


def experiment(script: Path, machine: Machine, **asked: Any) -> Experiment:
    settings = VerifySettings(script=script, virtual=2, steps=3, changes="", **asked)
    return Experiment(settings, machine, script.parent / "records")


def test_equal_runs_are_a_yes(script: Path) -> None:
    machine = Machine(lambda settings, step, v: f"{step} {v}")
    verdict = experiment(script, machine).verdict()
    assert verdict.elastic
    assert machine.runs == [(1, False), (1, True), (2, False)]
    assert "train.py is bitwise elastic: 3 steps of 2 virtual workers" in in_words(verdict)
    assert as_json(verdict)["elastic"] is True


def test_a_run_that_differs_is_made_again_before_it_is_judged(script: Path) -> None:
    machine = Machine(lambda settings, step, v: f"{settings.workers}")
    verdict = experiment(script, machine).verdict()
    assert machine.runs == [(1, False), (1, True), (2, False), (2, True)]
    assert verdict.cause is not None
    assert verdict.cause.kind is CauseKind.WORKERS


def test_chance_that_enters_at_two_workers_only_is_called_chance(script: Path) -> None:
    ticks = iter(range(1000))

    def steps_of(settings: RunSettings, step: int, v: int) -> str:
        return f"{next(ticks)}" if settings.workers == 2 else "1"

    verdict = experiment(script, Machine(steps_of)).verdict()
    assert verdict.cause is not None
    assert verdict.cause.kind is CauseKind.NOT_REPEATABLE
    assert verdict.difference is not None
    assert verdict.difference.right.name == "2 workers again"


def test_a_logged_value_that_differs_between_equal_runs_is_left_out_and_noted(script: Path) -> None:
    ticks = iter(range(1000))
    verdict = experiment(script, Machine(lambda settings, step, v: f"{next(ticks)}")).verdict()
    assert verdict.elastic
    assert "`loss` differs between two equal runs" in verdict.notes[0]


def test_a_logged_value_can_be_ignored(script: Path) -> None:
    machine = Machine(lambda settings, step, v: f"{settings.workers}")
    assert experiment(script, machine, ignore=frozenset({"loss"})).verdict().elastic


def test_a_script_that_fails_at_once_is_no_verdict(script: Path) -> None:
    machine = Machine(lambda settings, step, v: "1", fails=lambda settings: "ValueError: no")
    with pytest.raises(JobFailed, match="with 1 worker the script fails: ValueError: no") as failed:
        experiment(script, machine).verdict()
    assert failed.value.exit_code == 7
    assert len(machine.runs) == 1


def test_a_script_that_never_trains_is_no_verdict(script: Path) -> None:
    def launch(settings: RunSettings, listener: Listener, fresh: bool) -> Report:
        return Report(virtual=settings.virtual)

    with pytest.raises(UsageError, match="nothing to compare"):
        Experiment(VerifySettings(script=script), launch, script.parent / "records").verdict()


def test_a_script_that_fails_at_two_workers_is_a_no(script: Path) -> None:
    machine = Machine(lambda settings, step, v: "1", fails=lambda settings: "two!" if settings.workers == 2 else "")
    verdict = experiment(script, machine).verdict()
    assert verdict.cause is not None
    assert verdict.cause.kind is CauseKind.FAILS
    assert any("two!" in line for line in verdict.cause.evidence)


def test_progress_counts_the_steps_of_all_runs(script: Path) -> None:
    told: list[tuple[str, int, int]] = []
    machine = Machine(lambda settings, step, v: "1")
    asked = experiment(script, machine)
    asked.progress = lambda what, done, total: told.append((what, done, total))
    asked.verdict()
    assert told[0] == ("1 worker", 0, 9)
    assert told[-1] == ("2 workers", 9, 9)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_script_that_ends_early_is_noted(script: Path) -> None:
    class Short(Machine):
        def __call__(self, settings: RunSettings, listener: Listener, fresh: bool) -> Report:
            short = RunSettings(script=script, virtual=2, steps=2, record_dir=settings.record_dir)
            return super().__call__(short, listener, fresh)

    verdict = experiment(script, Short(lambda settings, step, v: "1")).verdict()
    assert verdict.notes == ("the script ended after 2 steps, so only those were compared",)


# -- the answer -------------------------------------------------------------------------------------------------------


def test_the_answer_names_step_virtual_worker_values_cause_and_line(script: Path) -> None:
    script.write_text("import concertina\nloss = 1 / session.workers\n")
    machine = Machine(lambda settings, step, v: f"{settings.workers}" if step == 2 and v == 1 else "0")
    text = in_words(experiment(script, machine).verdict())
    assert "train.py is not bitwise elastic." in text
    assert "step 2, virtual worker 1: logged value `loss` (loss 1 against 2)" in text
    assert "between      1 worker and 2 workers" in text
    assert "depends on the number of processes" in text
    assert "train.py:2  loss = 1 / session.workers" in text


def test_the_answer_as_json_has_the_same(script: Path) -> None:
    machine = Machine(lambda settings, step, v: f"{settings.workers}" if step == 2 and v == 1 else "0")
    answer = as_json(experiment(script, machine).verdict())
    json.dumps(answer)
    assert (answer["elastic"], answer["steps"], len(answer["runs"])) == (False, 3, 4)
    difference = answer["difference"]
    assert (difference["step"], difference["virtual_worker"], difference["what"]) == (2, 1, "logged")
    assert difference["between"] == ["1 worker", "2 workers"]
    assert answer["cause"]["kind"] == "workers"
