"""The figures of docs/results/scheduling.md about promised deadlines.

    python -m benchmarks.promises traces [NAME ...]    deadlines met, CPU seconds of the whole run
    python -m benchmarks.promises noise [NAME ...]     the same with step times that vary by 10 %
    python -m benchmarks.promises philly [VC [NOISE]]  the same on Philly VCs, deadlines drawn as in the paper
    python -m benchmarks.promises chronus [NAME]       Chronus's two Philly traces, which have deadlines of their own
    python -m benchmarks.promises overheads [COST]     generated traces, changes that cost 0 to 60 s
    python -m benchmarks.promises decision             one decision, 500 active jobs on 1,024 devices
    python -m benchmarks.promises figure6b             ElasticFlow's figures again: 195 jobs, every baseline
    python -m benchmarks.promises figure8 [NAME ...]   other traces
    python -m benchmarks.promises figure9              elasticflow and its halves as the cluster grows
    python -m benchmarks.promises figure10             cluster efficiency and makespan, all jobs admitted
    python -m benchmarks.promises figure11             jobs with and without a deadline together

CPU time of one process, so that a busy machine does not count.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from benchmarks.traces import TRACES
from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.core.plan import Admitted
from concertina.policies.admission import rule
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.generate import Recipe, generate
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.run import simulate
from concertina.simulator.scenario import Scenario, load_scenario

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


BASELINES = ("edf", "gandiva", "tiresias", "themis", "chronus")
HALVES = ("elasticflow", "edf-admission", "edf-elastic", "edf")
COSTS = ("instant", "elasticflow", "stop-resume", 60.0)
VIRTUAL_CLUSTERS = ("2869ce", "b436b2", "6214e9", "ed69ec")


def load(name: str) -> Scenario:
    """One of the cases."""
    file, cluster = CASES[name]
    return load_scenario(str(TRACES / f"{file}.csv.gz"), cluster=cluster)


def play(scenario: Scenario, jobs: Sequence[JobSpec], policy: str, noise: float = 0.0, seed: int = 0) -> Result:
    """Simulate jobs with what a change costs in ElasticFlow's simulator."""
    return simulate(
        jobs,
        cluster=scenario.cluster,
        policy=policy,
        throughput=scenario.throughput,
        overhead="elasticflow",
        noise=Noise(step_time=noise),
        seed=seed,
        trace=scenario.name,
    )


def row(*cells: object) -> None:
    """A line of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def run(name: str, policy: str = "elasticflow", noise: float = 0.0) -> None:
    """Simulate one trace and print a row."""
    scenario = load(name)
    begun = time.process_time()
    found = play(scenario, scenario.jobs, policy, noise).summary
    spent = time.process_time() - begun
    met = f"{found.deadline_met} of {found.jobs}"
    row(name, CASES[name][1], policy, met, found.admitted, found.admitted_missed, f"{spent:.1f}")


def philly(vcs: Sequence[str] = VIRTUAL_CLUSTERS, noises: Sequence[float] = (0.0, 0.1), seed: int = 0) -> None:
    """Virtual clusters of Philly, which has no deadlines: those of the paper are drawn, 0.5 to 1.5 durations."""
    for vc in vcs:
        scenario = load_scenario(
            f"{TRACES / 'philly' / 'philly_jobs.csv.gz'}#vc={vc},first=1500", cluster="16x8", skip_bad_rows=True
        )
        draw = random.Random(seed)
        jobs = [
            replace(job, deadline_s=job.submit_s + draw.uniform(0.5, 1.5) * (job.duration_s or 0.0))
            for job in scenario.jobs
        ]
        for noise in noises:
            found = play(scenario, jobs, "elasticflow", noise).summary
            row(vc, f"noise {noise:g}", f"{found.deadline_met} of {found.jobs}", found.admitted, found.admitted_missed)


def chronus(names: Sequence[str]) -> None:
    """30,735 and 30,756 jobs of Philly with the deadlines that Chronus's authors gave them, on 256x8 V100."""
    for name in names:
        scenario = load_scenario(str(TRACES / "chronus" / f"{name}.csv.gz"), cluster="256x8:V100", skip_bad_rows=True)
        begun = time.process_time()
        found = play(scenario, scenario.jobs, "elasticflow").summary
        spent = time.process_time() - begun
        met = f"{found.deadline_met} of {found.jobs}"
        row(name, "256x8:V100", "elasticflow", met, found.admitted, found.admitted_missed, f"{spent:.1f}")


def overheads(costs: Sequence[str | float] = COSTS, likes: Sequence[str] = ("itp", "philly")) -> None:
    """Generated traces on 16, 64 and 256 devices at 0.8 to 4 times what these can do, tight and loose deadlines."""
    for overhead in costs:
        jobs = met = taken = late = 0
        for like in likes:
            for gpus in (16, 64, 256):
                for much in (0.8, 1.5, 4.0):
                    for tight, loose in ((0.5, 1.5), (0.3, 0.9)):
                        recipe = Recipe(
                            jobs=300, load=much, gpus=gpus, like=like, deadlines=1.0, tight=tight, loose=loose
                        )
                        cluster = Cluster.parse(f"{gpus // 8}x8")
                        found = simulate(generate(recipe), cluster=cluster, policy="elasticflow", overhead=overhead)
                        jobs, met = jobs + found.summary.jobs, met + found.summary.deadline_met
                        taken, late = taken + found.summary.admitted, late + found.summary.admitted_missed
        row(overhead, " and ".join(likes), f"{met} of {jobs}", taken, late)


def compare(name: str) -> None:
    """Deadlines met by ElasticFlow and by each baseline."""
    scenario = load(name)
    met = {policy: play(scenario, scenario.jobs, policy).summary.deadline_met for policy in ("elasticflow", *BASELINES)}
    ours = met["elasticflow"]
    cells = [f"{met[policy]} ({ours / max(met[policy], 1):.2f}x)" for policy in BASELINES]
    row(name, f"{ours} of {len(scenario.jobs)}", *cells)


def figure9() -> None:
    """The same jobs on clusters of growing size."""
    for nodes in (4, 8, 16, 32, 64):
        file, _ = CASES["195job"]
        scenario = load_scenario(str(TRACES / f"{file}.csv.gz"), cluster=f"{nodes}x8:A100")
        found = [play(scenario, scenario.jobs, policy).summary for policy in HALVES]
        row(8 * nodes, *(f"{one.deadline_met}" for one in found))


def figure10() -> None:
    """100 jobs with deadlines of 1.5 durations, so that nobody is refused."""
    scenario = load("195job")
    jobs = [
        replace(job, deadline_s=job.submit_s + 1.5 * (job.duration_s or 0.0))
        for job in sorted(scenario.jobs, key=lambda job: job.submit_s)[:100]
    ]
    for policy in ("elasticflow", *BASELINES):
        found = play(scenario, jobs, policy).summary
        hours = found.makespan_s / 3600
        row(policy, found.admitted, f"{found.cluster_efficiency:.3f}", f"{hours:.1f} h", found.deadline_met)


def figure11(seed: int = 0) -> None:
    """Part of the jobs without a deadline: deadlines met by the others, mean JCT of these over Gandiva's."""
    scenario = load("195job")
    policies = ("elasticflow", *BASELINES)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        draw = random.Random(seed)
        jobs = [replace(job, deadline_s=None) if draw.random() < share else job for job in scenario.jobs]
        strict = sum(job.deadline_s is not None for job in jobs)
        met, waits = {}, {}
        for policy in policies:
            result = play(scenario, jobs, policy)
            met[policy] = result.summary.deadline_met
            loose = [one for one in result.outcomes if one.deadline_s is None and one.end_s is not None]
            waits[policy] = fmean((one.end_s or 0.0) - one.submit_s for one in loose)
        cells = [f"{100 * met[p] / strict:.0f} %, {waits[p] / waits['gandiva']:.2f}" for p in policies]
        row(f"{100 * share:.0f} %", *cells)


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
    alone = {
        "decision": decision,
        "figure9": figure9, "figure10": figure10, "figure11": figure11,
    }  # fmt: skip
    if what in alone:
        alone[what]()
    elif what == "philly":  # [VC [NOISE ...]]
        philly(names[:1] or VIRTUAL_CLUSTERS, [float(noise) for noise in names[1:]] or (0.0, 0.1))
    elif what == "chronus":
        chronus(names or ("philly_SLO", "philly_MIX1"))
    elif what == "overheads":  # [COST [LIKE]]
        costs = [float(name) if name.isdigit() else name for name in names[:1]]
        overheads(costs or COSTS, names[1:] or ("itp", "philly"))
    elif what in ("figure6b", "figure8"):
        for name in names or (("195job",) if what == "figure6b" else (*SMALL[1:], "cluster01", "cluster06")):
            compare(name)
    else:
        for name in names or (CASES if what == "traces" else SMALL):
            run(name, noise=0.1 if what == "noise" else 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
