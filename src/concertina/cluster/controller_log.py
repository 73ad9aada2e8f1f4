"""What the controller does, as JSON lines in a file of bounded size."""

import json
import os
import threading
import time
from pathlib import Path

MOST_BYTES = 16 << 20  # then the file begins anew; the one before is kept beside it


class JsonLog:
    """One object a line: `time`, `event`, and what belongs to it. A full disk stops nobody."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, event: str, **fields: object) -> None:
        if self._path is None:
            return
        line = {
            "time": round(time.time(), 3),
            "event": event,
            **{k: v for k, v in fields.items() if v not in ("", None)},
        }
        with self._lock:
            try:
                if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
                    os.replace(self._path, self._path.with_suffix(".log.1"))
                with self._path.open("a") as out:
                    out.write(json.dumps(line, default=str) + "\n")
            except OSError:
                pass
