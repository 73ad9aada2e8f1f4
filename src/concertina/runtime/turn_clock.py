"""How long a worker's own turns take, without what it waits for others."""

import statistics
import time
from collections import deque

RECENT = 6  # steps whose median counts: one slow step is no slow worker


class TurnClock:
    """Measures the steps of one generation."""

    def __init__(self, pace: float = 0.0) -> None:
        self.pace = pace  # seconds per step, the newest
        self.turns = 0  # steps measured
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._done_at = self._waited_by_then = self._waited_before = 0.0

    def turns_done(self, waited: float) -> None:
        """All turns of a step have been taken; the meeting that makes it count comes next."""
        self._done_at, self._waited_by_then = time.monotonic(), waited

    def step_done(self, seconds: float, share: int, waited: float) -> None:
        """A step is complete that was begun `seconds` ago; `waited` counts up over the generation."""
        began = time.monotonic() - seconds
        busy = self._done_at - began - (self._waited_by_then - self._waited_before)
        self.pace, self._waited_before = seconds, waited
        self.turns += 1
        if busy > 0 and self.turns > 1:  # the first step of a generation also warms up
            self._recent.append(busy / share)

    @property
    def turn_s(self) -> float:
        """Seconds per virtual worker and step; 0 if not known."""
        return statistics.median(self._recent) if self._recent else 0.0
