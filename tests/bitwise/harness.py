"""Runs references and elastic jobs and compares every bit."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from jobs import Job

from concertina.backends.local import LocalBackend
from concertina.runner import Report, RunSettings, parse_changes, run

HERE = Path(__file__).parent
Reference = Callable[[Job, int], Path]


def run_reference(jobs: list[Job], virtual: int, out: Path) -> None:
    """DDP with `virtual` processes, all jobs in one launch."""
    out.mkdir(parents=True, exist_ok=True)
    spec = out / "jobs.json"
    spec.write_text(json.dumps([job.to_dict() for job in jobs]))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(virtual), "--master-addr", "127.0.0.1",
        "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        str(HERE / "ddp_job.py"), str(spec), str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}


def run_elastic(
    job: Job, virtual: int, workers: int, changes: str, out: Path, backend: LocalBackend, leave_out: str = "", **more
) -> Report:
    return run(elastic_settings(job, virtual, workers, changes, out, leave_out, **more), backend=backend)


def elastic_settings(
    job: Job, virtual: int, workers: int, changes: str, out: Path, leave_out: str = "", pause: float = 0.0, **more
) -> RunSettings:
    out.mkdir(parents=True)
    args = [json.dumps(job.to_dict()), str(out), leave_out, str(pause)]
    return RunSettings(
        script=HERE / "elastic_job.py",
        args=args,
        virtual=virtual,
        workers=workers,
        changes=parse_changes(changes),
        run_dir=out / "run",
        **{"steps": job.steps, **more},
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


Place = tuple[int, int]  # in the data: epoch and batch


def read_losses(path: Path) -> tuple[dict[Place, float], list[str]]:
    """By their place, and where a batch that was run again, after a loss of workers, gave another one."""
    found: dict[Place, float] = {}
    others = []
    for line in path.read_text().splitlines():
        epoch, index, loss = line.split()
        place = (int(epoch), int(index))
        if found.setdefault(place, float.fromhex(loss)) != float.fromhex(loss):
            others.append(f"{path.name} when batch {index} of epoch {epoch} was run again")
    return found, others


def differing_losses(reference: Path, job: Job, virtual: int, out: Path, killed: int) -> list[str]:
    """A worker that is killed right after a step began to count may not have written its loss down."""
    read = [read_losses(out / f"loss-{v}") for v in range(virtual)]
    places = sorted({place for losses, _ in read for place in losses})
    found = [other for _, others in read for other in others]
    for v, (losses, _) in enumerate(read):
        wanted = [
            float(x) for x in torch.load(reference / f"{job.name}-r{v}.pt", weights_only=False)["losses"].double()
        ]
        missing = [k for k, place in enumerate(places) if place not in losses]
        first = [k for k, place in enumerate(places) if k < len(wanted) and losses.get(place, wanted[k]) != wanted[k]]
        if len(places) != len(wanted) or len(missing) > killed or first:
            where = (first or missing or ["length"])[0]
            found.append(f"loss of virtual worker {v} from micro-batch {where} ({len(losses)} of {len(wanted)})")
    return found


def differences(reference: Path, job: Job, virtual: int, out: Path, killed: int = 0) -> list[str]:
    """Everything that is not equal to the bit, in the order in which it is worth knowing."""
    found = differing_losses(reference, job, virtual, out, killed)
    shared = torch.load(out / "shared.pt", weights_only=False)
    for v in range(virtual):
        ref = torch.load(reference / f"{job.name}-r{v}.pt", weights_only=False)
        buffers = torch.load(out / f"buffers-{v}.pt", weights_only=False)
        assert buffers.keys() == ref["buffers"].keys()
        found += [f"buffer {k} of virtual worker {v}" for k, x in ref["buffers"].items() if not same(x, buffers[k])]
        assert shared["params"].keys() == ref["params"].keys()
        found += [f"parameter {k}" for k, x in ref["params"].items() if not same(x, shared["params"][k])]
        found += _compare_nested("optimizer", ref["opt"], shared["opt"])
        found += _compare_nested("scheduler", ref["sched"], shared["sched"])
        found += _compare_nested("scaler", ref["scaler"], shared["scaler"])
    return found


def _compare_nested(name: str, a: object, b: object) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{name}: keys"]
        return [x for k in a for x in _compare_nested(f"{name}.{k}", a[k], b[k])]
    if isinstance(a, list) and isinstance(b, list):
        return [x for k, (p, q) in enumerate(zip(a, b, strict=True)) for x in _compare_nested(f"{name}.{k}", p, q)]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if same(a, b) else [name]
    return [] if a == b else [name]
