"""The figures of docs/results/concertina-policy.md.

    python -m benchmarks.own_policy traces [NAME ...]      deadlines met, beside elasticflow
    python -m benchmarks.own_policy mix [NAME ...]         30 % best effort: their completion times, all policies
    python -m benchmarks.own_policy fairness [NAME ...]    best effort alone: worst finish-time fairness
    python -m benchmarks.own_policy decision               one decision, 500 active jobs on 1,024 devices

NAME is a trace of `CASES`, a virtual cluster of Philly (`VCS`, all of them: `vcs`), or several.
`--policy NAME` (repeatable), `--overhead NAME` and `--first JOBS` narrow it down. Everything in one process.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.traces import TRACES
from concertina.core.job import JobSpec
from concertina.core.plan import Admitted
from concertina.policies.admission import rule_of
from concertina.policies.registry import POLICIES, policy_named
from concertina.policies.scaling_curve import Curves
from concertina.policies.table import Table
from concertina.simulator.metrics import JobOutcome, Result
from concertina.simulator.run import simulate
from concertina.simulator.scenario import Scenario, load_scenario

CASES = {
    "195job": ("elasticflow-itp/195job", "16x8:A100"),
    "philly_103959": ("elasticflow/philly_103959", "32x8:A100"),
    "cluster10": ("elasticflow-itp/cluster10", "32x8:A100"),
    "elasticVpollux_e": ("elasticflow/elasticVpollux_e", "16x4:T4"),
    "cluster01": ("elasticflow-itp/cluster01", "64x8:A100"),
    "cluster06": ("elasticflow-itp/cluster06", "64x8:A100"),
    "cluster05": ("elasticflow-itp/cluster05", "64x8:A100"),
    "cluster02": ("elasticflow-itp/cluster02", "64x8:A100"),
    "cluster08": ("elasticflow-itp/cluster08", "128x8:A100"),
    "cluster07": ("elasticflow-itp/cluster07", "128x8:A100"),
    "cluster04": ("elasticflow-itp/cluster04", "128x8:A100"),
}
VCS = ("0e4a51", "103959", "11cb48", "2869ce", "6214e9", "6c71a0", "7f04ca", "b436b2", "e13805", "ed69ec", "ee9e8c")
"""Philly's virtual clusters with more than a handful of jobs."""
PHILLY = "philly/philly_jobs.csv.gz#vc={},first={},max_gpus=64"
SMALL = ("195job", "philly_103959", "cluster10", "elasticVpollux_e")


def scenario_of(name: str, first: int = 1500) -> Scenario:
    """A shared trace on its cluster; a Philly VC has deadlines drawn as those of the ITP traces were."""
    if name.startswith("vc-"):
        scenario = load_scenario(str(TRACES / PHILLY.format(name.removeprefix("vc-"), first)))
        return replace(scenario, jobs=with_deadlines(scenario.jobs))
    file, cluster = CASES[name]
    return load_scenario(str(TRACES / f"{file}.csv.gz"), cluster=cluster)


def with_deadlines(jobs: Sequence[JobSpec], seed: int = 0) -> tuple[JobSpec, ...]:
    """Deadlines after half to one and a half times the duration, as the ElasticFlow authors drew them."""
    draw = random.Random(seed)
    return tuple(
        replace(job, deadline_s=job.submit_s + draw.uniform(0.5, 1.5) * (job.duration_s or 0.0)) for job in jobs
    )


def loosened(jobs: Sequence[JobSpec], part: float, seed: int = 0) -> tuple[JobSpec, ...]:
    """The jobs, this part of them (drawn by chance) without their deadlines."""
    draw = random.Random(seed)
    loose = set(draw.sample(range(len(jobs)), round(part * len(jobs))))
    return tuple(replace(job, deadline_s=None, soft=False) if i in loose else job for i, job in enumerate(jobs))


def run(scenario: Scenario, policy: str, overhead: str) -> tuple[Result, float]:
    """The result, and CPU seconds. All on equal terms: nobody trains with other batches than were asked for."""
    chosen: Any = policy_named(policy)
    if hasattr(chosen, "scaling"):
        chosen = replace(chosen, scaling="strong")
    begun = time.process_time()
    result = simulate(
        scenario.jobs,
        cluster=scenario.cluster,
        policy=chosen,
        throughput=scenario.throughput,
        overhead=overhead,
        trace=scenario.name,
    )
    return result, time.process_time() - begun


def finished(result: Result) -> Iterator[tuple[JobOutcome, float]]:
    """Jobs without a deadline and their completion times."""
    for outcome in result.outcomes:
        if outcome.deadline_s is None and outcome.jct_s is not None:
            yield outcome, outcome.jct_s


def row(name: str, policy: str, result: Result, spent: float) -> None:
    """One row of a table."""
    found = result.summary
    loose = list(finished(result))
    jct = float(np.mean([seconds for _, seconds in loose])) if loose else 0.0
    rhos = [outcome.fair_share for outcome, _ in loose]
    total = sum(outcome.deadline_s is None for outcome in result.outcomes)
    print(
        f"| {name} | {policy} | {found.deadline_met} | {found.admitted_missed} | {len(loose)} of {total} | {jct:.0f} "
        f"| {max(rhos, default=0.0):.2f} | {np.mean(rhos) if rhos else 0.0:.2f} | {found.rescales} "
        f"| {found.decision_ms_p95:.1f} | {spent:.1f} |",
        flush=True,
    )


def crowded(active: int, part: float, seed: int = 0) -> Table:
    """A table of so many active jobs drawn from cluster04, this part of them without a deadline, most of them run."""
    scenario = scenario_of("cluster04")
    draw, curves = random.Random(seed), Curves(scenario.throughput)
    policy = policy_named("concertina")
    admit = rule_of(policy)
    table = Table(scenario.cluster.types, [scenario.cluster.slots])
    for key, job in enumerate(draw.sample(scenario.jobs, len(scenario.jobs))):
        if len(table) == active:
            break
        loose = draw.random() < part
        wait = ((job.deadline_s or 0.0) - job.submit_s) * draw.uniform(2.0, 4.0)
        spec = replace(job, submit_s=0.0, deadline_s=None if loose else wait)
        curve, work = curves.of(spec)
        answer = admit(spec, curve, table.capacity, table)
        if isinstance(answer, Admitted):
            row_ = table.add(key, spec, curve, estimate=work, user=0)
            table.reserved.update(answer.reserved)
            count = 1 << draw.randrange(3)
            if table.used[0] + count <= table.capacity[0] and draw.random() < 0.8:
                table.hold(row_, ((table.types[0], count),), nodes=None)
    assert len(table) == active
    return table


def decision(active: int = 500, rounds: int = 40) -> None:
    """Time decisions with 500 active jobs on 1,024 devices: promised ones, others, both."""
    policy = policy_named("concertina")
    for part in (0.0, 0.3, 0.7, 1.0):
        table = crowded(active, part)
        times: list[float] = []
        for second in range(rounds):
            table.now = float(second)
            begun = time.process_time()
            policy.allocate(table)
            times.append(time.process_time() - begun)
        mean, p95 = np.mean(times) * 1000, np.percentile(times, 95) * 1000
        print(f"{part:.0%} best effort: {mean:.1f} ms mean, {p95:.1f} ms 95th percentile", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("traces", "mix", "fairness", "decision"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--policy", "-p", action="append")
    parser.add_argument("--overhead", default="elasticflow")
    parser.add_argument("--first", type=int, default=1500, help="jobs of a Philly VC")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if given.what == "decision":
        decision()
        return
    part = {"traces": 0.0, "mix": 0.3, "fairness": 1.0}[given.what]
    policies = given.policy or (["concertina", "elasticflow"] if given.what == "traces" else list(POLICIES))
    print("| trace | policy | deadlines met | of the admitted late | best effort done | their mean JCT, s "
          "| worst rho | mean rho | rescales | p95 ms | CPU s |")  # fmt: skip
    names = [vc for name in given.names or SMALL for vc in (VCS if name == "vcs" else (name,))]
    for name in [f"vc-{name}" if name in VCS else name for name in names]:
        scenario = scenario_of(name, given.first)
        scenario = replace(scenario, jobs=loosened(scenario.jobs, part, given.seed))
        for policy in policies:
            row(name, policy, *run(scenario, policy, given.overhead))


if __name__ == "__main__":
    main()
