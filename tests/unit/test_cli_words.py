"""How a job reads on the command line, which job a short name means, and how events are taken from a stream."""

from datetime import UTC, datetime
from typing import Any

import pytest
import typer
from rich.console import Console

from concertina.cli.client import choose, parse_events
from concertina.cli.job_words import (
    deadline_words,
    facts,
    jobs_table,
    phase_named,
    reasons,
    state_words,
    summary,
    verdict,
    why_lines,
)
from concertina.cli.submit import exit_code, quote_lines, until_decided, until_over
from concertina.core.errors import UsageError

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
T = NOW.timestamp()


def job(**fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "id": "digits-1a2b",
        "name": "digits",
        "user": "ada",
        "script": "/x/digits.py",
        "args": [],
        "virtual": 4,
        "min_workers": 1,
        "max_workers": 0,
        "pinned": 0,
        "phase": "running",
        "activity": "training",
        "profiling": False,
        "reason": "grew to 2 workers: 2 slots were free",
        "slots": ["here/0", "here/1"],
        "workers": 2,
        "step": 50,
        "total_steps": 100,
        "progress": 0.5,
        "steps_per_s": 2.0,
        "eta_s": T + 25,
        "deadline_s": None,
        "promised_s": None,
        "slack_s": None,
        "soft": False,
        "submitted_s": T - 60,
        "first_start_s": T - 50,
        "ended_s": None,
        "earliest_s": None,
        "generation": 1,
        "values": {"loss": 0.25},
        "history": [{"at_s": T - 50, "workers": 2, "reason": "started", "step": 0}],
        "exit": None,
        "error": "",
    }
    return {**plain, **fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "running"),
        ({"activity": "changing"}, "changing"),
        ({"phase": "waiting", "activity": "suspended"}, "suspended"),
        ({"phase": "submitted", "profiling": True}, "being measured"),
        ({"phase": "rejected"}, "refused"),
    ],
)
def test_a_state_in_words(fields: dict[str, Any], words: str) -> None:
    assert state_words(job(**fields)) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"deadline_s": T + 600, "slack_s": 575.0}, "12:10:00, 10 min to spare"),
        ({"deadline_s": T + 20, "slack_s": -5.0}, "12:00:20, 5 s too late"),
        ({"deadline_s": T + 600, "soft": True}, "wanted 12:10:00, in 10 min"),
        ({"deadline_s": T - 5, "phase": "finished", "ended_s": T - 25}, "11:59:55, kept by 20 s"),
        ({"deadline_s": T - 25, "phase": "finished", "ended_s": T - 5}, "11:59:35, missed by 20 s"),
        ({"deadline_s": T + 9, "phase": "rejected", "ended_s": T}, "12:00:09"),
    ],
)
def test_a_deadline_in_words(fields: dict[str, Any], words: str) -> None:
    assert deadline_words(job(**fields), NOW) == words


def test_the_table_shows_every_job_and_takes_no_markup_from_them() -> None:
    screen = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    odd = job(id="b", reason="[red]boo[/red]", progress=None, phase="waiting", activity=None, slots=[])
    screen.print(jobs_table([job(), odd], NOW, 140))
    text = screen.export_text()
    screen.file.close()
    assert "digits-1a2b" in text
    assert "50%" in text
    assert "[red]boo[/red]" in text
    assert "2 of 4" in text


def test_a_narrow_table_has_its_reasons_below() -> None:
    screen = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    late = job(deadline_s=T + 600, slack_s=575.0, id="a-rather-long-name-1a2b3c")
    screen.print(jobs_table([late], NOW, 80))
    text = screen.export_text()
    screen.file.close()
    assert max(map(len, text.splitlines())) <= 80
    assert "10 min to spare" in text
    assert [str(line) for line in reasons([late], 80)] == [f"{late['id']}: {late['reason']}"]
    assert reasons([late], 200) == []


def test_the_summary_counts_slots_and_phases() -> None:
    found = [job(), job(phase="waiting", slots=[]), job(phase="rejected", slots=[])]
    assert summary(found, 4, 1) == "1 running on 2 of 4 slots, 1 slot reclaimed, 1 waiting, 1 refused"
    new = [job(phase="submitted", slots=[]), job(phase="submitted", profiling=True, slots=["here/0"])]
    assert summary(new, 4) == "0 running on 1 of 4 slots, 1 being measured, 1 submitted"


def test_a_phase_is_named_as_it_is_shown() -> None:
    assert (phase_named("refused"), phase_named("rejected"), phase_named("running")) == (
        "rejected",
        "rejected",
        "running",
    )
    with pytest.raises(UsageError, match=r"no phase 'runing'; needs one of submitted, waiting, running, .*refused"):
        phase_named("runing")


def test_a_refusal_says_what_could_be_promised() -> None:
    refused = job(phase="rejected", reason="needs 5 slots until then, 2 are free", earliest_s=T + 300, ended_s=T)
    assert verdict(refused, NOW) == (
        "refused: needs 5 slots until then, 2 are free\n"
        "what could be promised now: --deadline 320s"
    )  # fmt: skip
    taken = job(promised_s=T + 600, deadline_s=T + 600)
    assert verdict(taken, NOW).startswith("taken as digits-1a2b: will be done by 12:10:00 (in 10 min)")


def test_a_job_that_ended_while_it_was_measured_does_not_hide_a_deadline_it_missed() -> None:
    late = job(phase="finished", reason="all its work is done", deadline_s=T - 25, ended_s=T - 5)
    words = "taken as digits-1a2b, and already finished: all its work is done"
    assert verdict(late, NOW) == f"{words}; deadline 11:59:35, missed by 20 s"
    assert verdict({**late, "deadline_s": None}, NOW) == words


def test_ctrl_c_while_a_job_is_measured_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def follow_job(self, job_id: str) -> dict[str, Any]:
            raise KeyboardInterrupt

    for wait in (until_decided, until_over):
        with pytest.raises(typer.Exit) as ended:
            wait(Interrupted(), job(phase="submitted"), Console(width=80), quiet=False)  # type: ignore[arg-type]
        assert ended.value.exit_code == 130
        assert "the job goes on; `concertina describe digits-1a2b` shows it" in capsys.readouterr().out


def test_facts_say_that_a_job_is_pinned() -> None:
    assert dict(facts(job(pinned=2), NOW))["workers"].endswith("; pinned to 2; 1 to 4 of 4 virtual workers")
    assert "pinned" not in dict(facts(job(pinned=2, phase="finished"), NOW))["workers"]


@pytest.mark.parametrize(("phase", "code"), [("running", 0), ("finished", 0), ("rejected", 3), ("failed", 1)])
def test_the_exit_code_follows_the_phase(phase: str, code: int) -> None:
    assert exit_code(job(phase=phase)) == code


def test_facts_expect_no_end_of_what_has_ended() -> None:
    names = [name for name, _ in facts(job(phase="finished", eta_s=T, ended_s=T), NOW)]
    assert "ended" in names
    assert "expected end" not in names


def test_facts_leave_out_what_is_not_known() -> None:
    names = [name for name, _ in facts(job(eta_s=None, values={}), NOW)]
    assert {"job", "script", "state", "progress"} <= set(names)
    assert not {"expected end", "values", "deadline", "error"} & set(names)


def test_a_quote_and_a_why_in_sentences() -> None:
    band = {"low_s": T + 50, "expected_s": T + 60, "high_s": T + 90}
    answer = {"taken": True, "reason": "fits", "earliest_s": T + 120, "start": None, "end": band, "profiled": False}
    answer["delays"] = [{"job": "mlp-1", "by_s": 30.0, "before_s": 0.0, "after_s": 0.0}]
    lines = quote_lines(answer, NOW)
    assert lines[0] == "would be taken: fits"
    assert lines[1] == "expected end: 12:01:00 (in 60 s), most likely between 12:00:50 and 12:01:30"
    assert "mlp-1 would end 30 s later" in lines
    assert "guess" in lines[-1]
    why = {"why": "waits for slots", "reason": "no slot is free", "start": band, "end": None}
    assert why_lines(why, NOW)[:2] == ["waits for slots", "last decision: no slot is free"]
    at_once = {"low_s": T, "expected_s": T + 0.5, "high_s": T + 1}
    assert quote_lines({**answer, "start": at_once}, NOW)[1] == "expected start: now"
    assert why_lines({**why, "start": at_once}, NOW) == ["waits for slots", "last decision: no slot is free"]


def test_a_job_may_be_named_by_any_beginning_that_fits_one() -> None:
    jobs = [job(), job(id="mlp-7f", name="mlp"), job(id="mlp-9c", name="mlp", ended_s=T)]
    assert choose("digits-1a2b", jobs) == "digits-1a2b"
    assert choose("dig", jobs) == "digits-1a2b"
    assert choose("mlp-9", jobs) == "mlp-9c"
    assert choose("mlp", jobs) == "mlp-7f"  # the other has ended
    with pytest.raises(UsageError, match="there is no job 'x'"):
        choose("x", jobs)
    with pytest.raises(UsageError, match="fits 2 jobs"):
        choose("mlp", [job(id="mlp-1", name="mlp"), job(id="mlp-2", name="mlp")])


def test_events_are_taken_whole_from_a_stream() -> None:
    lines = [": hello", "", 'data: {"a":', "data: 1}", "id: 4", "", "event: x", 'data: {"b": 2}', "", "data: {"]
    assert list(parse_events(iter(lines))) == [{"a": 1}, {"b": 2}]
