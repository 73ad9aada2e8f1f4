"""Ends of a worker's run that are neither success nor failure, and the request to stop."""

import os
import signal
from types import FrameType


class EndOfRun(BaseException):
    """Leaves the user's loop on purpose. Not an Exception, so that a script's `except Exception` lets it pass."""


class Left(EndOfRun):
    """The job goes on without this worker."""


class Interrupted(EndOfRun):
    """Somebody asked the job to stop, and it did so at a step boundary."""


class StopRequest:
    """Set by a signal, read at the next step boundary; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for whoever started us
        os.register_at_fork(after_in_child=_signals_as_usual)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _signals_as_usual() -> None:
    """A script's own child processes must end when they are told to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


stop_request = StopRequest()
