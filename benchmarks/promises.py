"""The figures of docs/results/scheduling.md about promised deadlines.

    python -m benchmarks.promises traces [NAME ...]    deadlines met, CPU seconds of the whole run
    python -m benchmarks.promises noise [NAME ...]     the same with step times that vary by 10 %
    python -m benchmarks.promises ablation             elasticflow and its halves (fig. 9) on 195job
    python -m benchmarks.promises decision             one decision, 500 active jobs on 1,024 devices

CPU time of one process, so that a busy machine does not count.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from concertina.core.cluster import Cluster
from concertina.core.plan import Admitted
from concertina.policies.admission import rule
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.noise import Noise
from concertina.simulator.run import simulate
from concertina.simulator.scenario import load_scenario

TRACES = Path(__file__).parents[2] / "shared" / "traces"
CASES = {
    "195job": ("elasticflow-itp/195job", "16x8:A100"),
    "philly_103959": ("elasticflow/philly_103959", "32x8:A100"),
    "cluster10": ("elasticflow-itp/cluster10", "32x8:A100"),
    "elasticVpollux_e": ("elasticflow/elasticVpollux_e", "16x4:T4"),
    "cluster01": ("elasticflow-itp/cluster01", "64x8:A100"),
    "cluster02": ("elasticflow-itp/cluster02", "64x8:A100"),
    "cluster05": ("elasticflow-itp/cluster05", "64x8:A100"),
    "cluster06": ("elasticflow-itp/cluster06", "64x8:A100"),
    "cluster04": ("elasticflow-itp/cluster04", "128x8:A100"),
    "cluster07": ("elasticflow-itp/cluster07", "128x8:A100"),
    "cluster08": ("elasticflow-itp/cluster08", "128x8:A100"),
}
SMALL = ("195job", "philly_103959", "cluster10", "elasticVpollux_e")


def run(name: str, policy: str = "elasticflow", noise: float = 0.0) -> None:
    """Simulate one trace and print a row."""
    file, cluster = CASES[name]
    scenario = load_scenario(str(TRACES / f"{file}.csv.gz"), cluster=cluster)
    begun = time.process_time()
    found = simulate(
        scenario.jobs,
        cluster=scenario.cluster,
        policy=policy,
        throughput=scenario.throughput,
        overhead="elasticflow",
        noise=Noise(step_time=noise),
        trace=name,
    ).summary
    spent = time.process_time() - begun
    print(
        f"| {name} | {cluster} | {policy} | {found.deadline_met} of {found.jobs} | {found.admitted} "
        f"| {found.admitted_missed} | {spent:.1f} |",
        flush=True,
    )


def decision(seed: int = 0, active: int = 500, rounds: int = 30) -> None:
    """Time decisions and admissions on a table of jobs drawn from cluster04, deadlines stretched to fit."""
    file, _ = CASES["cluster04"]
    scenario = load_scenario(str(TRACES / f"{file}.csv.gz"), cluster="128x8:A100")
    draw, curves = random.Random(seed), Curves(scenario.throughput)
    policy = policy_named("elasticflow")
    admit = rule(policy.admission)
    table = Table(Cluster.parse("128x8:A100").types, [1024])
    admissions: list[float] = []
    for key, job in enumerate(draw.sample(scenario.jobs, len(scenario.jobs))):
        if len(table) == active:
            break
        wait = ((job.deadline_s or 0.0) - job.submit_s) * draw.uniform(2.0, 4.0)
        spec = replace(job, submit_s=0.0, deadline_s=wait)
        curve, work = curves.of(spec)
        begun = time.process_time()
        answer = admit(spec, curve, table.capacity, table)
        admissions.append(time.process_time() - begun)
        if isinstance(answer, Admitted):
            table.add(key, spec, curve, estimate=work, user=0)
    assert len(table) == active
    decisions: list[float] = []
    for second in range(rounds):
        table.now = float(second)
        begun = time.process_time()
        policy.allocate(table)
        decisions.append(time.process_time() - begun)
    for name, times in (("decision", decisions), ("admission", admissions[-100:])):
        p95 = np.percentile(times, 95) * 1000
        print(f"{name}: {np.mean(times) * 1000:.1f} ms mean, {p95:.1f} ms 95th percentile")


def main(arguments: Sequence[str]) -> None:
    """Run what was asked for."""
    what, names = arguments[0], arguments[1:]
    if what == "decision":
        decision()
    elif what == "ablation":
        for policy in ("elasticflow", "edf-admission", "edf-elastic", "edf"):
            run("195job", policy)
    else:
        for name in names or (CASES if what == "traces" else SMALL):
            run(name, noise=0.1 if what == "noise" else 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
