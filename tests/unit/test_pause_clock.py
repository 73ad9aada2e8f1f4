"""When a change that has failed again and again is tried once more."""

from concertina.master.machine_types import State
from concertina.master.pause_clock import PauseClock


def paused(seconds: float, next_generation: int = 4) -> State:
    return State(virtual=4, target=2, pause_s=seconds, next_generation=next_generation)


def test_a_pause_is_over_when_it_has_lasted_so_long_since_it_was_first_seen() -> None:
    clock = PauseClock()
    assert [clock.is_over(paused(5.0), now) for now in (100.0, 104.9, 105.0)] == [False, False, True]


def test_each_pause_counts_from_its_own_beginning() -> None:
    clock = PauseClock()
    clock.is_over(paused(5.0), 100.0)
    assert not clock.is_over(paused(10.0, next_generation=5), 111.0)
    assert not clock.is_over(paused(0.0, next_generation=5), 112.0)
    assert not clock.is_over(paused(10.0, next_generation=5), 121.5)
    assert clock.is_over(paused(10.0, next_generation=5), 131.5)


def test_without_a_pause_none_is_over() -> None:
    assert not PauseClock().is_over(paused(0.0), 1e9)
