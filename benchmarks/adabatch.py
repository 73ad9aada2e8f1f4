"""A batch that doubles, on workers that come with it, against a fixed small batch: accuracy and time (Elan VI-B).

    python -m benchmarks.adabatch [--seeds 5]

Every run is a real elastic job (examples/adabatch.py). Its time is that of a simulated device: what each step would
have taken with its own batch on the workers it really had, by the constants in the example. So a loaded machine does
not show in it, and the wait for workers shows as steps that were made without them.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concertina.backends.local import LocalBackend
from concertina.runner import RunSettings, run

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "adabatch.py"
VIRTUAL = 4


@dataclass(frozen=True, slots=True)
class Config:
    name: str
    workers: int  # to begin with
    args: tuple[str, ...]
    scaling: str = "consistent"


CONFIGS = (
    Config("32, 1 worker", 1, ("--every", "0")),
    Config("32-128, 4 workers", 4, ("--ask", "no")),
    Config("32-128, elastic", 1, ()),
    Config("hybrid, elastic", 1, (), "hybrid"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    accuracy: float
    weights: str
    steps: int
    seconds: float  # on the simulated device
    workers: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]  # (from step, total)
    samples_wrong: int


def step_time(batch: int, workers: int) -> float:
    """A step of the simulated device: the worker with the most virtual workers, and then the reduction."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        from adabatch import step_seconds, turn_seconds  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    turns = -(-VIRTUAL // workers)
    return float(turns * turn_seconds(batch // VIRTUAL) + step_seconds(workers))


def measure(config: Config, seed: int, backend: LocalBackend, folder: Path) -> Outcome:
    out = folder / "out.json"
    events: list[Mapping[str, Any]] = []
    settings = RunSettings(
        script=EXAMPLE,
        args=[*config.args, "--seed", str(seed), "--paced", "--out", str(out)],
        virtual=VIRTUAL,
        workers=config.workers,
        scaling=config.scaling,
        ramp=20,
        run_dir=folder / "run",
    )
    report = run(settings, events.append, backend)
    steps = [e["log"] for e in events if e["event"] == "step"]
    assert len(steps) == report.steps, (len(steps), report.steps)
    saved = json.loads(out.read_text())
    return Outcome(
        accuracy=saved["accuracy"],
        weights=saved["weights"],
        steps=report.steps,
        seconds=sum(step_time(round(e["batch"]), round(e["workers"])) for e in steps),
        workers=tuple(g.workers for g in report.generations),
        batches=tuple((b["step"], b["total"]) for b in report.batches),
        samples_wrong=sum(row["duplicated"] + row["missed"] for row in report.samples),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[Outcome]] = {config.name: [] for config in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        backend = LocalBackend.open(Path(folder), threads=1)
        try:
            for seed in range(args.seeds):
                for config in CONFIGS:
                    place = Path(folder) / f"{seed}-{len(found[config.name])}-{CONFIGS.index(config)}"
                    place.mkdir()
                    outcome = measure(config, seed, backend, place)
                    found[config.name].append(outcome)
                    print(f"# seed {seed}, {config.name}: {outcome}", file=sys.stderr, flush=True)
        finally:
            backend.close()
    show(found)


def show(found: Mapping[str, list[Outcome]]) -> None:
    base = statistics.mean(o.seconds for o in found[CONFIGS[0].name])
    print(
        "| | accuracy: mean (least - most) | steps | simulated s: mean (least - most) | relative "
        "| samples doubled or missed |"
    )
    print("|---|---|---|---|---|---|")
    for name, outcomes in found.items():
        accuracy = [o.accuracy for o in outcomes]
        seconds = [o.seconds for o in outcomes]
        steps = statistics.mean(o.steps for o in outcomes)
        wrong = sum(o.samples_wrong for o in outcomes)
        print(
            f"| {name} | {_range(accuracy, 100, '%')} | {steps:.0f} | {_range(seconds, 1, '')} "
            f"| {statistics.mean(seconds) / base:.2f} | {wrong} |"
        )
    still, elastic = (found[CONFIGS[k].name] for k in (1, 2))
    same = sum(a.weights == b.weights for a, b in zip(still, elastic, strict=True))
    print(f"\nSame bits in '{CONFIGS[1].name}' and '{CONFIGS[2].name}': {same} of {len(elastic)} seeds")


def _range(values: list[float], by: float, unit: str) -> str:
    mean, least, most = (by * f(values) for f in (statistics.mean, min, max))
    return f"{mean:.2f}{unit} ({least:.2f} - {most:.2f})"


if __name__ == "__main__":
    main()
