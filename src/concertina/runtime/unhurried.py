"""Heavy work that nobody waits for: it takes the time that training leaves.

A change of members sets hundreds of megabytes aside and frees as much. The kernel needs a core for that, and where
all cores are busy, the first step after a change would be longer by it. So it is done in a thread of low priority
(on Linux a thread has one of its own).
"""

import contextlib
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LOW_PRIORITY = 10  # as a nice value: about a tenth of a core that others want, too
LIMIT_SECONDS = 1800.0  # for work that is waited for


class Unhurried:
    """One thread of low priority, which begins with its first work."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="concertina-unhurried", initializer=_lower)

    def do(self, work: Callable[[], None]) -> None:
        """Waits until it is done; raises what it raises."""
        self._pool.submit(work).result(LIMIT_SECONDS)

    def later(self, work: Callable[[], None]) -> None:
        """Sometime soon, after what was asked for before."""
        with contextlib.suppress(RuntimeError):  # closed: this process ends, and its memory goes with it
            self._pool.submit(_told, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def give_way() -> None:
    """Lets this whole process go behind others, for good: taking it down costs time that those who train on want."""
    for task in os.listdir("/proc/self/task"):
        _lower(int(task))


def _lower(task: int = 0) -> None:
    """One thread, by default the one that asks; where all of the job goes behind others already, it stays there."""
    with contextlib.suppress(OSError):  # a thread that has just ended
        os.setpriority(os.PRIO_PROCESS, task, max(LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, task)))


def _told(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:  # nobody asks for an outcome
        traceback.print_exc()
