"""Who asked for what, as JSON lines: written by a thread of its own, so that a slow disk slows no answer."""

import contextlib
import json
import logging
import logging.handlers
import queue
from pathlib import Path
from typing import Any

MOST_BYTES = 10 << 20  # of a file; the one before is kept
MOST_WAITING = 10_000  # lines; beyond, they are dropped rather than kept in memory


class AccessLog:
    """`path` None: nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_WAITING)
        self._listener: logging.handlers.QueueListener | None = None

    def start(self) -> None:
        if self._path is not None:
            handler = logging.handlers.RotatingFileHandler(
                self._path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", delay=True
            )
            self._listener = logging.handlers.QueueListener(self._lines, handler)
            self._listener.start()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
            for handler in listener.handlers:
                handler.close()

    def write(self, **fields: Any) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(logging.makeLogRecord({"msg": json.dumps(fields)}))
