"""`concertina simulate` from the outside: what it prints, writes, refuses, and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from concertina.cli import app
from concertina.policies.registry import POLICIES
from concertina.simulator.batch import Task, run_all
from concertina.simulator.scenario import load_scenario

COMMAND = (sys.executable, "-c", "from concertina.cli import main; main()", "simulate")
SMALL = "synthetic:jobs=30,gpus=16"


def _call(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, list(words))


def _objects(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_prints_one_object_per_trace_and_policy_in_order() -> None:
    found = _objects(_call("simulate", SMALL, "synthetic:jobs=20", "-p", "fifo", "-p", "srtf", "--json", "-j", "1"))
    assert [(line["trace"], line["policy"]) for line in found] == [
        (SMALL, "fifo"),
        (SMALL, "srtf"),
        ("synthetic:jobs=20", "fifo"),
        ("synthetic:jobs=20", "srtf"),
    ]
    assert [line["jobs"] for line in found] == [30, 30, 20, 20]


def test_processes_change_nothing_but_the_times() -> None:
    def run(processes: str) -> list[dict[str, object]]:
        words = ("simulate", SMALL, "-p", "fifo", "-p", "tiresias", "-p", "srtf", "--json", "-j", processes)
        return [
            {key: value for key, value in line.items() if key != "wall_s" and not key.startswith("decision_ms")}
            for line in _objects(_call(*words))
        ]

    assert run("1") == run("2")


def test_a_table_is_printed_for_people() -> None:
    result = _call("simulate", SMALL, "-p", "fifo", "-p", "srtf", "-j", "1")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{SMALL}: 30 jobs on 16 gpu")
    assert "JCT: mean time from submission to completion" in " ".join(result.stdout.split())
    assert "cluster 2x8, as the trace implies" in result.stderr


def test_log_gives_every_decision_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert _call("simulate", SMALL, "-p", "fifo", "--log", str(log)).exit_code == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert list(lines[0]) == ["trace", "policy", "time_s", "job", "action", "before", "after", "reason"]
    assert {line["job"] for line in lines if line["action"] == "launch"} == {f"job-{i}" for i in range(30)}
    assert all(line["reason"] for line in lines)


def test_html_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert _call("simulate", SMALL, "-p", "fifo", "--html", str(page)).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "cluster 2x8, as the trace implies" in text


def test_a_saved_trace_gives_the_same_answer(tmp_path: Path) -> None:
    saved = tmp_path / "saved.csv"
    first = _objects(_call("simulate", SMALL, "-p", "srtf", "--json", "--save-trace", str(saved)))
    second = _objects(_call("simulate", str(saved), "-p", "srtf", "--cluster", "2x8", "--json"))
    assert first[0]["avg_jct_s"] == second[0]["avg_jct_s"]
    assert second[0]["trace"] == "saved"


def test_noise_follows_the_seed() -> None:
    def jct(*words: str) -> object:
        return _objects(_call("simulate", SMALL, "-p", "fifo", "--json", *words))[0]["avg_jct_s"]

    assert jct("--noise", "0.3", "--seed", "1") == jct("--noise", "0.3", "--seed", "1")
    assert jct("--noise", "0.3", "--seed", "1") != jct("--noise", "0.3", "--seed", "2")


@pytest.mark.parametrize("option", ["--gap", "--tick"])
def test_rounds_can_be_spaced(option: str) -> None:
    def rounds(seconds: str) -> object:
        return _objects(_call("simulate", SMALL, "-p", "fifo", "--json", option, seconds))[0]["rounds"]

    assert rounds("100000") < rounds("0")  # type: ignore[operator]


def test_overhead_in_seconds_makes_jobs_later() -> None:
    def jct(overhead: str) -> object:
        return _objects(_call("simulate", SMALL, "-p", "fifo", "--json", "--overhead", overhead))[0]["avg_jct_s"]

    assert jct("1000") > jct("instant")  # type: ignore[operator]


def test_skip_bad_rows_counts_what_it_leaves_out(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("id,submit_s,gpus,duration_s\na,0,1,5\nb,-1,1,5\nc,0,9,5\n")
    strict = _call("simulate", str(trace), "--cluster", "1x8", "-p", "fifo")
    assert strict.exit_code == 2
    assert "row 2, column submit_s: -1 is below 0; needed" in strict.stderr
    lax = _call("simulate", str(trace), "--cluster", "1x8", "-p", "fifo", "--skip-bad-rows", "--json")
    assert [line["jobs"] for line in _objects(lax)] == [1]
    assert "2 rows skipped: row 2, column submit_s" in lax.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("missing.csv",), "missing.csv: no such file"),
        ((SMALL, "-p", "magic"), "no policy named 'magic'; known: "),
        ((SMALL, "--overhead", "magic"), "no overhead model named 'magic'"),
        ((SMALL, "--cluster", "big"), "cluster 'big': needed NODESxSLOTS"),
        ((SMALL, "--cluster", "1x1"), "needed at most 1, the devices of one type"),
        ((SMALL, "--placement", "magic"), "no placement named 'magic'"),
        ((SMALL, "--html", "no-folder/page.html"), "can not be written: there is no folder no-folder"),
        ((SMALL, "synthetic:jobs=3", "--save-trace", "x.csv"), "it would hold 2 traces"),
        ((SMALL, "--throughput", "missing.csv"), "missing.csv: no such file; needed a table of measured speeds"),
        (("synthetic:jobs=few",), "jobs=few; needed a whole number"),
    ],
)
def test_bad_input_gives_one_sentence_and_exit_code_2(
    words: Sequence[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _call("simulate", *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_policies_lists_all_with_their_papers() -> None:
    lines = _objects(_call("policies", "--json"))
    assert [line["name"] for line in lines] == list(POLICIES)
    assert all(line["paper"] for line in lines)
    assert all(name in _call("policies").stdout for name in POLICIES)


def test_help_teaches_with_examples() -> None:
    text = " ".join(_call("simulate", "--help").stdout.split())
    assert "concertina simulate synthetic:jobs=500,load=0.9 -p fifo -p tiresias" in text
    assert all(
        option in text
        for option in (
            "--policy",
            "--cluster",
            "--throughput",
            "--overhead",
            "--json",
            "--html",
            "--log",
            "--seed",
        )
    )


def test_a_worker_that_fails_says_why_and_the_rest_is_ended() -> None:
    scenario = load_scenario(SMALL)
    tasks = [Task(scenario=scenario, policy=name) for name in ("fifo", "magic", "fifo")]
    with pytest.raises(Exception, match="no policy named 'magic'"):
        list(run_all(tasks, processes=2))
    assert _children() == []


def test_a_caller_who_stops_early_leaves_no_process_behind() -> None:
    results = run_all([Task(scenario=load_scenario(SMALL), policy="fifo")] * 4, processes=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert _children() == []


def _children(pid: int | None = None) -> list[int]:
    """Processes that run a simulation for that process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == (pid or os.getpid()) and b"spawn_main" in command:
            found.append(int(folder.name))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_stopped_run_leaves_no_process_behind(blow: signal.Signals) -> None:
    """The blow falls as soon as both children are there; they would have minutes of work before them."""
    words = ("synthetic:jobs=20000,load=20,gpus=64", "-p", "themis", "-p", "gandiva", "-j", "2")
    process = subprocess.Popen(
        (*COMMAND, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    children: list[int] = []
    while len(children) < 2 and process.poll() is None:
        children = _children(process.pid)
    assert process.poll() is None, process.communicate()
    if blow is signal.SIGINT:
        os.killpg(process.pid, blow)  # as a terminal does: parent and children alike
    else:
        process.send_signal(blow)
    _, words_left = process.communicate()
    while any(Path(f"/proc/{child}").exists() and not _is_zombie(child) for child in children):
        pass  # the children notice by themselves; the time-out of the test is the limit
    if blow is signal.SIGINT:
        assert process.returncode == 130
        assert words_left.strip().endswith("stopped; nothing is left running")
        assert "Traceback" not in words_left


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
