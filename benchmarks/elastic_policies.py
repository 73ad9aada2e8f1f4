"""The figures of docs/results/elastic-policies.md: what elasticity alone gives, policy by policy.

    python -m benchmarks.elastic_policies easyscale     EasyScale fig. 14: yarn-cs, easyscale-homo, easyscale-heter
    python -m benchmarks.elastic_policies elan          Elan fig. 20: fifo and backfill against their elastic twins
    python -m benchmarks.elastic_policies systems       Elan fig. 22: the same with other costs of a change
    python -m benchmarks.elastic_policies edl           EDL table 2: tiresias and elastic-tiresias, by size of job
    python -m benchmarks.elastic_policies philly-fifo   the two of Elan on the full Philly list (minutes)

Each prints the rows of a table. CPU seconds of one process, so that a busy machine does not count.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from benchmarks.traces import TRACES
from concertina.core.job import JobSpec
from concertina.policies.base import Policy
from concertina.policies.elastic_tiresias import ElasticTiresiasPolicy
from concertina.policies.scaling_curve import ThroughputTable
from concertina.policies.tiresias import TiresiasPolicy
from concertina.simulator.metrics import Result
from concertina.simulator.run import simulate
from concertina.simulator.scenario import Scenario, load_scenario

MIXED = "4x8:V100,8x2:P100,4x4:T4"
"""EasyScale 5: 4 servers of 8 V100, 8 of 2 P100, 4 of 4 T4."""
T4_SLOWER = {"ResNet-18": 2.45, "ResNet-50": 2.45, "CycleGAN": 2.45, "A3C": 2.45}
"""V100 over T4: ResNet50 2.45, Bert 1.55 (EasyScale 3.4.2). Gavel measured no T4."""
EASYSCALE = (
    *(
        f"synthetic:jobs=400,gpus=64,like={like},load={load},seed=1"
        for like in ("philly", "itp")
        for load in (1.0, 2.0)
    ),
    *(f"philly/philly_jobs.csv.gz#vc={vc},max_gpus=32" for vc in ("103959", "e13805", "0e4a51", "2869ce", "7f04ca")),
    *(f"elasticflow-itp-raw/{name}.csv.gz#first=1000,max_gpus=32" for name in ("cluster02", "cluster04", "cluster06")),
    *(
        f"gavel/philly_by_vc_seed0.csv.gz#vc={vc}"
        for vc in ("103959", "2869ce", "e13805", "b436b2", "ee9e8c", "0e4a51", "7f04ca", "6c71a0")
    ),
)
ELAN = (
    ("elasticflow-itp/195job.csv.gz", "16x8:A100"),
    ("elasticflow/elasticVpollux_e.csv.gz", "16x4:T4"),
    *((f"pollux/workloads.csv.gz#load={load},workload={i}", "16x4:T4") for load in ("1.0", "2.0") for i in (1, 2, 3)),
    ("rubick/workload_base.csv", "8x8:A800"),
    ("elasticflow/philly_103959.csv.gz", "8x8:A100"),
    ("elasticflow-itp/cluster10.csv.gz", "8x8:A100"),
    ("elasticflow-itp/cluster06.csv.gz", "64x8:A100"),
)
SIZES = (
    ("all", 0.0, math.inf),
    ("small, below 10^4", 0.0, 1e4),
    ("median, 1 to 20 x 10^4", 1e4, 2e5),
    ("large, above 2 x 10^5", 2e5, math.inf),
)
"""EDL's classes, in device-seconds asked for."""


def scenario(source: str, cluster: str | None = None) -> Scenario:
    """A shared or synthetic trace; jobs too large for the cluster are left out."""
    name = source if source.startswith("synthetic:") else str(TRACES / source)
    return load_scenario(name, cluster=cluster, skip_bad_rows=True)


def run(what: Scenario, policy: str | Policy, overhead: str, table: ThroughputTable | None) -> tuple[Result, float]:
    """A simulation and its CPU seconds."""
    begun = time.process_time()
    result = simulate(
        what.jobs, cluster=what.cluster, policy=policy, throughput=table, overhead=overhead, trace=what.name
    )
    return result, time.process_time() - begun


def show(*cells: object) -> None:
    """A row of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells: str) -> None:
    """Its first two lines."""
    show(*cells)
    show(*("---" for _ in cells))


def with_t4(table: ThroughputTable | None) -> ThroughputTable | None:
    """Gavel's table with T4 figures in the paper's proportion to V100."""
    if table is None:
        return None
    more = (
        replace(row, device_type="T4", iterations_per_s=row.iterations_per_s / T4_SLOWER.get(row.model, 1.55))
        for row in table.rows
        if row.device_type == "V100"
    )
    return ThroughputTable(rows=(*table.rows, *more), name=f"{table.name} and T4")


def easyscale(sources: Iterable[str] = EASYSCALE) -> None:
    """Mean completion time and makespan on the mixed cluster."""
    head(
        "trace", "jobs", "JCT yarn-cs", "homo", "heter", "yarn-cs / homo", "yarn-cs / heter", "makespan: homo", "heter"
    )
    gains: list[tuple[float, float]] = []
    for source in sources:
        what = scenario(source, MIXED)
        table = with_t4(what.throughput)
        yarn, homo, heter = (
            run(what, policy, "concertina", table)[0].summary
            for policy in ("yarn-cs", "easyscale-homo", "easyscale-heter")
        )
        gains.append((yarn.avg_jct_s / homo.avg_jct_s, homo.avg_jct_s / heter.avg_jct_s))
        show(
            source.removesuffix(".csv.gz").replace(".csv.gz", ""),
            homo.finished,
            *(f"{one.avg_jct_s:,.0f}" for one in (yarn, homo, heter)),
            *(f"{yarn.avg_jct_s / one.avg_jct_s:.1f}" for one in (homo, heter)),
            *(f"{yarn.makespan_s / one.makespan_s:.2f}" for one in (homo, heter)),
        )
    first, second = (math.exp(sum(map(math.log, one)) / len(one)) for one in zip(*gains, strict=True))
    better = sum(heter >= 1 for _, heter in gains)
    print(f"geometric means: homo {first:.2f} times yarn-cs, heter {second:.3f} times homo (not behind in {better})")


def _change(new: float, old: float) -> str:
    return f"{new / old - 1:+.0%}" if old > 0 else "-"


def elan(cases: Iterable[tuple[str, str]] = ELAN, overhead: str = "elan") -> None:
    """Pending time, completion time and makespan, static and elastic."""
    head(
        "trace",
        "cluster",
        "policy",
        "pending",
        "JCT",
        "makespan",
        "pending elastic",
        "JCT",
        "makespan",
        "resizes",
        "CPU s",
    )
    for source, cluster in cases:
        what = scenario(source, cluster or None)
        for static in ("fifo", "backfill"):
            before = run(what, static, overhead, what.throughput)[0].summary
            result, spent = run(what, f"elastic-{static}", overhead, what.throughput)
            after = result.summary
            pairs = [
                (getattr(after, name), getattr(before, name)) for name in ("avg_queue_s", "avg_jct_s", "makespan_s")
            ]
            show(
                what.name,
                cluster or "64x8:P100",
                static,
                *(f"{old:,.0f}" for _, old in pairs),
                *(f"{new:,.0f} ({_change(new, old)})" for new, old in pairs),
                f"{after.rescales:,}",
                f"{spent:.1f}",
            )


def systems() -> None:
    """What is left of the gain when a change of devices costs more, on the traces of `elan`."""
    head("trace", "policy", "cost of a change", "JCT", "makespan")
    for source, cluster in ELAN[:3]:
        what = scenario(source, cluster)
        for policy in ("elastic-fifo", "elastic-backfill"):
            ideal = run(what, policy, "instant", what.throughput)[0].summary
            for overhead in ("instant", "concertina", "elan", "stop-resume"):
                found = run(what, policy, overhead, what.throughput)[0].summary
                pairs = (found.avg_jct_s, ideal.avg_jct_s), (found.makespan_s, ideal.makespan_s)
                show(what.name, policy, overhead, *(f"{new:,.0f} ({_change(new, old)})" for new, old in pairs))


def _by_size(jobs: Sequence[JobSpec], result: Result) -> Iterator[float]:
    """Mean completion time of each class of `SIZES`."""
    needs = {job.id: job.gpus * (job.duration_s or 0.0) for job in jobs}
    for _, low, high in SIZES:
        times = [o.jct_s for o in result.outcomes if o.jct_s is not None and low <= needs[o.job_id] < high]
        yield sum(times) / len(times) if times else math.nan


def edl() -> None:
    """Tiresias and Elastic-Tiresias on the full Philly list, once with our queues and once with the paper's."""
    what = scenario("philly/philly_jobs.csv.gz")
    head("queues", "size, device-seconds", "jobs", "tiresias", "elastic-tiresias", "less")
    needs = [job.gpus * (job.duration_s or 0.0) for job in what.jobs]
    for limits in ((3250.0, 7200.0), (1e4, 2e5)):
        before, spent = run(what, TiresiasPolicy(limits=limits), "elan", what.throughput)
        after, more = run(what, ElasticTiresiasPolicy(limits=limits), "elan", what.throughput)
        pairs = zip(_by_size(what.jobs, before), _by_size(what.jobs, after), strict=True)
        for (name, low, high), (old, new) in zip(SIZES, pairs, strict=True):
            count = sum(low <= need < high for need in needs)
            show(
                f"{limits[0]:,.0f}, {limits[1]:,.0f}",
                name,
                f"{count:,}",
                f"{old:,.0f}",
                f"{new:,.0f}",
                f"{1 - new / old:.1%}",
            )
        print(f"CPU {spent:.0f} s and {more:.0f} s, {after.summary.rescales:,} resizes", flush=True)


def philly_fifo() -> None:
    """Elan's policies on 82,247 jobs."""
    elan((("philly/philly_jobs.csv.gz", ""),))


COMMANDS: dict[str, Callable[[], None]] = {
    "easyscale": easyscale,
    "elan": elan,
    "systems": systems,
    "edl": edl,
    "philly-fifo": philly_fifo,
}


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for."""
    unknown = [name for name in arguments if name not in COMMANDS]
    if unknown or not arguments:
        print(
            f"asked for {' '.join(unknown) or 'nothing'}; needed one or more of {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    for name in arguments:
        COMMANDS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
