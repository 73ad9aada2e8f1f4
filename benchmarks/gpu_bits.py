"""Bits on a GPU: DDP over gloo, four processes sharing the device, against four virtual workers on 1 and 2 processes.

python -m benchmarks.gpu_bits
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "bitwise"))

from harness import differences, run_elastic, run_reference
from jobs import Job

from concertina.backends.local import LocalBackend

P = 4
GPU = {"device": "cuda", "batch": 6, "steps": 12}
JOBS = [
    Job("lm-fp32", model="lm", clip=0.5, **GPU),
    Job("resnet18-fp32", model="resnet18", opt="sgd", **GPU),
    Job("lm-bf16-tf32-fused", model="lm", amp=True, tf32=True, fused=True, **GPU),
    Job("resnet18-bf16-channels-last", model="resnet18", opt="sgd", amp=True, tf32=True, channels_last=True, **GPU),
    Job("cnn-accumulate", model="cnn", accumulate=2, ddp={"bucket_cap_mb": 0.02}, **GPU),
    Job("lm-scaler", model="lm", scaler=True, clip=1.0, opt="sgd", **GPU),
]
SCHEDULES = ((1, ""), (2, ""), (2, "5=1,9=2"))


def main() -> int:
    folder = Path(tempfile.mkdtemp())
    began = time.time()
    run_reference(JOBS, P, folder / "ddp")
    print(f"reference: DDP with {P} processes, {time.time() - began:.0f} s", flush=True)
    backend = LocalBackend.open(folder / "nursery", threads=1)
    wrong = 0
    for job in JOBS:
        for workers, changes in SCHEDULES:
            out = folder / f"{job.name}-{workers}-{changes}"
            try:
                run_elastic(job, P, workers, changes, out, backend)
                found = differences(folder / "ddp", job, P, out)
            except Exception as error:
                found = [f"failed: {error}"]
            wrong += bool(found)
            schedule = f"{workers} workers" + (f", then {changes}" if changes else "")
            print(f"{job.name:30s} {schedule:24s} {'equal' if not found else found[:2]}", flush=True)
    backend.close()
    print(f"{len(JOBS) * len(SCHEDULES) - wrong} passed, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
