"""The pause of workers that stay while others come, go and move; beside what other ways of rescaling take.

    python -m benchmarks.rescale ours 100         grow, move and shrink a job with 100 MB of parameters, 20 times each
    python -m benchmarks.rescale torchrun 100     torchrun's elastic restart
    python -m benchmarks.rescale resume 100       stop, checkpoint, start again
    python -m benchmarks.rescale copy 100         newcomers started beforehand, state copied while everybody waits
    python -m benchmarks.rescale ours 440 --device cuda    with everything on a GPU that the workers share
    python -m benchmarks.rescale ours 100 --hosts 4        with every worker on a host (network namespace) of its own
    python -m benchmarks.rescale all --workers 1           grow 1 -> 2 instead of 2 -> 3: for a machine with two cores
    python -m benchmarks.rescale overhead         CPU time of coordination while nothing changes
    python -m benchmarks.rescale all              every row with 1, 100 and 440 MB
    python -m benchmarks.rescale table            the rows measured so far, into docs/results/rescale.md

Each leaves a JSON file in the scratch folder. A pause is the gap between two steps of a worker that stays, less a usual
step of the new world. Wants a machine with nothing else to do, and a core for every worker.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import rescale_baselines, rescale_table
from benchmarks.rescale_hosts import several_hosts
from benchmarks.rescale_marks import Asked, read_tracks, seen
from concertina.backends.base import Seat
from concertina.runner import Run, RunSettings

JOB = Path(__file__).with_name("rescale_job.py")
SIZES = (1, 100, 440)
WORKERS = 2  # and one more after growing; as many virtual workers
CHANGES = 20  # of each kind
RESTARTS = 5  # the same for what takes seconds
QUIET_STEPS = 10  # after a change, before the next is asked for
PATIENCE_S = 300.0  # for one change
OVERHEAD_STEPS = 550
CAUGHT_UP = ("synced", "training")  # signs that end a newcomer's catching up
BUILT = ("following", "prepared")  # signs that begin it; the first kind seen counts


class Watch:
    """Follows a job's events."""

    def __init__(self) -> None:
        self.step = 0
        self.generation = 0
        self.members: list[int] = []
        self.started: list[Mapping[str, Any]] = []  # worker_started
        self.signs: list[Mapping[str, Any]] = []  # of newcomers
        self.generations: dict[int, Mapping[str, Any]] = {}
        self.troubles: list[Mapping[str, Any]] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.step = event["step"]
        elif kind == "generation_started":
            self.generation, self.members = event["generation"], list(event["members"])
            self.generations[self.generation] = event
        elif kind == "worker_started":
            self.started.append(event)
        elif kind in CAUGHT_UP or kind in BUILT:
            self.signs.append(event)
        elif kind in ("worker_lost", "change_abandoned", "failed", "recovering"):
            self.troubles.append(event)

    def sign(self, worker: int, kinds: Sequence[str]) -> float | None:
        """When a worker gave the first of these signs that it gave at all."""
        for kind in kinds:
            for event in self.signs:
                if event["worker"] == worker and event["event"] == kind:
                    return float(event["at"])
        return None


def turn_until(job: Run, there: Any, what: str, watch: Watch, patience: float = PATIENCE_S) -> None:
    until = time.monotonic() + patience
    while not there():
        if job.turn():
            sys.exit(f"the job ended while waiting for {what}: {job.close_report().error}")
        if time.monotonic() > until:
            sys.exit(f"no {what} within {patience:.0f} s; step {watch.step}, {watch.troubles[-3:]}")


def measure_ours(
    megabytes: float,
    changes: int,
    pause: float,
    device: str,
    folder: Path,
    hosts: int = 0,
    rate: str = "",
    within: float = float("inf"),
    workers: int = WORKERS,
) -> dict[str, Any]:
    """Grows 2 -> 3, moves one of 3, shrinks 3 -> 2, over and over, in one job; on one machine without `hosts`.

    No further three changes begin after `within` seconds.
    """
    watch, marks = Watch(), folder / "marks"
    args = [str(marks), "--megabytes", str(megabytes), "--pause", str(pause), "--device", device]
    settings = RunSettings(script=JOB, args=args, virtual=workers + 1, workers=workers, run_dir=folder / "run")
    asked: list[Asked] = []
    with ExitStack() as stack:
        job = stack.enter_context(Run(settings, watch, *_hosts(hosts, rate, folder, stack, lambda: job.seats)))
        turn_until(job, lambda: watch.step >= QUIET_STEPS, "first steps", watch)
        until = time.monotonic() + within
        for number in range(3 * changes):
            if number % 3 == 0 and time.monotonic() > until:
                break
            asked.append(_one_change(job, watch, number, workers))
        job.interrupt()
        turn_until_over(job)
    tracks = read_tracks(marks)
    ends = [change.at for change in asked[1:]] + [float("inf")]
    rows = [seen(change, tracks, end) for change, end in zip(asked, ends, strict=True)]
    pids = {event["worker"]: event["pid"] for event in watch.started}
    return {
        "way": "ours",
        "megabytes": megabytes,
        "changes": [row.to_json() for row in rows if row is not None],
        "not_seen": rows.count(None),
        "pids_kept": len(pids) == len(watch.started) == len(tracks),  # every worker was started once, as one process
        "late": [event["late"] for event in watch.signs if "late" in event],  # pieces copied at the switch; -1: all
        "troubles": watch.troubles,
    }


def _hosts(
    count: int, rate: str, folder: Path, stack: ExitStack, seated: Callable[[], Mapping[int, Seat]]
) -> tuple[Any, ...]:
    """Backend and seating for a run; none for this machine alone."""
    if not count:
        return ()
    backend, seat = stack.enter_context(several_hosts(count, folder / "hosts", rate))
    return backend, lambda worker: seat(seated())


def turn_until_over(job: Run) -> None:
    while not job.turn():
        pass
    job.close_report()


def _one_change(job: Run, watch: Watch, number: int, workers: int) -> Asked:
    kind = ("grow", "move", "shrink")[number % 3]
    known, wanted, leaver = len(watch.started), workers if kind == "shrink" else workers + 1, None
    at = time.monotonic()
    if kind == "move":
        leaver = watch.members[number // 3 % len(watch.members)]  # each place in turn, the main one too
        request = job.remove([leaver], replaced=True)
    else:
        request = job.resize(wanted)
    turn_until(job, lambda: job.answer(request) is not None, "answer", watch)
    accepted, reason = job.answer(request) or (False, "")
    if not accepted:
        sys.exit(f"{kind} was refused: {reason}")

    def changed() -> bool:
        return len(watch.members) == wanted and leaver not in watch.members

    turn_until(job, changed, f"end of change {number} ({kind})", watch)
    after, step = watch.generation, watch.step
    newcomers = [event["worker"] for event in watch.started[known:]]
    turn_until(job, lambda: watch.step >= step + QUIET_STEPS + 1, "quiet steps", watch)
    before = max(generation for generation in watch.generations if generation < after)
    change = Asked(kind=kind, at=at, before=before, after=after)
    if newcomers:
        change = replace(
            change,
            newcomer_at=watch.sign(newcomers[-1], BUILT),
            let_in_at=watch.sign(newcomers[-1], CAUGHT_UP),
        )
    print(f"{number + 1}: {kind} after {watch.generations[after]['step']} steps", file=sys.stderr)
    return change


# -- while nothing changes ------------------------------------------------------------------------------------------


def measure_overhead(virtual: int, folder: Path) -> dict[str, Any]:
    """CPU microseconds per step and worker: two workers, a tiny model, no changes."""
    watch, marks = Watch(), folder / "marks"
    args = [str(marks), "--megabytes", "0.01", "--pause", "0.002", "--costs"]
    settings = RunSettings(
        script=JOB, args=args, virtual=virtual, workers=2, steps=OVERHEAD_STEPS, run_dir=folder / "run"
    )
    with Run(settings, watch) as job:
        turn_until_over(job)
    found = [json.loads(path.read_text()) for path in marks.glob("*.costs")]
    assert len(found) == 2, f"{len(found)} of 2 workers wrote what they spent"
    names = sorted({name for costs in found for name in costs["microseconds"]})
    return {
        "way": "overhead",
        "virtual": virtual,
        "steps": found[0]["steps"],
        "microseconds": {
            name: statistics.mean(costs["microseconds"].get(name, 0.0) for costs in found) for name in names
        },
    }


# -- the command line -----------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "ours": measure_ours,
    "torchrun": rescale_baselines.measure_torchrun,
    "resume": rescale_baselines.measure_resume,
    "copy": rescale_baselines.measure_copy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*MEASURES, "overhead", "all", "table"))
    parser.add_argument("megabytes", nargs="*", type=float, help=f"sizes of the parameters; default {SIZES}")
    parser.add_argument("--changes", type=int, default=0, help=f"of each kind; default {CHANGES}, restarts {RESTARTS}")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="S", help="`ours`: fewer, if S seconds over"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="before growing; N + 1 after it")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a turn sleeps, standing for a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is")
    parser.add_argument(
        "--hosts", type=int, default=0, help="`ours` only: a host of its own for every worker; 4 at least"
    )
    parser.add_argument("--rate", default="", help="with --hosts: what each host's link carries, such as 1gbit")
    parser.add_argument("--name", default="", help="with --hosts: what the rows are of, if not of this code")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "concertina-rescale")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    if args.what == "table":
        rescale_table.write(args.scratch)
        return
    if args.hosts:
        for size in args.megabytes or SIZES:
            name = "-".join(filter(None, ("hosts", f"{size:g}", args.rate, args.name)))
            count = args.changes or CHANGES
            _keep(
                args.scratch,
                name,
                lambda folder, size=size, count=count: {
                    **measure_ours(
                        size, count, args.pause, args.device, folder, args.hosts, args.rate, workers=args.workers
                    ),
                    "way": "hosts",
                    "workers": args.workers,
                    "device": args.device,
                    "rate": args.rate,
                    "name": args.name,
                },
            )
        return
    still = ("overhead",) if args.device == "cpu" else ()
    ways = (*MEASURES, *still) if args.what == "all" else (args.what,)
    for way in ways:
        if way == "overhead":
            for virtual in (2, 4):
                _keep(args.scratch, f"overhead-{virtual}", lambda folder, v=virtual: measure_overhead(v, folder))
            continue
        for size in args.megabytes or SIZES:
            limit = {"within": args.within} if way == "ours" else {}
            count = args.changes or (RESTARTS if way in ("torchrun", "resume") else CHANGES)
            _keep(
                args.scratch,
                f"{way}-{size:g}-{args.device}",
                lambda folder, way=way, size=size, count=count, limit=limit: {
                    **MEASURES[way](size, count, args.pause, args.device, folder, workers=args.workers, **limit),
                    "device": args.device,
                    "workers": args.workers,
                    "keeps_memory": os.environ.get("MALLOC_MMAP_MAX_") == "0",
                },
            )
    if args.what == "all":
        rescale_table.write(args.scratch)


def _keep(scratch: Path, name: str, measure: Any) -> None:
    """Measures in a folder that is gone afterwards if all went well, keeps the figures, prints them in short."""
    load, began = os.getloadavg(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))
    try:
        found = measure(folder)
    except BaseException:
        print(f"{name} failed; its logs are in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    found |= {"load": load, "seconds": round(time.monotonic() - began)}
    (scratch / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(rescale_table.in_short(found), flush=True)


if __name__ == "__main__":
    main()
