"""Whom a worker says it cannot reach."""

from concertina.runtime.reach import MOST_TOLD, RECENT_SECONDS, Reach


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failing(*moments: float, worker: int = 1) -> tuple[Reach, Clock]:
    clock = Clock()
    reach = Reach(clock)
    for moment in moments:
        clock.now = moment
        reach.failed(worker)
    return reach, clock


def test_the_time_counts_from_the_first_failure() -> None:
    reach, clock = failing(100.0, 105.0, 111.0)
    clock.now = 112.0
    assert reach.cut() == [(1, 12.0)]


def test_an_answer_ends_it() -> None:
    reach, _ = failing(100.0, 105.0)
    reach.answered(1)
    assert reach.cut() == []
    reach.failed(1)
    assert reach.cut() == [(1, 0.0)]


def test_what_nobody_tried_again_is_no_longer_said_and_begins_anew() -> None:
    reach, clock = failing(100.0)
    clock.now += RECENT_SECONDS + 1
    assert reach.cut() == []
    reach.failed(1)
    assert reach.cut() == [(1, 0.0)]


def test_the_longest_are_said_first_and_only_so_many() -> None:
    reach, clock = failing(100.0, worker=7)
    clock.now = 101.0
    for worker in range(10, 10 + 2 * MOST_TOLD):
        reach.failed(worker)
    assert reach.cut()[:2] == [(7, 1.0), (10, 0.0)]
    assert len(reach.cut()) == MOST_TOLD
