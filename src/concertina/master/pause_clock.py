"""When a pause before the next attempt at a change is over. Pure; the time is an argument.

A new master lets a pause that it finds begin anew.
"""

from dataclasses import dataclass

from concertina.master.machine_types import State


@dataclass(slots=True)
class PauseClock:
    """Looks at the state several times a second."""

    _of: int = -1  # the next generation's number, which no two pauses have in common; -1: there is none
    _since: float = 0.0

    def is_over(self, state: State, now: float) -> bool:
        if not state.pause_s:
            self._of = -1
            return False
        if self._of != state.next_generation:
            self._of, self._since = state.next_generation, now
        return now - self._since >= state.pause_s
