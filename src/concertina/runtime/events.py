"""A worker's line to whoever started it."""

import os

from concertina.core.messages import Scalar, encode


class EventPipe:
    """Writes events to an inherited pipe; without one, says nothing."""

    def __init__(self, fd: int, worker: int, generation: int) -> None:
        self._fd = fd
        self._stamp: dict[str, Scalar] = {"worker": worker, "generation": generation}

    @property
    def connected(self) -> bool:
        return self._fd >= 0

    def emit(self, event: str, **fields: Scalar | list[int] | dict[str, float]) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, encode({"event": event, **self._stamp, **fields}))
        except BrokenPipeError:
            self._fd = -1  # nobody listens any more; training does not depend on it
