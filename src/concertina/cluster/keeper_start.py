"""Starting keepers, and finding out whether one is there: for whoever runs the cluster on this machine."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from concertina.cluster.records import Keeper
from concertina.core.errors import UsageError

LOCK = "keeper.lock"
OURS = (b"concertina.cluster.keeper", b"concertina.runtime.nursery")  # in the command lines of what may hold a lock
LOOK_SECONDS = 0.05
HERE_ONLY = "keeper"  # marks what holds for the keeper alone: the job's own processes begin like any other
SECRETS = ("CONCERTINA_TOKEN",)  # of whoever started the cluster: nothing for a job


def job_folder(state_dir: Path, job: str) -> Path:
    """Where all files of a job are."""
    if Path(job).name != job or job in ("", ".", ".."):
        raise UsageError(f"job {job!r}: needed a name without '/', that a folder can have")
    return state_dir / "jobs" / job


def start_keeper(store: str, state_dir: Path, job: str, attempt: int) -> int:
    """Starts a keeper that outlives us; its pid. Whether it came into office is in the store."""
    folder = job_folder(state_dir, job)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "concertina.cluster.keeper", store, str(state_dir), job, str(attempt)]
    with (folder / "logs" / "keeper.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(os.environ, Path.cwd()),
            start_new_session=True,
        )
    reap()
    _started.append(process)
    return process.pid


def environment(environ: Mapping[str, str], here: Path) -> dict[str, str]:
    """A keeper's: without secrets, good in any folder, and so that it imports nothing from the one it starts in."""
    env = {"PYTHONSAFEPATH": HERE_ONLY}
    env |= {name: value for name, value in environ.items() if name not in SECRETS}
    if "PYTHONPATH" in env:
        env["PYTHONPATH"] = os.pathsep.join(str(here / part) for part in env["PYTHONPATH"].split(os.pathsep) if part)
    return env


_started: list[subprocess.Popen[bytes]] = []  # by this process, and not known to have ended


def reap() -> None:
    """Lets go of keepers that have ended, where we were the ones who started them."""
    _started[:] = [process for process in _started if process.poll() is None]


def me(job: str, attempt: int) -> Keeper:
    """This process, as a keeper."""
    pid = os.getpid()
    host, now = socket.gethostname(), round(time.time(), 3)
    return Keeper(job=job, attempt=attempt, pid=pid, host=host, started_s=now, started_ticks=start_ticks(pid) or 0)


def start_ticks(pid: int) -> int | None:
    """When a process began, by the kernel's count; None if there is none (or only its corpse)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def keeper_alive(keeper: Keeper) -> bool:
    """Whether this very process is still there; of another machine's, as far as can be told: yes."""
    if keeper.host != socket.gethostname():
        return True
    return start_ticks(keeper.pid) == keeper.started_ticks


def is_held(state_dir: Path, job: str) -> bool:
    """Whether anything of the job is left on this machine: its keeper, its workers, what they started."""
    try:
        lock = os.open(job_folder(state_dir, job) / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def take_lock(path: Path, limit_s: float) -> int | None:
    """The lock of a job, as a descriptor; None if others have held it all the time."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                return None
            time.sleep(LOOK_SECONDS)


def holders(path: Path) -> list[int]:
    """Processes of ours, but this one, that have a job's lock open."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if any(name in command for name in OURS) and path in map(Path.readlink, (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def end_holders(path: Path) -> None:
    """Kills what is left of a job. For whoever is its keeper by the store's word, or takes the whole cluster down."""
    for pid in holders(path.resolve()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
