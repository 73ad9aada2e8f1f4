"""Writing checkpoints beside training.

The training thread only copies the state in memory; a thread turns the copy into files, checks that they can be read
back, and gives the folder its name when all is on disk. One checkpoint is written at a time: who asks for the next one
before that waits.
"""

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concertina.core.checkpoints import Manifest
from concertina.core.errors import CheckpointError
from concertina.runtime.checkpoint import write_checkpoint

LIMIT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Job:
    folder: Path
    shared: Any
    contexts: Mapping[int, bytes]
    manifest: Manifest


class CheckpointWriter:
    """One thread, started with the first checkpoint."""

    def __init__(self, on_written: Callable[[int, Path], None]) -> None:
        self._on_written = on_written
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=1)
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, folder: Path, shared: Any, contexts: Mapping[int, bytes], manifest: Manifest) -> None:
        """Takes a copy of everything that training goes on to change; raises what went wrong with the one before."""
        self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="concertina-checkpoints", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._jobs.put(Job(folder, in_memory(shared), dict(contexts), manifest))

    @property
    def is_idle(self) -> bool:
        """Whether the last one is complete on disk."""
        return self._idle.is_set()

    def check(self) -> None:
        """Raises what went wrong since the last call, if anything."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Returns when the checkpoint under way is complete on disk."""
        if not self._idle.wait(LIMIT_SECONDS):
            raise CheckpointError(f"a checkpoint was not written within {LIMIT_SECONDS:.0f} s")
        self.check()

    def close(self) -> None:
        """Completes what is under way and ends the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(LIMIT_SECONDS)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                write_checkpoint(job.folder, job.shared, job.contexts, job.manifest)
                self._on_written(job.manifest.step, job.folder)
            except BaseException as error:
                self._failure = error
            finally:
                del job
                self._idle.set()


def in_memory(state: Any) -> Any:
    """A copy in host memory that does not change any more."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        twin = copy.copy(state)  # a Counter or defaultdict could not be made of pairs
        for key, value in state.items():
            twin[key] = in_memory(value)
        return twin
    if type(state) in (list, tuple):
        return type(state)(in_memory(value) for value in state)
    if isinstance(state, torch.Size | str | bytes | int | float | bool | None):
        return state
    return copy.deepcopy(state)
