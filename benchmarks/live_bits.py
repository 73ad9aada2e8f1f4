"""Whether what the live cluster trained is, bit for bit, what plain DDP trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.live_jobs import EXAMPLES, VIRTUAL

TWIN_SECONDS = 300.0


def twin(kind: str, folder: Path) -> Path:
    """The model of the DDP script with one process per virtual worker; made once."""
    script, epochs = kind.split(":")
    path = folder / f"{script}-{epochs}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(VIRTUAL)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLES / f"{script}_ddp.py")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [*command, "--epochs", epochs, "--out", str(path)], env=env, capture_output=True, timeout=TWIN_SECONDS
        )
        if not path.exists():  # the exit code says less: gloo's threads can abort a rank at exit, when all is saved
            raise RuntimeError(f"the DDP twin of {kind} failed:\n{done.stderr.decode()[-2000:]}")
    return path


def different_tensors(ours: Path, theirs: Path) -> list[str]:
    """Names of the tensors that differ in any bit; the sign of a zero counts too."""
    a, b = torch.load(ours), torch.load(theirs)
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [n for n in a if not torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))]
