"""Which jobs are forgotten, and what of them is not."""

from pathlib import Path

import pytest

from concertina.cli.prune import words
from concertina.cluster.prune import counted_in, forgettable
from concertina.cluster.records import JobState, Spent
from concertina.cluster.trash import Trash
from concertina.core.job import JobPhase

NOW, DAY = 1_800_000_000.0, 86_400.0


def ended(name: str, days: float | None) -> JobState:
    return JobState(id=name, phase=JobPhase.FINISHED, ended_s=None if days is None else NOW - days * DAY)


@pytest.mark.parametrize(
    ("keep", "before_days", "gone"),
    [
        (0, 99.0, []),
        (2, 99.0, ["month", "week"]),
        (9, 99.0, []),
        (9, 5.0, ["month", "week"]),
        (1, 99.0, ["month", "week", "days"]),
        (0, 0.0, ["month", "week", "days"]),  # not those of today: they may be submitted again
    ],
)
def test_the_newest_stay_and_what_is_old_enough_goes(keep: int, before_days: float, gone: list[str]) -> None:
    states = [ended("days", 3.0), ended("month", 30.0), ended("today", 0.5), ended("week", 7.0)]
    assert forgettable(states, NOW, keep=keep, before_s=NOW - before_days * DAY) == gone


def test_a_job_whose_end_nobody_noted_stays() -> None:
    assert forgettable([ended("a", None), ended("b", 9.0)], NOW, before_s=NOW) == ["b"]


def test_what_was_received_is_counted_once() -> None:
    job = JobState(id="a", service_s=50.0)
    once = counted_in(None, "u", job)
    assert once == Spent(user="u", service_s=50.0, jobs=("a",))
    assert counted_in(once, "u", job) is once
    for number in range(40):
        once = counted_in(once, "u", JobState(id=f"j{number}", service_s=1.0))
    assert (once.service_s, len(once.jobs)) == (90.0, 16)


def test_a_folder_is_away_at_once_and_removed_in_the_end(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "a"
    (job / "checkpoints").mkdir(parents=True)
    (job / "events.jsonl").write_text("{}\n")
    left = tmp_path / "trash" / "of-a-process-that-died"
    left.mkdir(parents=True)
    trash = Trash(tmp_path / "trash")
    trash.take(job)
    assert not job.exists()
    trash.take(job)  # again, after a crash
    assert trash._thread is not None
    trash._thread.join(10.0)
    assert list((tmp_path / "trash").iterdir()) == []
    trash.close()


def test_what_goes_is_told_in_words() -> None:
    many = [f"j{n}" for n in range(12)]
    assert words([], "", 2 * DAY, True) == ["no job ended more than 2 d ago: nothing to forget"]
    assert words(["a"], "gone", DAY, False) == ["1 job: gone", "a"]
    assert words(many, "gone", DAY, True) == ["12 jobs would be forgotten", *many[:10], "and 2 more"]
