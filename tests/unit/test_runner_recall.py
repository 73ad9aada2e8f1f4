"""What a run that goes on with a job tells of the runs before it."""

from typing import Any

from concertina.report import Report, SampleBook
from concertina.runner import Run


def test_generations_of_earlier_runs_keep_their_times() -> None:
    run = object.__new__(Run)  # nothing is started
    run.report, run._samples = Report(virtual=2), SampleBook(resumed=True)
    began: dict[str, Any] = {"event": "generation_started", "step": 0, "workers": 1, "reason": "started"}
    timed = {**began, "event": "generation_timed", "phases": {"import": 1.5}}
    run.recall(
        [
            {"event": "run_started"},
            {**began, "generation": 1},
            {**timed, "generation": 1, "stop_s": 0.5},
            {"event": "run_started"},
            {**began, "generation": 1},
            {**timed, "generation": 1, "stop_s": 0.25},
            {**timed, "generation": 7, "stop_s": 9.0},  # of a line that was torn
        ]
    )
    assert [(row.stop_s, row.phases) for row in run.report.generations] == [
        (0.5, timed["phases"]),
        (0.25, timed["phases"]),
    ]
