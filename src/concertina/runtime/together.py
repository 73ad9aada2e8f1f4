"""A newcomer that follows several members at once, a share of the state from each: every one in a thread of its own."""

import threading
import time
from collections.abc import Sequence

from concertina.runtime.catch_up import CatchUp

IDLE_SECONDS = 0.001


class Together:
    """Several shares that are followed beside each other; to the outside, one."""

    def __init__(self, shares: Sequence[CatchUp]) -> None:
        self._shares = [_Beside(share) for share in shares]
        for share in self._shares:
            share.thread.start()

    @property
    def in_step(self) -> bool:
        return all(share.catch_up.in_step for share in self._shares)

    @property
    def version(self) -> int:
        return min(share.catch_up.version for share in self._shares)

    def work(self) -> bool:
        """The threads do; OSError if one of the members cannot be read any more."""
        for share in self._shares:
            if share.error is not None:
                raise share.error
        return False

    def reaches(self, step: int) -> bool:
        self.work()
        reached = []
        for share in self._shares:
            with share.lock:
                reached.append(share.catch_up.reaches(step))
        return all(reached)

    def finish(self, step: int) -> int:
        self._stop()
        return sum(share.catch_up.finish(step) for share in self._shares)

    def leave_to_switch(self, why: str) -> None:
        for share in self._shares:
            with share.lock:
                share.catch_up.leave_to_switch(why)

    def _stop(self) -> None:
        for share in self._shares:
            share.ends = True
        for share in self._shares:
            share.thread.join()

    def close(self) -> None:
        for share in self._shares:
            share.ends = True
            share.catch_up.close()  # whoever waits for an answer is woken
        self._stop()

    # -- what is told of it ------------------------------------------------------------------------------------------

    @property
    def copied_bytes(self) -> int:
        return sum(share.catch_up.copied_bytes for share in self._shares)

    @property
    def copied_at(self) -> float:
        return max(share.catch_up.copied_at for share in self._shares)

    @property
    def replayed(self) -> int:
        return min(share.catch_up.replayed for share in self._shares)

    @property
    def differing(self) -> int:
        return sum(share.catch_up.differing for share in self._shares)

    @property
    def gave_up(self) -> str:
        return next((share.catch_up.gave_up for share in self._shares if share.catch_up.gave_up), "")


class _Beside:
    """One share and its thread."""

    def __init__(self, catch_up: CatchUp) -> None:
        self.catch_up = catch_up
        self.lock = threading.Lock()
        self.ends = False
        self.error: OSError | None = None
        self.thread = threading.Thread(target=self._run, name="concertina-follow", daemon=True)

    def _run(self) -> None:
        while not self.ends:
            try:
                with self.lock:
                    worked = self.catch_up.work()
            except OSError as error:
                self.error = error
                return
            if not worked:
                time.sleep(IDLE_SECONDS)
