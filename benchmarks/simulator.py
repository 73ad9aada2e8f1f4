"""The simulator's claims, measured: right against other people's results, fast, and n log n in a round.

    python -m benchmarks.simulator               # everything, and the tables of docs/results/simulator.md
    anew python -m benchmarks.simulator anchors       # only the comparison with other simulators python
    -m benchmarks.simulator speed         # only the full Philly list and the large virtual cluster python
    -m benchmarks.simulator rounds        # only the cost of one round by number of active jobs python -m
    benchmarks.simulator gandiva 195job   # every job of the one comparison that is not alike

The traces are read from ../shared/traces beside the repository.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from benchmarks import anchors, pictures
from benchmarks.peers import GandivaRules
from concertina.core.cluster import Cluster, Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.placement import Placer
from concertina.policies.registry import POLICIES
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.readers import read_trace
from concertina.simulator.run import simulate

ROOT = Path(__file__).parents[1]
TRACES = ROOT.parent / "shared" / "traces"
PAGE = ROOT / "docs" / "results" / "simulator.md"
SIZES = (100, 1_000, 10_000, 100_000)

SORT = "(one stable sort)"

Row = Sequence[object]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


# -- right ----------------------------------------------------------------------------------------------


def anchor_table() -> str:
    """Ours beside theirs, all comparisons."""
    rows: list[Row] = []
    for vc in ("ee9e8c", "b436b2"):
        rows.append(_jct_row(f"Tiresias authors, Philly VC {vc}, FIFO", anchors.tiresias_fifo(TRACES, vc)))
        rows.append(_jct_row(f"Tiresias authors, Philly VC {vc}, 2D-LAS", anchors.tiresias_las(TRACES, vc)))
        late = anchors.tiresias_las(TRACES, vc, late=True)
        rows.append(_jct_row(f"the same with their late sinking, {vc}", late))
    for trace in anchors.CLUSTERS:
        for policy in ("edf", "dlas-gpu", "gandiva"):
            found = anchors.elasticflow(TRACES, trace, policy)
            rows.append(_met_row(f"ElasticFlow, {trace}, {policy}", found))
        found = anchors.gandiva_retold(TRACES, trace)
        rows.append(_met_row(f"ElasticFlow, {trace}, gandiva, their rules retold", found))
    rows.append(_jct_row("Pollux, workload-6, Tiresias", anchors.pollux_tiresias(TRACES)))
    ours, theirs = anchors.shockwave_las(TRACES)
    rows.append(["Shockwave, 120 jobs, LAS", "makespan s", *_pair(theirs, ours), "-"])
    return table(["simulator, trace, policy", "what", "theirs", "ours", "ratio", "jobs alike"], rows)


def _pair(theirs: float, ours: float) -> tuple[str, str, str]:
    return f"{theirs:,.1f}", f"{ours:,.1f}", f"{ours / theirs:.4f}"


def _alike(found: anchors.Comparison) -> str:
    alike = len(found.jobs) - len(found.differing(seconds=61, share=0.05))
    return f"{alike} of {len(found.jobs)}"


def _jct_row(name: str, found: anchors.Comparison) -> Row:
    return [name, "mean JCT s", *_pair(found.mean_theirs, found.mean_ours), _alike(found)]


def _met_row(name: str, found: anchors.Comparison) -> Row:
    ratio = f"{found.met_ours / found.met_theirs:.4f}"
    return [name, "deadlines met", found.met_theirs, found.met_ours, ratio, _alike(found)]


def gandiva_table() -> str:
    """What each rule of theirs does to their own figures: all rules, all but one, none."""
    rules = GandivaRules()
    names = [field.name for field in fields(GandivaRules)]
    variants = [("all their rules", rules)]
    variants += [(f"without `{name}`", replace(rules, **{name: False})) for name in names]
    variants += [("without any", GandivaRules(**dict.fromkeys(names, False)))]
    rows = []
    for title, variant in variants:
        cells: list[object] = [title]
        for trace in ("195job", "philly_103959"):
            found = anchors.gandiva_retold(TRACES, trace, variant)
            cells += [found.met_ours, f"{found.mean_ours:,.0f}", _alike(found)]
        rows.append(cells)
    head = ["rules", "195job met", "mean JCT s", "as theirs", "philly_103959 met", "mean JCT s", "as theirs"]
    return table(head, rows)


def gandiva_jobs(trace: str, limit: int | None = None) -> str:
    """Job by job: theirs, their rules retold, ours, and what the waiting in theirs consisted of."""
    ours = {job.id: job for job in anchors.elasticflow(TRACES, trace, "gandiva").jobs}
    rows = []
    for job, told in anchors.gandiva_stories(TRACES, trace):
        lost = job.theirs_s - (told.spec.duration_s or 0.0)
        rows.append(
            (
                lost,
                [
                    job.id[:8],
                    job.gpus,
                    f"{told.spec.duration_s:,.0f}",
                    f"{job.theirs_s:,.0f}",
                    f"{job.ours_s:,.0f}",
                    f"{ours[job.id].ours_s:,.0f}",
                    f"{lost:,.0f}",
                    f"{told.charged:,.0f}",
                    f"{told.beside_idle:,.0f}",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    head = [
        "job",
        "devices",
        "duration",
        "theirs",
        "retold",
        "ours",
        "lost in theirs",
        "charged",
        "idle beside it",
    ]
    return table(head, [cells for _, cells in rows[:limit]])


def gandiva_totals() -> str:
    """The sums over all jobs of what `gandiva_jobs` lists."""
    rows = []
    for trace in anchors.CLUSTERS:
        stories = anchors.gandiva_stories(TRACES, trace)
        lost = sum(job.theirs_s - (told.spec.duration_s or 0.0) for job, told in stories)
        charged = sum(told.charged for _, told in stories)
        idle = sum(told.beside_idle for _, told in stories)
        rows.append(
            [
                trace,
                f"{lost:,.0f}",
                f"{charged:,.0f} ({charged / lost:.0%})",
                f"{idle:,.0f} ({idle / lost:.0%})",
            ]
        )
    head = [
        "trace",
        "seconds lost by all jobs",
        "charged at other jobs' arrivals",
        "waited beside idle devices",
    ]
    return table(head, rows)


# -- fast -----------------------------------------------------------------------------------------------


def one(policy: str, cluster: str, part: str) -> dict[str, float]:
    """Replay Philly (or a part of it) once in this process."""
    path = TRACES / "philly" / "philly_jobs.csv.gz"
    jobs = read_trace(f"{path}#{part}" if part else str(path)).jobs
    cpu = time.process_time()
    result = simulate(jobs, cluster=Cluster.parse(cluster), policy=policy, trace="philly")
    return {
        "jobs": len(jobs),
        "wall_s": result.summary.wall_s,
        "cpu_s": time.process_time() - cpu,
        "rounds": result.summary.rounds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "most_active": max_active(result.outcomes),
    }


def max_active(outcomes: Sequence[object]) -> int:
    """The most jobs that were in the cluster at the same time."""
    steps = sorted(
        step
        for o in outcomes
        if getattr(o, "end_s", None) is not None
        for step in ((o.submit_s, 1), (o.end_s, -1))  # type: ignore[attr-defined]
    )
    now = most = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def speed_table() -> str:
    """Each run in a process of its own, so that peaks of memory are its own too."""
    rows: list[Row] = []
    runs = [
        ("fifo", "50x8", "", 15.0),
        ("backfill", "50x8", "", 15.0),
        ("tiresias", "50x8", "", 60.0),
        ("fifo", "64x8", "", 15.0),
        ("backfill", "64x8", "", 15.0),
        ("tiresias", "64x8", "", 60.0),
        ("tiresias", "8x8", "vc=b436b2,max_gpus=64", 2.2),
    ]
    for policy, cluster, part, limit in runs:
        load = os.getloadavg()[0]
        command = [sys.executable, "-m", "benchmarks.simulator", "one", policy, cluster, part]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        rows.append(
            [
                part or "all of Philly",
                cluster,
                policy,
                f"{found['jobs']:,.0f}",
                f"{found['rounds']:,.0f}",
                f"{found['most_active']:,.0f}",
                f"{found['wall_s']:.1f}",
                f"{found['cpu_s']:.1f}",
                limit,
                f"{found['peak_mb']:.0f}",
                f"{load:.1f}",
            ]
        )
        print(table(["run"] * 11, rows[-1:]).splitlines()[-1], file=sys.stderr)
    head = [
        "trace",
        "cluster",
        "policy",
        "jobs",
        "rounds",
        "most active",
        "wall s",
        "CPU s",
        "limit s",
        "peak MB",
        "load before",
    ]
    return table(head, rows)


# -- n log n --------------------------------------------------------------------------------------------


def busy_table(count: int, seed: int = 0) -> Table:
    """A cluster with one device for every two jobs, nearly full; the first that waits asks for more than
    is free."""
    draw = random.Random(seed)
    nodes = max(count // 16, 1)
    cluster = Cluster.parse(f"{nodes}x8")
    free = cluster.slots
    views = []
    for index in range(count):
        gpus = draw.choice((1, 1, 1, 2, 4, 8)) if index != 3 else 8
        spec = JobSpec(
            id=str(index),
            submit_s=float(index),
            gpus=gpus,
            duration_s=draw.lognormvariate(8, 2),
            deadline_s=count + draw.uniform(1e3, 1e5),
        )
        runs = index != 3 and gpus + 4 <= free and draw.random() < 0.5
        free -= gpus if runs else 0
        service = draw.lognormvariate(7, 2) if runs or draw.random() < 0.3 else 0.0
        views.append(
            JobView(
                spec=spec,
                phase=JobPhase.RUNNING if runs else JobPhase.WAITING,
                workers=(("gpu", gpus),) if runs else (),
                service_s=service,
                waiting_since_s=None if runs else spec.submit_s,
                stamp=float(index + 1),
                level=index // 4 + 1 if runs else 0,
            )
        )
    rows = Table.from_snapshot(Snapshot(now=float(count), cluster=cluster, jobs=tuple(views)), Curves())
    rows.rooms = Placer(cluster)
    return rows


def best_of(call: Callable[[], object], least_s: float = 0.3) -> float:
    """The shortest of several timings, in seconds."""
    best, spent, calls = math.inf, 0.0, 0
    while spent < least_s or calls < 3:
        started = time.perf_counter()
        call()
        took = time.perf_counter() - started
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


def measure_rounds() -> dict[str, list[float]]:
    """Seconds of one decision by policy, for each of `SIZES`; and of one sort of as many numbers, as a
    measure."""
    tables = {count: busy_table(count) for count in SIZES}
    numbers = {count: np.random.default_rng(0).random(count) for count in SIZES}
    found = {SORT: [best_of(lambda c=count: np.argsort(numbers[c], kind="stable")) for count in SIZES]}  # type: ignore[misc]
    for name, policy in POLICIES.items():
        found[name] = [best_of(lambda p=policy, c=count: p.allocate(tables[c])) for count in SIZES]  # type: ignore[misc]
    return found


def rounds_table(found: dict[str, list[float]]) -> str:
    """Milliseconds, and how the cost grows beside that of a sort (1: as fast) over the last factor of 100."""
    sort = found[SORT]
    rows = []
    for name, times in found.items():
        growth = (times[-1] / times[1]) / (sort[-1] / sort[1])
        rows.append([name, *(f"{seconds * 1000:.3f}" for seconds in times), f"{growth:.2f}"])
    head = ["policy", *(f"{count:,} jobs, ms" for count in SIZES), "growth from 1,000 to 100,000, sort = 1"]
    return table(head, rows)


# -- the page -------------------------------------------------------------------------------------------


def write(name: str, text: str) -> None:
    """Put a table between its marks on the page, and print it."""
    print(f"\n{name}\n{text}")
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise SystemExit(f"{PAGE.name} has no place named {name}")
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main(arguments: list[str]) -> None:
    """Run what was asked for."""
    what = arguments[0] if arguments else "all"
    if what == "one":
        print(json.dumps(one(*arguments[1:])))
        return
    if what == "gandiva":
        print(gandiva_jobs(arguments[1]))
        return
    if what in ("all", "anchors"):
        write("anchors", anchor_table())
        write("gandiva-rules", gandiva_table())
        write("gandiva-totals", gandiva_totals())
        write("gandiva-jobs", gandiva_jobs("195job", 15))
    if what in ("all", "speed"):
        write("speed", speed_table())
    if what in ("all", "rounds"):
        found = measure_rounds()
        write("rounds", rounds_table(found))
        pictures.draw("simulator-rounds")


if __name__ == "__main__":
    main(sys.argv[1:])
