"""The allocator's claims, measured: near the best with a proof, fast, and less waiting than under its rules.

    python -m benchmarks.milp                    # all tables of docs/results/allocation.md
    python -m benchmarks.milp instances          # only objective, bound and CPU time by size
    python -m benchmarks.milp queueing           # only `milp` against `greedy` on 70 to 190 nodes
    python -m benchmarks.milp queueing 70 190    # the same on some numbers of nodes
    python -m benchmarks.milp queueing seed=1    # the same with other jobs
    python -m benchmarks.milp harder             # jobs of any length, wrong estimates, bugs, slow scaling

Times are of the processor, not of the wall, so that a busy machine does not show. The jobs of the other
tables are synthetic, with what the paper publishes of its own: how many, over how long, how long on average.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.policies.allocation_model import AllocationProblem, Solution, marginal_gain, paper_job
from concertina.policies.base import Policy, Shares
from concertina.policies.greedy import GreedyPolicy
from concertina.policies.milp import MilpPolicy, branch, solve
from concertina.policies.table import Table
from concertina.simulator.generate import Recipe, generate
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import OVERHEADS, OverheadModel
from concertina.simulator.run import simulate

REFERENCES = {(40, 70): 38.713, (100, 150): 77.171, (300, 400): 206.068}
"""(jobs, nodes) -> the best objective as found elsewhere, every job on one node at least."""
LARGE = ((1_000, 2_000), (10_000, 20_000))
NODES = (70, 90, 110, 130, 150, 170, 190)
SPAN_S = 178_898.0
"""January 24, 14:25:41 to January 26, 16:07:19."""
JOBS = 447
MEAN_S = 232.6 * 60
"""Mean length of those of 5 minutes and more."""

Row = Sequence[object]


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def reference(jobs: int, nodes: int, *, may_wait: bool = False) -> AllocationProblem:
    """Demands uniform in 0.2-10 node-hours from NumPy's default generator, seed 0."""
    demands = np.random.default_rng(0).uniform(0.2, 10.0, jobs)
    return AllocationProblem(jobs=tuple(paper_job(float(demand)) for demand in demands), nodes=nodes, may_wait=may_wait)


# -- near the best, and fast ---------------------------------------------------------------------------------


def instance_table() -> str:
    """Every instance, with and without waiting, by each method."""
    rows: list[Row] = []
    for jobs, nodes in (*REFERENCES, *LARGE):
        for may_wait in (False, True):
            problem = reference(jobs, nodes, may_wait=may_wait)
            best = "" if may_wait else REFERENCES.get((jobs, nodes), "")
            name = f"{jobs:,} on {nodes:,}{', may wait' if may_wait else ''}"
            rows.append(_line(name, best, "solve", solve(problem, clock=time.process_time)))
            started = time.process_time()
            quick = marginal_gain(problem)
            rows.append(_line("", "", "marginal gain alone", quick, time.process_time() - started))
            if (jobs, nodes) in REFERENCES and not may_wait:
                started = time.process_time()
                alone = branch(problem, gap=0.01)
                rows.append(_line("", "", "solver alone, 1 %", alone, time.process_time() - started))
                started = time.process_time()
                proven = branch(problem, gap=1e-4)
                rows.append(_line("", "", "solver alone, 0.01 %", proven, time.process_time() - started))
    return table(("jobs on nodes", "reference", "by", "objective", "bound", "gap %", "CPU s"), rows)


def _line(name: str, best: object, by: str, found: Solution, seconds: float | None = None) -> Row:
    took = found.seconds if seconds is None else seconds
    gap = f"{100 * found.gap:.3f}" if by != "marginal gain alone" else ""
    bound = f"{found.bound:,.3f}" if gap else ""
    return name, best, by, f"{found.objective:,.3f}", bound, gap, f"{took:.2f}"


# -- less waiting --------------------------------------------------------------------------------------------


def paper_jobs(seed: int = 0) -> list[JobSpec]:
    """As many jobs as in the paper, over the same time and of the same mean length."""
    jobs = generate(Recipe(jobs=JOBS, seed=seed, like="modelarts", arrivals="poisson", deadlines=0.0))
    stretch = SPAN_S / max(job.submit_s for job in jobs)
    longer = MEAN_S * len(jobs) / sum(job.duration_s or 0.0 for job in jobs)
    return [replace(job, submit_s=job.submit_s * stretch, duration_s=(job.duration_s or 0.0) * longer) for job in jobs]


def queueing_table(nodes: Sequence[int], seed: int) -> str:
    """Both policies, and `greedy` as it would be if it halved until nobody waits."""
    jobs = paper_jobs(seed)
    rows = [_compare(jobs, count) for count in nodes]
    head = (
        "nodes", "queue, min: `greedy`", "`milp`", "less %", "`greedy`, halving on",
        "total, min: `greedy`", "`milp`", "`greedy`, halving on", "jobs more",
        "CPU s of a plan: mean", "median", "95 %", "most",
    )  # fmt: skip
    return table(head, rows)


def _compare(jobs: list[JobSpec], nodes: int) -> Row:
    timed = Timed()
    greedy, eager, milp = (_run(jobs, nodes, one) for one in (GreedyPolicy(), GreedyPolicy(halvings=None), timed))
    plans = np.asarray(timed.seconds)
    return (
        nodes,
        *(f"{_queue(one):.2f}" for one in (greedy, milp)),
        f"{100 * (1 - _queue(milp) / _queue(greedy)):.0f}",
        f"{_queue(eager):.2f}",
        *(f"{_total(one):.1f}" for one in (greedy, milp, eager)),
        f"{100 * _total(greedy) / _total(milp) - 100:.1f}",
        *(f"{seconds:.3f}" for seconds in (np.mean(plans), *np.quantile(plans, (0.5, 0.95, 1.0)))),
    )


class Timed:
    """`milp`, with the processor's time of every plan."""

    name, paper, admission = "milp", MilpPolicy().paper, MilpPolicy().admission

    def __init__(self) -> None:
        self.inner = MilpPolicy()
        self.seconds: list[float] = []

    def allocate(self, rows: Table) -> Shares:
        """Plan, and look at the clock."""
        started = time.process_time()
        found = self.inner.allocate(rows)
        if found.stamp is not None and len(rows):
            self.seconds.append(time.process_time() - started)
        return found

    def explain(self, rows: Table, row: int, before: int, after: int) -> str:
        """As it would."""
        return self.inner.explain(rows, row, before, after)


def _run(jobs: list[JobSpec], nodes: int, policy: Policy) -> Result:
    return simulate(jobs, cluster=Cluster.parse(f"{nodes}x1"), policy=policy, placement="count")


def _queue(result: Result) -> float:
    """Mean minutes without nodes."""
    return float(np.mean([outcome.queue_s for outcome in result.outcomes])) / 60


def _total(result: Result) -> float:
    """Mean minutes from submission to end."""
    return float(np.mean([outcome.jct_s or 0.0 for outcome in result.outcomes])) / 60


# -- less favourable worlds ----------------------------------------------------------------------------------

ALL_JOBS = 1_252
"""With those below 5 minutes; the mean over all is 84.3 minutes."""
SHORT_MEAN_S = (ALL_JOBS * 84.3 - JOBS * 232.6) / (ALL_JOBS - JOBS) * 60
"""What that leaves for the short ones: not quite two minutes."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Jobs, what is believed about them, and what a change costs."""

    jobs: list[JobSpec]
    believed: Mapping[str, float] = field(default_factory=dict)
    """Job -> estimated work over true work; 1 where it is not named."""
    overhead: OverheadModel = OVERHEADS["instant"]


class Believed(Noise):
    """Estimates as listed."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        object.__setattr__(self, "factors", factors)

    __slots__ = ("factors",)
    factors: Mapping[str, float]

    def estimate_factor(self, seed: int, job: str) -> float:
        """What the job's work is multiplied with to give what is believed."""
        return self.factors.get(job, 1.0)


class SlowGrowth(OverheadModel):
    """15 s for a start and for each enlargement (5.5); shrinking costs nothing."""

    def pause(self, *, before: int, after: int, **_: object) -> float:
        """What it costs to go from `before` to `after` devices in this round."""
        return 15.0 if after > before else 0.0


def worlds(seed: int) -> dict[str, World]:
    """The paper's sections 5.2 to 5.5."""
    jobs = paper_jobs(seed)
    draw = random.Random(f"worlds/{seed}")
    vague = {job.id: draw.uniform(0.9, 1.1) for job in jobs}
    return {
        "baseline (fig. 11)": World(jobs=jobs),
        "jobs of any length (fig. 12)": World(jobs=sorted([*jobs, *_short(draw)], key=lambda job: job.submit_s)),
        "estimates off by up to 10 % (fig. 13)": World(jobs=jobs, believed=vague),
        "also bugs and users who give up (fig. 14)": _harsh(jobs, vague, draw),
        "15 s for each start and growth (fig. 15)": World(jobs=jobs, overhead=SlowGrowth(name="slow growth")),
    }


def _short(draw: random.Random) -> list[JobSpec]:
    """The jobs below 5 minutes, evenly spread, lengths between 10 s and 300 s with the paper's mean."""
    found = []
    for i in range(ALL_JOBS - JOBS):
        size = draw.choices((1, 2, 4, 8, 16), (16, 8, 4, 2, 1))[0]
        length = 10.0 + 290.0 * draw.random() ** (290.0 / (SHORT_MEAN_S - 10.0) - 1.0)
        found.append(JobSpec(id=f"short-{i}", submit_s=draw.uniform(0, SPAN_S), gpus=size, duration_s=length))
    return found


def _harsh(jobs: list[JobSpec], vague: Mapping[str, float], draw: random.Random) -> World:
    """15 % hang within 5 minutes, 10 % are ended by their users at any time; nobody knows beforehand."""
    true: list[JobSpec] = []
    believed = {}
    for job in jobs:
        length, luck = job.duration_s or 0.0, draw.random()
        ends = length
        if luck < 0.15:
            ends = min(draw.uniform(1.0, 300.0), length)
        elif luck < 0.25:
            ends = length * draw.uniform(0.01, 1.0)
        true.append(replace(job, duration_s=ends))
        believed[job.id] = length / ends if ends < length else vague[job.id]
    return World(jobs=true, believed=believed)


def print_harder(nodes: Sequence[int], seed: int) -> None:
    """Jobs more that `milp` ends while `greedy` ends 100, by world and nodes; row by row, since it takes a while."""
    print(table(("jobs more", *(f"{count} nodes" for count in nodes)), []), flush=True)
    for name, world in worlds(seed).items():
        cells = []
        for count in nodes:
            greedy, milp = (
                simulate(
                    world.jobs,
                    cluster=Cluster.parse(f"{count}x1"),
                    policy=policy,
                    placement="count",
                    noise=Believed(world.believed),
                    overhead=world.overhead,
                )
                for policy in (GreedyPolicy(), MilpPolicy())
            )
            cells.append(f"{100 * _total(greedy) / _total(milp) - 100:.1f}")
        print("| " + " | ".join((name, *cells)) + " |", flush=True)


def main() -> None:
    """Print what was asked for."""
    what, rest = sys.argv[1:2], sys.argv[2:]
    seed = max((int(part.removeprefix("seed=")) for part in rest if part.startswith("seed=")), default=0)
    nodes = [int(part) for part in rest if not part.startswith("seed=")]
    if what in ([], ["instances"]):
        print(instance_table(), flush=True)
    if what in ([], ["queueing"]):
        print(queueing_table(nodes or NODES, seed), flush=True)
    if what in ([], ["harder"]):
        print_harder(nodes or NODES, seed)


if __name__ == "__main__":
    main()
