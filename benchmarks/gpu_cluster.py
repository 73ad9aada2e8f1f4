"""A live cluster on a GPU: several slots share it, jobs come and are resized, and what they train is DDP's to the bit.

python -m benchmarks.gpu_cluster [--slots 3]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.live_bits import different_tensors, twin
from benchmarks.live_cluster import all_jobs, ask, cluster, free_port
from benchmarks.live_jobs import EXAMPLES, VIRTUAL

KINDS = ("digits:6", "chars:3", "digits:6")
LIMIT_S = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=3)
    slots = parser.parse_args().slots
    folder = Path(tempfile.mkdtemp(prefix="gpu-cluster-"))
    with cluster(folder / "state", free_port(), "--slots", str(slots)) as up:
        (node,) = ask(up.url, "GET", "/cluster")["nodes"]
        print(f"{node['slots']} slots of {node['device_type']}", flush=True)
        outs = {}
        for number, kind in enumerate(KINDS):
            script, epochs = kind.split(":")
            out = folder / f"{number}.pt"
            args = ["--epochs", epochs, "--out", str(out)]
            body = {"script": str(EXAMPLES / f"{script}.py"), "args": args, "cwd": str(folder), "virtual": VIRTUAL}
            job = ask(up.url, "POST", "/jobs", body | {"name": f"{script}-{number}"})["id"]
            outs[job] = (kind, out)
            time.sleep(5.0)
        jobs = wait_for_all(up.url)
        generations = {job["id"]: len(ask(up.url, "GET", f"/jobs/{job['id']}/metrics")["generations"]) for job in jobs}
    wrong = 0
    for job in jobs:
        kind, out = outs[job["id"]]
        differing = different_tensors(out, twin(kind, folder / "twins")) if out.exists() else ["no model"]
        wrong += bool(differing)
        verdict = "equals DDP's" if not differing else f"differs: {differing[:3]}"
        print(f"{job['name']:10s} {job['phase']:10s} {generations[job['id']]} generations, {verdict}", flush=True)
    return int(bool(wrong))


def wait_for_all(url: str) -> list[dict[str, object]]:
    until = time.monotonic() + LIMIT_S
    while True:
        jobs = all_jobs(url)
        if all(job["phase"] in ("finished", "failed", "cancelled", "rejected") for job in jobs):
            return jobs
        if time.monotonic() > until:
            for job in jobs:
                print(job, file=sys.stderr)
            sys.exit(f"not all jobs have ended within {LIMIT_S:.0f} s")
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
