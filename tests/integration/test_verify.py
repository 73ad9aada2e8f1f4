"""`concertina verify` on real scripts: one is right, each of the others has one fault planted in it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from concertina.backends.local import LocalBackend
from concertina.core.errors import JobFailed
from concertina.runner import Listener, Report, RunSettings, run
from concertina.verify.answer import as_json, in_words
from concertina.verify.causes import CauseKind
from concertina.verify.experiment import Experiment, Verdict, VerifySettings

SCRIPTS = Path(__file__).parent / "verify_scripts"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    """One nursery for all runs: importing torch takes longer than most of them."""
    opened = LocalBackend.open(tmp_path_factory.mktemp("nursery"), threads=1)
    yield opened
    opened.close()


def verify(
    name: str, backend: LocalBackend, folder: Path, virtual: int = 2, changes: str | None = "", steps: int = 5
) -> Verdict:
    def launch(settings: RunSettings, listener: Listener, fresh: bool) -> Report:
        return run(settings, listener, backend)

    settings = VerifySettings(script=SCRIPTS / f"{name}.py", virtual=virtual, steps=steps, changes=changes)
    return Experiment(settings, launch, folder).verdict()


def test_a_clean_script_passes_at_1_2_3_workers_and_through_changes(backend: LocalBackend, tmp_path: Path) -> None:
    verdict = verify("clean", backend, tmp_path, virtual=3, changes=None, steps=8)
    assert verdict.difference is None, in_words(verdict)
    assert [run.name for run in verdict.runs][2:] == ["2 workers", "3 workers", "1 -> 3 -> 2 -> 3 workers"]
    assert all(len(run.turns) == 8 * 3 and run.steps == 8 for run in verdict.runs)
    assert verdict.notes == ()


def test_accumulation_evaluation_and_data_processes_are_followed_round_by_round(
    backend: LocalBackend, tmp_path: Path
) -> None:
    verdict = verify("clean_many_rounds", backend, tmp_path, virtual=3, changes="3=2,5=1", steps=6)
    assert verdict.difference is None, in_words(verdict)
    rounds = {step: max(r for s, r, _ in verdict.runs[0].turns if s == step) for step in range(1, 7)}
    assert rounds == {1: 1, 2: 1, 3: 1, 4: 1, 5: 3, 6: 1}  # two to accumulate; two of evaluation between 4 and 5


def test_a_compiled_model_is_looked_at_from_outside(backend: LocalBackend, tmp_path: Path) -> None:
    verdict = verify("compiled", backend, tmp_path, changes="2=2", steps=3)
    assert verdict.difference is None, in_words(verdict)
    calls = {call.module for run in verdict.runs for turn in run.turns.values() for call in turn.calls}
    assert calls == {""}, "hooks within would be compiled, too, and change what is computed"


FAULTS = [
    # script, cause, step, what differs, where or with what, a line to look at, layer
    ("own_generator", CauseKind.OWN_GENERATOR, 1, "output", "`model.noise.generator`", "self.generator =", "noise"),
    ("worker_count", CauseKind.WORKERS, 1, "loss", "the number of workers", "session.workers", ""),
    ("main_in_loss", CauseKind.WORKERS, 1, "gradient", "session.is_main", "session.is_main", "0"),
    ("urandom", CauseKind.NOT_REPEATABLE, 1, "loss", "os.urandom", "os.urandom", ""),
    ("unseeded", CauseKind.UNSEEDED, 1, "random", "NumPy's global generator", "", ""),
    ("carried_state", CauseKind.CARRIED_STATE, 1, "loss", "`average`", "average = 0.9 * average", ""),
    ("counting_dataset", CauseKind.DATA, 1, "batch", "`dataset.taken`", "self.taken += 1", ""),
    ("main_only", CauseKind.PARAMETERS, 5, "replica", "on some workers only", "if session.is_main", "0"),
]

REFUSED = [
    ("clamp_in_body", "parameters are changed in the loop body by hand"),
    ("scheduler_forgotten", "ExponentialLR acts on the prepared model but was not given to prepare()"),
    ("seeded_by_rank", "session.rank before prepare()"),
    ("random_between_epochs", "random numbers were drawn outside the loop"),
]


@pytest.mark.parametrize(("name", "sentence"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_fault_that_training_refuses_is_answered_with_its_sentence(
    backend: LocalBackend, tmp_path: Path, name: str, sentence: str
) -> None:
    with pytest.raises(JobFailed, match=re.escape(sentence)) as refusal:
        verify(name, backend, tmp_path)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "kind", "step", "what", "words", "line", "layer"), FAULTS, ids=[row[0] for row in FAULTS]
)
def test_a_planted_fault_is_found_and_its_cause_is_named(
    backend: LocalBackend,
    tmp_path: Path,
    name: str,
    kind: CauseKind,
    step: int,
    what: str,
    words: str,
    line: str,
    layer: str,
) -> None:
    verdict = verify(name, backend, tmp_path)
    answer, text = as_json(verdict), in_words(verdict)
    assert verdict.cause is not None
    assert verdict.cause.kind is kind, text
    assert (answer["difference"]["step"], answer["difference"]["what"]) == (step, what), text
    assert words in text
    assert answer["difference"]["layer"] == layer, text
    assert not line or any(line in suspect.text for suspect in verdict.cause.look_at), text


def test_state_that_a_new_worker_does_not_have_shows_in_the_run_with_changes(
    backend: LocalBackend, tmp_path: Path
) -> None:
    verdict = verify("lost_state", backend, tmp_path, changes="2=2")
    assert verdict.cause is not None
    assert verdict.cause.kind is CauseKind.LOST_STATE
    assert verdict.difference is not None
    assert verdict.difference.step == 3
    assert "averages" in in_words(verdict)


def test_a_logged_time_does_no_harm(backend: LocalBackend, tmp_path: Path) -> None:
    verdict = verify("logs_time", backend, tmp_path, steps=4)
    assert verdict.elastic
    assert "`seconds`" in verdict.notes[0]


def test_a_script_that_fails_by_itself_is_not_judged(backend: LocalBackend, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no data here')\n")
    settings = VerifySettings(script=script)
    with pytest.raises(JobFailed, match="no data here"):
        Experiment(settings, lambda s, listener, fresh: run(s, listener, backend), tmp_path / "records").verdict()


# -- the command ------------------------------------------------------------------------------------------------------


def command(*args: str) -> subprocess.CompletedProcess[str]:
    entry = [sys.executable, "-c", "from concertina.cli import main; main()", "verify"]
    return subprocess.run([*entry, *args], capture_output=True, text=True, timeout=120, check=False)


def test_the_command_answers_in_json_with_exit_code_1(tmp_path: Path) -> None:
    asked = ("--virtual", "2", "--steps", "2", "--changes", "none", "--json")
    done = command(*asked, str(SCRIPTS / "worker_count.py"))
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["cause"]["kind"] == "workers"
    assert [r["name"] for r in answer["runs"]] == ["1 worker", "1 worker again", "2 workers", "2 workers again"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("missing.py",), "missing.py is not a file"),
        (("--virtual", "0", "{script}"), "at least 1 virtual worker"),
        (("--workers", "1,9", "{script}"), "9 workers for 4 virtual workers"),
        (("--changes", "3=9", "{script}"), "--changes 3=9"),
        (("--workers", "many", "{script}"), "--workers 'many'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(args: tuple[str, ...], sentence: str) -> None:
    done = command(*(arg.replace("{script}", str(SCRIPTS / "clean.py")) for arg in args))
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_help_teaches_with_an_example() -> None:
    done = command("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "concertina verify train.py" in text
    assert "Exit code 0: bitwise elastic" in text
