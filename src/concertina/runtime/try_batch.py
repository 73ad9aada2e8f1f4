"""A training script with another batch size: started as a worker's script by `concertina profile`.

    try_batch.py OUTCOME BATCH SCRIPT [ARGS]

Gives the session's first loader BATCH samples per batch (0: as the script says) and the others in proportion, runs
SCRIPT, and writes to OUTCOME whether that fitted and what memory it took.
"""

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from concertina.runtime.loader import SessionLoader
from concertina.runtime.session import Session

NO_MEMORY = ("out of memory", "ALLOC_FAILED")  # as CUDA's libraries say it


class Probe:
    """What was asked for, and what came of it."""

    def __init__(self, outcome: Path, batch: int) -> None:
        self._outcome = outcome
        self._batch = batch
        self._first: tuple[int, int, int] | None = None  # the script's batch, ours, samples of a virtual worker
        self._free = _free_bytes()

    def replace_loader(self) -> None:
        make = Session.loader

        def loader(session: Session, dataset: Any, batch_size: int = 1, **options: Any) -> SessionLoader:
            own, _, _ = self._first or (batch_size, 0, 0)
            size = max(1, batch_size * (self._batch or own) // own)
            made = make(session, dataset, size, **options)
            if self._first is None:
                self._first = (batch_size, size, max(1, len(dataset) // session.size))
            return made

        Session.loader = loader  # type: ignore[method-assign,assignment]

    def write(self, fits: bool) -> None:
        if self._first is None:
            return
        own, batch, samples = self._first
        on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0
        found = {
            "batch": batch,
            "own": own,
            "samples": samples,
            "fits": fits,
            "on_gpu": on_gpu,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else _peak_bytes(),
            "memory_bytes": torch.cuda.get_device_properties().total_memory if on_gpu else self._free,
        }
        self._outcome.write_text(json.dumps(found))


def _field(path: str, name: str) -> int:
    """Bytes that the kernel gives in kB."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def _free_bytes() -> int:
    return _field("/proc/meminfo", "MemAvailable")


def _peak_bytes() -> int:
    return _field("/proc/self/status", "VmHWM")


def main() -> None:
    outcome, batch, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv = [script, *sys.argv[4:]]
    sys.path[0] = os.path.dirname(script)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on, not that of who forked us
    probe = Probe(outcome, batch)
    probe.replace_loader()
    try:
        runpy.run_path(script, run_name="__main__")
    except RuntimeError as error:
        if any(words in str(error) for words in NO_MEMORY):
            probe.write(fits=False)
        raise
    except SystemExit:
        probe.write(fits=True)
        raise
    probe.write(fits=True)


if __name__ == "__main__":
    main()
