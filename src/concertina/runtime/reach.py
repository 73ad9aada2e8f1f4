"""Whom on other hosts this worker cannot reach, and since when: what it tells the master with its signs of life. Pure.

Only connections count, not how long somebody takes to answer over one: a host whose kernel answers is reached, however
slow the script is that runs there.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

RECENT_SECONDS = 20.0  # what was not tried again for so long is no longer known
MOST_TOLD = 64  # workers in one sign of life


@dataclass(slots=True)
class Reach:
    """Kept by the wire, read by the link's thread. `clock` gives seconds that only grow."""

    clock: Callable[[], float]
    _since: dict[int, float] = field(default_factory=dict)  # worker -> when it could not be reached first
    _tried: dict[int, float] = field(default_factory=dict)  # and last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, worker: int) -> None:
        """A connection to it broke, or could not be made."""
        with self._lock:
            now = self.clock()
            if now - self._tried.get(worker, now) > RECENT_SECONDS:
                self._since.pop(worker, None)
            self._since.setdefault(worker, now)
            self._tried[worker] = now

    def answered(self, worker: int) -> None:
        with self._lock:
            self._since.pop(worker, None)
            self._tried.pop(worker, None)

    def cut(self) -> list[tuple[int, float]]:
        """Workers that cannot be reached, with the seconds since when; the longest first."""
        with self._lock:
            now = self.clock()
            known = [(n, now - at) for n, at in self._since.items() if now - self._tried[n] <= RECENT_SECONDS]
        return sorted(known, key=lambda found: (-found[1], found[0]))[:MOST_TOLD]
