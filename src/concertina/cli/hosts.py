"""Which machines a job of the command line runs on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from concertina.backends.base import WorkerBackend
from concertina.backends.seating import HostSeats
from concertina.core.errors import UsageError

BACKENDS = ("local", "ray")


@dataclass(frozen=True, slots=True)
class SeveralHosts:
    """A backend that has more than this machine, and where on it workers go."""

    backend: WorkerBackend
    seats: HostSeats


@contextlib.contextmanager
def open_backend(name: str, log_dir: Path, threads: int) -> Iterator[SeveralHosts | None]:
    """None for this machine alone: a run has a backend of its own for that."""
    if name not in BACKENDS:
        raise UsageError(f"--backend {name}: needs {' or '.join(BACKENDS)}")
    if name == "local":
        yield None
        return
    try:
        from concertina.backends.ray import RayBackend
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"--backend ray needs the package {missing.name!r}, which is not installed: pip install 'concertina[ray]'"
        ) from None
    backend = RayBackend(log_dir, threads)
    try:
        yield SeveralHosts(backend, HostSeats(backend.hosts))
    finally:
        backend.close()
