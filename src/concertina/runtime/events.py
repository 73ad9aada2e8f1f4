"""A worker's line to whoever started it."""

import os
import time

from concertina.core.messages import Scalar, encode


class EventPipe:
    """Writes events to an inherited pipe; without one, says nothing."""

    def __init__(self, fd: int, worker: int) -> None:
        self._fd = fd
        self._worker = worker

    @property
    def connected(self) -> bool:
        return self._fd >= 0

    def emit(self, event: str, **fields: Scalar | list[int] | dict[str, float]) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, encode({"event": event, "worker": self._worker, "at": time.monotonic(), **fields}))
        except BrokenPipeError:
            self._fd = -1  # nobody listens any more; training does not depend on it
