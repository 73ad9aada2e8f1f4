"""Charts are read from a job's events later than they were written, and over several runs of it."""

import json
from pathlib import Path
from typing import Any

from concertina.server.progress import Progress

WALL = 1_700_000_000.0
AT = 500.0  # the workers' clock at the same moment


def event(kind: str, after_s: float, **more: Any) -> dict[str, Any]:
    return {"time": WALL + after_s, "event": kind, **more}


def sign(kind: str, after_s: float, worker: int, **more: Any) -> dict[str, Any]:
    return event(kind, after_s, worker=worker, at=AT + after_s, **more)


def a_run(begin_s: float, step: int) -> list[dict[str, Any]]:
    """One worker starts, and a second one joins."""
    started = {"generation": 0, "workers": 1, "members": [0], "step": step, "reason": "it starts"}
    grown = {"generation": 1, "workers": 2, "members": [0, 1], "step": step + 2, "reason": "1 worker -> 2 workers"}
    return [
        sign("master_started", begin_s, -1),
        event("generation_started", begin_s + 1, **started),
        sign("worker_started", begin_s + 1.5, 0),
        sign("step", begin_s + 3, 0, step=step + 1, log={"loss": 1.0}),
        sign("step", begin_s + 4, 0, step=step + 2, log={"loss": 0.5}),
        event("change_begun", begin_s + 4, generation=1, joiners=[1], leavers=[]),
        sign("worker_started", begin_s + 4.25, 1),
        event("generation_started", begin_s + 5, **grown),
    ]


def test_every_run_begins_its_own_generations_and_times_are_those_of_the_events(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "little-1"
    folder.mkdir(parents=True)
    lines = a_run(0.0, 0) + a_run(100.0, 2)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = Progress(tmp_path).chart("little-1")
    rows = [(g["generation"], g["step"], g["workers"], g["at_s"] - WALL, g["phases"]) for g in chart["generations"]]
    assert rows == [
        (0, 0, 1, 1.0, {"start": 0.5}),
        (1, 2, 2, 5.0, {"start": 0.25}),
        (0, 2, 1, 101.0, {"start": 0.5}),
        (1, 4, 2, 105.0, {"start": 0.25}),
    ]
    assert [(point["step"], point["values"]["loss"]) for point in chart["points"]] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1.0),
        (4, 0.5),
    ]


def test_a_stop_is_what_its_runner_measured_and_unknown_until_then(tmp_path: Path) -> None:
    """Of a long job, too few steps are written down to measure it again."""
    folder = tmp_path / "jobs" / "little-1"
    folder.mkdir(parents=True)
    thinned = [sign("step", step, 0, step=step, log={}) for step in (8196, 8200, 8204, 8208, 8212, 8216)]
    timed = event("generation_timed", 7000.0, generation=1, step=8198, workers=2, reason="", stop_s=0.25, phases={})
    lines = [*a_run(0.0, 0), *a_run(5000.0, 8196), *thinned, timed, *a_run(9000.0, 9000)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = Progress(tmp_path).chart("little-1")["generations"]
    assert [row["stop_s"] for row in rows] == [None, None, None, 0.25, None, None]


def test_a_loss_that_is_no_number_any_more_does_not_end_the_charts(tmp_path: Path) -> None:
    """A keeper writes null for it: JSON has no word for it."""
    folder = tmp_path / "jobs" / "little-1"
    folder.mkdir(parents=True)
    losses = [1.0, 0.5, None, None]
    lines = [sign("step", step, 0, step=step, log={"loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = Progress(tmp_path).chart("little-1")["points"]
    assert [(p["step"], p["values"]["loss"], p["steps_per_s"]) for p in points] == [
        (1, 1.0, None),
        (2, 0.5, 1.0),
        (3, None, 1.0),
        (4, None, 1.0),
    ]
