"""How others rescale, measured on the same model: torchrun's restart, stop and resume, copying at the switch."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.rescale_marks import Asked, Seen, read_tracks, seen, seen_by_restart

JOB = Path(__file__).with_name("rescale_baseline_job.py")
PATIENCE_S = 300.0
QUIET_STEPS = 10
QUIET_AFTER_RESTART = 6
# Without the first, torchrun of torch 2.13 does not let a second agent in.
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _result(way: str, megabytes: float, rows: Sequence[Seen | None]) -> dict[str, Any]:
    return {
        "way": way,
        "megabytes": megabytes,
        "changes": [row.to_json() for row in rows if row is not None],
        "not_seen": list(rows).count(None),
    }


def _job(marks: Path, megabytes: float, pause: float, device: str, *more: str) -> list[str]:
    return [str(marks), "--megabytes", str(megabytes), "--pause", str(pause), "--device", device, *more]


def _wait(there: Callable[[], bool], what: str, processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not there():
        ended = [p.args for p in processes if p.poll() is not None]
        if ended or time.monotonic() > until:
            tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            sys.exit(f"no {what}: {'a process ended' if ended else 'waited too long'}\n{tail}")
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _trained(marks: Path, world: int, after: float) -> Callable[[], bool]:
    """Whether a first rank of a world of this size, begun since, has made some steps."""

    def there() -> bool:
        for track in read_tracks(marks):
            if track.about["rank"] == 0 and track.about["world"] == world and track.marks:
                fresh = [at for at, _, _ in track.marks if at > after]
                if track.marks[0][0] > after and len(fresh) > QUIET_AFTER_RESTART:
                    return True
        return False

    return there


# -- stop, checkpoint, start again ----------------------------------------------------------------------------------


def measure_resume(
    megabytes: float, changes: int, pause: float, device: str, folder: Path, workers: int
) -> dict[str, Any]:
    marks, log = folder / "marks", folder / "log"
    args = _job(marks, megabytes, pause, device, "--checkpoint", str(folder / "state"))

    def start(world: int) -> list[subprocess.Popen[bytes]]:
        port = str(_free_port())
        common = {**os.environ, **ENVIRONMENT, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        with log.open("ab") as out:
            return [
                subprocess.Popen(
                    [sys.executable, str(JOB), *args],
                    env={**common, "MASTER_PORT": port, "RANK": str(rank)},
                    stdout=out,
                    stderr=out,
                )
                for rank in range(world)
            ]

    kinds = ("grow", "move", "shrink") * changes
    running: list[subprocess.Popen[bytes]] = []
    try:
        for world in (workers, *((workers + 1, workers + 1, workers) * changes)):
            _end(running)
            began = time.monotonic()
            running = start(world)
            _wait(_trained(marks, world, began), f"steps with {world} processes", running, log)
    finally:
        _end(running)
    return _result("resume", megabytes, seen_by_restart(kinds, read_tracks(marks)))


# -- torchrun ---------------------------------------------------------------------------------------------------------


def measure_torchrun(
    megabytes: float, changes: int, pause: float, device: str, folder: Path, workers: int
) -> dict[str, Any]:
    """An agent with all workers but one stays; one with that one comes and goes."""
    marks, log = folder / "marks", folder / "log"
    port = _free_port()

    def agent(processes: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={processes}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=rescale",
            "--rdzv-conf=last_call_timeout=1", "--max-restarts=1000", "--monitor-interval=0.1",
            str(JOB), *_job(marks, megabytes, pause, device, "--checkpoint", str(folder / "state")),
        ]  # fmt: skip
        with log.open("ab") as out:
            return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=out)

    running: list[subprocess.Popen[bytes]] = []
    kinds = []
    try:
        began = time.monotonic()
        running.append(agent(workers))
        _wait(_trained(marks, workers, began), f"steps with {workers} processes", running, log)
        for _ in range(changes):
            began = time.monotonic()
            running.append(agent(1))
            _wait(_trained(marks, workers + 1, began), f"steps with {workers + 1} processes", running, log)
            began = time.monotonic()
            _end([running.pop()])
            _wait(_trained(marks, workers, began), f"steps with {workers} processes again", running, log)
            kinds += ["grow", "shrink"]
    finally:
        _end(running[::-1])
    return _result("torchrun", megabytes, seen_by_restart(kinds, read_tracks(marks)))


# -- copying at the switch --------------------------------------------------------------------------------------------


def measure_copy(
    megabytes: float, changes: int, pause: float, device: str, folder: Path, workers: int
) -> dict[str, Any]:
    from torch.distributed import TCPStore

    marks, log = folder / "marks", folder / "log"
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    running: dict[int, subprocess.Popen[bytes]] = {}
    numbers = count()

    def start(generation: int) -> int:
        number = next(numbers)
        command = [sys.executable, str(JOB), *_job(marks, megabytes, pause, device)]
        command += ["--store", str(store.port), "--own", str(number), "--joins", str(generation)]
        with log.open("ab") as out:
            running[number] = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=out)
        return number

    def wait(there: Callable[[], bool], what: str) -> None:
        _wait(there, what, [running[m] for m in members], log)

    def quiet(generation: int) -> bool:
        return any(len(track.of(generation)) > QUIET_STEPS for track in read_tracks(marks))

    def publish(generation: int, old: Sequence[int], new: Sequence[int]) -> None:
        newcomers = [m for m in new if m not in old] if old else []
        stayed = [m for m in new if m in old]
        plan = {"generation": generation, "members": list(new), "newcomers": newcomers, "source": (stayed or [0])[0]}
        store.set(f"plan-{generation}", json.dumps(plan))

    asked: list[Asked] = []
    try:
        members = [start(1) for _ in range(workers)]
        wait(lambda: all(store.check([f"ready-{m}"]) for m in members), "workers")
        publish(1, [], members)
        wait(lambda: quiet(1), "first steps")
        for number in range(3 * changes):
            generation, kind = number + 2, ("grow", "move", "shrink")[number % 3]
            began, old = time.monotonic(), members
            newcomer = None
            if kind != "shrink":
                newcomer = start(generation)
                wait(lambda n=newcomer: store.check([f"ready-{n}"]), "newcomer")
            members = old if kind == "grow" else old[:-1]
            members = members if newcomer is None else [*members, newcomer]
            publish(generation, old, members)
            wait(lambda g=generation: quiet(g), f"steps after change {number} ({kind})")
            asked.append(Asked(kind=kind, at=began, before=generation - 1, after=generation))
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    tracks = read_tracks(marks)
    ends = [change.at for change in asked[1:]] + [float("inf")]
    return _result("copy", megabytes, [seen(change, tracks, end) for change, end in zip(asked, ends, strict=True)])
