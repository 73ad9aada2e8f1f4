"""Virtual workers against plain gradient accumulation over the same micro-batches, on one GPU, in one process.

    python -m benchmarks.gpu_runtime MODEL P      one measurement, as JSON (what the other call starts)
    python -m benchmarks.gpu_runtime all          all of them (or those of the models named), as the table of
                                                  docs/results/runtime.md

Blocks of steps alternate, and the median step of each side is compared. Peak memory of accumulation is taken before
the session exists.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import concertina as ct
from benchmarks.gpu_models import make

MODELS = ("gpt", "resnet50", "resnet50-bf16")
COUNTS = (1, 2, 4, 8)
BLOCKS = 8
MIB = 1 << 20


def steps_per_block(virtual: int) -> int:
    return max(2, 8 // virtual)


def measure(name: str, virtual: int) -> dict[str, Any]:
    session = ct.join()
    work = make(name, session.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "resnet50"
    model, optimizer, steps = work.model, work.optimizer, steps_per_block(virtual)

    def accumulate() -> None:
        for v in range(virtual):
            (work.loss(model, work.batches[v % 4]) / virtual).backward()
        optimizer.step()
        optimizer.zero_grad()

    accumulate()
    accumulate()
    accumulation_peak = _peak_of(accumulate)
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(
        list(range(virtual * steps)), batch_size=1, shuffle=False, collate_fn=lambda ids: work.batches[ids[0] % 4]
    )
    gc.collect()
    gc.disable()
    times: dict[str, list[float]] = {"accumulation": [], "virtual": []}
    virtual_peak = 0.0
    for epoch in session.epochs(BLOCKS + 2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for batch in loader:
            work.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        virtual_s = (time.perf_counter() - began) / steps
        virtual_peak = max(virtual_peak, torch.cuda.max_memory_allocated() / MIB)
        with session.aside():  # its dropout draws from no virtual worker's random state
            began = time.perf_counter()
            for _ in range(steps):
                accumulate()
            torch.cuda.synchronize()
            accumulation_s = (time.perf_counter() - began) / steps
        if epoch >= 2:
            times["virtual"].append(virtual_s)
            times["accumulation"].append(accumulation_s)
    per_micro = {side: 1000 * statistics.median(values) / virtual for side, values in times.items()}
    return {
        "model": name,
        "virtual": virtual,
        "parameters": sum(p.numel() for p in model.parameters()),
        "accumulation_ms": round(per_micro["accumulation"], 3),
        "virtual_ms": round(per_micro["virtual"], 3),
        "relative_throughput": round(per_micro["accumulation"] / per_micro["virtual"], 4),
        "accumulation_peak_mib": round(accumulation_peak),
        "virtual_peak_mib": round(virtual_peak),
        "relative_memory": round(virtual_peak / accumulation_peak, 4),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _peak_of(step: Any) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB


def measure_all(names: tuple[str, ...] = MODELS) -> None:
    rows = []
    for name in names:
        for virtual in COUNTS:
            env = {**os.environ, "CONCERTINA_VIRTUAL": str(virtual)}
            command = [sys.executable, "-m", "benchmarks.gpu_runtime", name, str(virtual)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
            if done.returncode:
                print(f"{name} P={virtual} failed: {done.stderr[-800:]}", flush=True)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    print()
    print("| model | P | accumulation ms | virtual ms | relative throughput | peak MiB | relative memory |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        peaks = f"{r['accumulation_peak_mib']} / {r['virtual_peak_mib']}"
        print(
            f"| {r['model']} | {r['virtual']} | {r['accumulation_ms']:.2f} | {r['virtual_ms']:.2f} | "
            f"{r['relative_throughput']:.3f} | {peaks} | {r['relative_memory']:.3f} |"
        )


if __name__ == "__main__":
    if sys.argv[1] == "all":
        measure_all(tuple(sys.argv[2:]) or MODELS)
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
