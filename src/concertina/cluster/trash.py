"""Folders to be removed: out of the way at once, off the disk when there is time. Checkpoints may be large."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

CLOSE_SECONDS = 5.0


class Trash:
    """`take` moves a folder here; a thread removes it, and what an earlier process has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    @classmethod
    def open(cls, folder: Path) -> "Trash":
        """Makes its folder while there is room: on a full disk it is needed most."""
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
        return cls(folder)

    def take(self, folder: Path) -> None:
        """Nothing is at its old place afterwards; raises OSError if it can not be moved."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self._folder / f"{folder.name}-{time.time_ns():x}")
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._remove_all, name="concertina-trash", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)

    def _remove_all(self) -> None:
        while not self._ends.is_set() and (left := sorted(self._folder.iterdir())):
            for folder in left:
                if self._ends.is_set():
                    return
                shutil.rmtree(folder, ignore_errors=True)
            if sorted(self._folder.iterdir()) == left:
                return  # it can not be removed; whoever runs the cluster finds it here
