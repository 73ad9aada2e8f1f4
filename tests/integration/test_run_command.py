"""`concertina run` as a user meets it: results, reports, bad input, interruption, resumption."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from concertina.report import hint_of_a_late_start
from conftest import HEAD, TRAIN

SAVE = """
if session.is_main:
    torch.save(model.state_dict(), sys.argv[1])
    print("saved after", session.step)
"""


def test_a_run_with_changes_ends_with_the_model_of_a_run_without(script, concertina, tmp_path: Path) -> None:
    path = script(TRAIN + SAVE)
    fixed = concertina("run", "--virtual", 4, "--workers", 1, path, tmp_path / "a.pt")
    assert fixed.returncode == 0, fixed.stderr
    assert "saved after 8" in fixed.stdout
    changed = concertina(
        "run", "--virtual", 4, "--workers", 2, "--resize", "2=4,5=1", "--report", tmp_path / "report.json",
        "--events", tmp_path / "events.jsonl", path, tmp_path / "b.pt",
    )  # fmt: skip
    assert changed.returncode == 0, changed.stderr
    a, b = torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt")
    assert all(torch.equal(a[k], b[k]) for k in a)

    report = json.loads((tmp_path / "report.json").read_text())
    assert {"steps", "epochs", "virtual", "scaling", "generations", "samples", "exit"} <= report.keys()
    assert (report["steps"], report["epochs"], report["virtual"], report["exit"]) == (8, 2, 4, 0)
    assert [(g["generation"], g["step"], g["workers"]) for g in report["generations"]] == [
        (0, 0, 2),
        (1, 2, 4),
        (2, 5, 1),
    ]
    first, grown, shrunk = report["generations"]
    assert first["reason"]
    assert {"start", "import", "build"} <= first["phases"].keys()
    assert {"start", "import", "build", "warm-up", "wait", "switch"} <= grown["phases"].keys()
    assert "switch" in shrunk["phases"]
    assert [(s["epoch"], s["expected"], s["seen"], s["duplicated"], s["missed"]) for s in report["samples"]] == [
        (0, 64, 64, 0, 0),
        (1, 64, 64, 0, 0),
    ]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds.count("generation_started") == 3
    timed = [
        {k: v for k, v in e.items() if k not in ("event", "time")} for e in events if e["event"] == "generation_timed"
    ]
    assert timed == report["generations"], "the stream explains each change as the report does"
    assert kinds.count("worker_started") == 2 + 2  # those who stay are not started again
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 9))
    assert all("loss" in e["log"] for e in events if e["event"] == "step")


def test_the_same_script_runs_under_plain_python(script, tmp_path: Path) -> None:
    path = script(TRAIN + SAVE)
    done = subprocess.run([sys.executable, path, tmp_path / "x.pt"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "saved after 32" in done.stdout


def test_steps_and_stop_end_all_workers_after_the_same_step(script, concertina, tmp_path: Path) -> None:
    limited = concertina("run", "--workers", 2, "--steps", 3, script(TRAIN + SAVE), tmp_path / "x.pt")
    assert "saved after 3" in limited.stdout
    body = TRAIN.replace(
        "        session.log", "        if loader.index == 1: session.stop('enough')\n        session.log"
    )
    for workers in (1, 3):
        stopped = concertina("run", "--workers", workers, script(body + SAVE), tmp_path / "x.pt")
        assert "saved after 3" in stopped.stdout, stopped.stderr


def test_level_d2_says_whether_the_model_may_mix_gpu_types(script, concertina) -> None:
    done = concertina("run", "--workers", 1, "--steps", 1, "--level", "D2", script(TRAIN))
    assert done.returncode == 0, done.stderr
    assert "the model must stay on one GPU model: it uses kernels that the vendor tunes" in done.stderr
    assert "Linear (0)" in done.stderr


def test_the_exit_code_is_the_scripts(script, concertina) -> None:
    assert concertina("run", "--workers", 1, script(TRAIN + "sys.exit(5)")).returncode == 5
    crashed = concertina("run", "--workers", 1, script(TRAIN + "raise KeyError('lost')"))
    assert crashed.returncode == 1
    assert "KeyError: 'lost' at train.py:" in crashed.stderr
    assert "Traceback" not in crashed.stderr.replace(crashed.stdout, "")


MALFORMED = {
    "a script that is missing": ([], None, "is not a file"),
    "no virtual workers": (["--virtual", "0"], TRAIN, "at least 1 virtual worker"),
    "more workers than virtual workers": (["--virtual", "2", "--workers", "3"], TRAIN, "use 1 to 2 workers"),
    "a malformed resize": (["--resize", "5:2"], TRAIN, "is not STEP=WORKERS"),
    "a resize beyond the virtual workers": (["--virtual", "2", "--resize", "5=3"], TRAIN, "needs 1 to 2 workers"),
    "resuming from nowhere": (["--resume"], TRAIN, "--resume needs --checkpoint"),
    "resuming from a folder that is not there": (["--resume", "--checkpoint", "no"], TRAIN, "does not exist"),
    "an unknown level": (["--level", "D7"], TRAIN, "not one of D0, D1, D2"),
    "an unknown way to sum": (["--reduction", "odd"], TRAIN, "not one of auto, shared, ring, contexts"),
    "a report that is a folder": (["--report", "."], TRAIN, "--report .: this is a folder"),
    "events that are a folder": (["--events", "."], TRAIN, "--events .: this is a folder"),
    "checkpoints in a file": (["--checkpoint", "train.py"], TRAIN, "--checkpoint train.py: this is a file"),
    "logs below a file": (["--run-dir", "train.py/logs"], TRAIN, "train.py is a file, and a folder is needed"),
    "a script with a syntax error": ([], "def f(:", "is not a Python script"),
    "a script that fails to import": ([], HEAD + "import nowhere_to_be_found", "cannot be imported"),
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
def test_bad_input_is_one_sentence_and_changes_nothing(what: str, script, concertina, tmp_path: Path) -> None:
    options, text, sentence = MALFORMED[what]
    path = tmp_path / "missing.py" if text is None else script(text)
    done = concertina("run", "--report", tmp_path / "report.json", *options, path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("concertina: ")
    assert sentence in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report.json").exists()
    assert len(done.stderr.splitlines()) <= 2, "the sentence, and at most the beginning of a story"
    assert not list((tmp_path / "state").rglob("*.log"))


def test_a_script_that_ends_with_2_after_training_keeps_its_report_and_logs(script, concertina, tmp_path: Path) -> None:
    ended = concertina("run", "--workers", 1, "--report", "new/report.json", "--events", "new/events.jsonl",
                       script(TRAIN + "sys.exit(2)"))  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert json.loads((tmp_path / "new" / "report.json").read_text())["steps"] == 8
    assert (tmp_path / "new" / "events.jsonl").exists()
    assert list((tmp_path / "state").rglob("worker-0.log"))


def test_ctrl_c_writes_a_checkpoint_and_resuming_gives_the_same_bits(script, concertina, tmp_path: Path) -> None:
    slow = TRAIN.replace("        loss.backward()", "        import time; time.sleep(0.03)\n        loss.backward()")
    path = script(slow + SAVE, epochs=4)
    whole = concertina("run", "--virtual", 4, "--workers", 1, path, tmp_path / "whole.pt")
    assert whole.returncode == 0, whole.stderr
    command = [
        sys.executable, "-c", "from concertina.cli import main; main()", "run", "--virtual", "4", "--workers", "3",
        "--checkpoint", "saved", "--events", "events.jsonl", str(path), "part.pt",
    ]  # fmt: skip
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "events.jsonl", 3)
    os.kill(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert "asked to stop: the job ends after the step under way" in errors
    assert not (tmp_path / "part.pt").exists()
    saved = list((tmp_path / "saved").iterdir())
    assert len(saved) == 1
    refused = concertina("run", "--virtual", 4, "--checkpoint", "saved", path, tmp_path / "rest.pt")
    assert refused.returncode == 2
    assert "already holds checkpoints" in refused.stderr
    rest = concertina(
        "run",
        "--workers",
        2,
        "--checkpoint",
        "saved",
        "--resume",
        "--report",
        "report.json",
        path,
        tmp_path / "rest.pt",
    )
    assert rest.returncode == 0, rest.stderr
    a, b = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "rest.pt")
    assert all(torch.equal(a[k], b[k]) for k in a)
    rows = json.loads((tmp_path / "report.json").read_text())["samples"]
    assert [(row["seen"], row["duplicated"], row["missed"]) for row in rows] == [(64, 0, 0)] * len(rows)
    stopped_at = int(saved[0].name.removeprefix("step-"))  # an epoch has 4 steps of 16 samples
    assert rows[0].get("earlier", 0) == 16 * (stopped_at % 4)
    assert not any("earlier" in row for row in rows[1:])


def test_sigusr1_writes_a_checkpoint_and_training_goes_on(script, concertina, tmp_path: Path) -> None:
    slow = TRAIN.replace("        loss.backward()", "        import time; time.sleep(0.03)\n        loss.backward()")
    path = script(slow + SAVE, epochs=3)
    command = [
        sys.executable, "-c", "from concertina.cli import main; main()", "run", "--virtual", "4", "--workers", "2",
        "--events", "events.jsonl",
    ]  # fmt: skip
    with_folder = [*command, "--checkpoint", "saved", str(path), "end.pt"]
    job = subprocess.Popen(with_folder, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "events.jsonl", 3)
    os.kill(job.pid, signal.SIGUSR1)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (tmp_path / "saved").iterdir())
    first, last = steps[0], steps[-1]
    assert 3 < first < last, "one on the way, and the one at the end"
    (tmp_path / "end.pt").rename(tmp_path / "whole.pt")
    for folder in sorted((tmp_path / "saved").iterdir())[1:]:
        shutil.rmtree(folder)
    rest = concertina("run", "--workers", 3, "--checkpoint", "saved", "--resume", path, tmp_path / "end.pt")
    assert rest.returncode == 0, rest.stderr
    a, b = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "end.pt")
    assert all(torch.equal(a[k], b[k]) for k in a)

    (tmp_path / "events.jsonl").unlink()
    without = subprocess.Popen([*command, str(path), "x.pt"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "events.jsonl", 3)
    os.kill(without.pid, signal.SIGUSR1)
    _, errors = without.communicate(timeout=60)
    assert without.returncode == 0, errors
    assert "there is no folder for it (--checkpoint DIR)" in errors


def wait_for_step(events: Path, step: int) -> None:
    patience = time.monotonic() + 60
    while time.monotonic() < patience:
        if events.exists() and f'"step": {step},' in events.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def test_unusable_checkpoints_are_refused(script, concertina, tmp_path: Path) -> None:
    path = script(TRAIN)
    made = concertina("run", "--workers", 1, "--checkpoint", "saved", "--checkpoint-every", 3, path)
    assert made.returncode == 0, made.stderr
    names = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert names == ["step-00000003", "step-00000006", "step-00000008"]

    other = script(
        TRAIN.replace("nn.Linear(8, 16)", "nn.Linear(8, 12)").replace("nn.Linear(16, 1)", "nn.Linear(12, 1)")
    )
    done = concertina("run", "--checkpoint", "saved", "--resume", other)
    assert done.returncode == 2
    assert "is of another model: 0.weight is 16x8" in done.stderr

    done = concertina("run", "--virtual", 2, "--checkpoint", "saved", "--resume", script(TRAIN))
    assert done.returncode == 2
    assert "made with 4 virtual workers" in done.stderr
    done = concertina("run", "--virtual", 0, "--checkpoint", "saved", "--resume", script(TRAIN))
    assert (done.returncode, "at least 1 virtual worker" in done.stderr) == (2, True), done.stderr

    (tmp_path / "saved" / "step-00000008" / "shared.pt").write_bytes(b"torn")
    done = concertina("run", "--checkpoint", "saved", "--resume", "--events", "e.jsonl", script(TRAIN))
    assert done.returncode == 0, done.stderr
    assert "passed over" in done.stderr
    first = next(json.loads(x) for x in (tmp_path / "e.jsonl").read_text().splitlines() if '"training"' in x)
    assert first["step"] == 6


def test_help_teaches(concertina) -> None:
    assert "run" in concertina("--help").stdout
    text = concertina("run", "--help").stdout
    assert "--resize" in text
    assert "Examples" in text
    assert concertina("--version").stdout.startswith("concertina ")


def test_what_only_the_loop_sets_is_there_after_it_where_a_job_resumes_at_the_end_of_an_epoch(
    script, concertina, tmp_path: Path
) -> None:
    """There is no turn left that could set it."""
    path = script(TRAIN + "    print('loss', loss.item())\n")
    whole = concertina("run", "--workers", 1, path)
    first = concertina("run", "--workers", 1, "--steps", 4, "--checkpoint", "saved", path)
    assert (first.returncode, first.stdout.count("loss ")) == (0, 1), first.stderr
    rest = concertina("run", "--workers", 2, "--resume", "--checkpoint", "saved", path)
    assert rest.returncode == 0, rest.stderr
    assert rest.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


def test_a_name_that_is_missing_after_a_late_start_is_explained() -> None:
    """A stream has no batch to spare for that."""
    assert "at the end of an epoch" in hint_of_a_late_start("NameError: name 'loss' is not defined at train.py:9")
    assert hint_of_a_late_start("TypeError: 'loss' is not a name") == ""


def test_a_script_that_leaves_without_an_exception_is_told_by_its_last_words(script, concertina) -> None:
    path = script("import argparse\nargparse.ArgumentParser().parse_args()", name="strict.py")
    for command in ("run", "verify", "profile"):
        ended = concertina(command, path, "--no-such")
        assert ended.returncode == 2
        assert "ended with exit code 2; the last it printed is: strict.py: error: unrecognized arg" in ended.stderr


def test_a_refusal_is_told_once(script, concertina) -> None:
    """The worker prints it, for its log, and the command ends with it."""
    sentence = "concertina: the script never called concertina.join()"
    plain = concertina("run", "--workers", 1, script("print('first')", name="plain.py"))
    assert plain.stdout == "first\n"
    assert plain.stderr.count(sentence) == 1
