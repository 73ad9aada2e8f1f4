"""The jobs of the live trace: real training scripts of `examples/`, paced, with deadlines and without. Pure.

One trace file serves both sides: `benchmarks.live_trace` submits it to a live cluster, and the simulator replays it.
`model` is SCRIPT:EPOCHS, `work` the optimizer steps that this makes with four virtual workers.
"""

from __future__ import annotations

import random
from pathlib import Path

from concertina.core.job import JobSpec

VIRTUAL = 4
STEPS_PER_EPOCH = {"mlp": 32, "digits": 22, "chars": 40}  # with four virtual workers
KINDS = ("mlp:3", "mlp:4", "digits:5", "digits:8", "chars:2", "chars:3")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HOPELESS = (6, 13)  # jobs whose deadline nobody could keep
GAP_S = 20.0  # between two submissions, on average: about as much work comes as four slots do


def steps_of(kind: str) -> int:
    script, epochs = kind.split(":")
    return STEPS_PER_EPOCH[script] * int(epochs)


def make_trace(seed: int, jobs: int, pace_s: float) -> list[JobSpec]:
    """Every second job has a deadline: some close, some far, two of them hopeless."""
    chance = random.Random(seed)
    at, found = 0.0, []
    for number in range(jobs):
        kind = KINDS[(number + number // len(KINDS)) % len(KINDS)]
        alone = steps_of(kind) * pace_s  # on four workers
        deadline = None
        if number in HOPELESS:
            deadline = at + 0.3 * alone
        elif number % 2:
            deadline = at + 60.0 + chance.choice((6.0, 9.0, 12.0)) * alone
        found.append(
            JobSpec(
                id=f"{kind.replace(':', '-')}-{number:02d}",
                name=kind.replace(":", "-"),
                submit_s=round(at, 1),
                gpus=VIRTUAL,
                model=kind,
                batch_size=1,  # not read: the script's own
                work=float(steps_of(kind)),
                deadline_s=None if deadline is None else round(deadline, 1),
                min_workers=1,
                max_workers=VIRTUAL,
            )
        )
        at += chance.uniform(0.4, 1.6) * GAP_S
    return found


def request_of(job: JobSpec, pace_s: float, cwd: Path, began_s: float) -> dict[str, object]:
    """The submission of one job. Its model goes into its own folder, so that equal kinds have equal arguments."""
    script, epochs = str(job.model).split(":")
    body: dict[str, object] = {
        "script": str(EXAMPLES / "live_paced.py"),
        "args": [f"{pace_s:g}", str(EXAMPLES / f"{script}.py"), "--epochs", epochs, "--out", "model.pt"],
        "cwd": str(cwd),
        "name": job.id,
        "virtual": VIRTUAL,
    }
    if job.deadline_s is not None:
        body["deadline_s"] = began_s + job.deadline_s
    return body
