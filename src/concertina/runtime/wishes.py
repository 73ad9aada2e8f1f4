"""What one worker asks of all of them: to stop, to write a checkpoint, to leave because of a signal.

Wishes travel with the meeting of every step; one worker's is everybody's. They count as they stand when a round begins:
when in its body something was asked for must make no difference.
"""

from pathlib import Path

STOP, CHECKPOINT, INTERRUPT = 0, 1, 2
WISHES = 3


class Wishes:
    """This worker's."""

    def __init__(self) -> None:
        self.now = [0] * WISHES
        self.of_round = [0] * WISHES
        self.reason = ""  # why training is to stop
        self.path: Path | None = None  # where this worker wants the next checkpoint, if anywhere in particular

    def stop(self, reason: str) -> None:
        self.now[STOP] = 1
        self.reason = reason

    def checkpoint(self, path: Path) -> None:
        self.now[CHECKPOINT] = 1
        self.path = path

    def begin_round(self, interrupted: bool, checkpoint_due: bool) -> None:
        self.now[INTERRUPT] = int(interrupted)
        if checkpoint_due:
            self.now[CHECKPOINT] = 1
        self.of_round = list(self.now)

    def forget_checkpoint(self) -> None:
        """It is being written."""
        self.now[CHECKPOINT] = 0
        self.path = None

    def begin_anew(self, stop: int) -> None:
        """A newcomer wishes for nothing; what the others wished for already counts for it, too."""
        self.now = [0] * WISHES
        self.now[STOP] = stop
