"""The figures of docs/results/questions.md: are the answers right, and how long do they take?

    python -m benchmarks.questions replay [NAME ...]     eta and quote against what then happened
    python -m benchmarks.questions replay NAME count=10  the same with fewer questions
    python -m benchmarks.questions large [POLICY ...]    quote on 500 running and 2,000 waiting jobs
    python -m benchmarks.questions rounds [POLICY ...]   what few rounds do to such an answer

A replay simulates a shared trace with step times that vary by 10 %, stops at random submissions, asks, and
compares with the end of the same simulation. The answers know nothing of what comes later: newcomers are drawn
from the day before, luck from another seed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.traces import TRACES
from concertina.core.cluster import Snapshot
from concertina.core.job import JobPhase, JobSpec, JobView
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import Curves
from concertina.questions import Basis, eta, quote
from concertina.questions.ask import RUNS_AT_LEAST, world_of
from concertina.simulator.engine import Setting, Simulation
from concertina.simulator.metrics import JobOutcome
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import overhead_named
from concertina.simulator.recorder import Record
from concertina.simulator.scenario import Scenario, load_scenario

CASES = {
    "195job": ("elasticflow-itp/195job", "16x8:A100", "elasticflow"),
    "philly_103959": ("elasticflow/philly_103959", "32x8:A100", "elasticflow"),
    "cluster10": ("elasticflow-itp/cluster10", "32x8:A100", "elasticflow"),
    "elasticVpollux_e": ("elasticflow/elasticVpollux_e", "16x4:T4", "elasticflow"),
    "cluster06": ("elasticflow-itp/cluster06", "64x8:A100", "elasticflow"),
    "cluster01": ("elasticflow-itp/cluster01", "64x8:A100", "elasticflow"),
    "195job-own": ("elasticflow-itp/195job", "16x8:A100", "concertina"),
    "cluster10-own": ("elasticflow-itp/cluster10", "32x8:A100", "concertina"),
    "195job-fifo": ("elasticflow-itp/195job", "16x8:A100", "fifo"),
    "195job-tiresias": ("elasticflow-itp/195job", "16x8:A100", "tiresias"),
    "cluster06-fifo": ("elasticflow-itp/cluster06", "12x8:A100", "fifo"),
    "cluster06-tiresias": ("elasticflow-itp/cluster06", "12x8:A100", "tiresias"),
    "cluster06-srtf": ("elasticflow-itp/cluster06", "12x8:A100", "srtf"),
}
"""Name -> trace, cluster, policy. The last ones are on fewer devices than the trace had, so that jobs wait."""
OVERHEAD = overhead_named("elasticflow")
NOISE = Noise(step_time=0.1)
TRUTH_SEED = 4711


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was known when a job was submitted."""

    snapshot: Snapshot
    newcomer: JobSpec
    past: tuple[JobSpec, ...]


class Watched(Simulation):
    """A simulation that keeps what the cluster looked like at some submissions."""

    def __init__(self, jobs: Sequence[JobSpec], setting: Setting, when: set[str]) -> None:
        super().__init__(jobs, setting)
        self.when = when
        self.moments: list[Moment] = []

    def _arrive(self, spec: JobSpec) -> None:
        if spec.id in self.when:
            past = tuple(job for job in self.jobs if job.submit_s < self.table.now)
            self.moments.append(Moment(snapshot=self.cluster.observe(), newcomer=spec, past=past))
        super()._arrive(spec)


def watch(scenario: Scenario, policy: str, count: int, seed: int) -> tuple[list[Moment], dict[str, JobOutcome]]:
    """Simulate the whole trace; the moments, and how every job fared."""
    setting = Setting(
        cluster=scenario.cluster,
        policy=policy_named(policy),
        curves=Curves(scenario.throughput),
        overhead=OVERHEAD,
        noise=NOISE,
        seed=TRUTH_SEED,
        record=Record(),
    )
    ids = [job.id for job in scenario.jobs[len(scenario.jobs) // 10 :]]
    chosen = set(random.Random(seed).sample(ids, min(count, len(ids))))
    simulation = Watched(scenario.jobs, setting, chosen)
    result = simulation.run(lambda: 0.0, scenario.name)
    return simulation.moments, {outcome.job_id: outcome for outcome in result.outcomes}


class Score:
    """How far answers were from what happened, in parts of the time that was left."""

    def __init__(self) -> None:
        self.wrong: list[float] = []
        self.within: list[bool] = []

    def add(self, low: float, expected: float, high: float, actual: float, now: float) -> None:
        """One answer."""
        self.wrong.append(abs(expected - actual) / max(actual - now, 1.0))
        self.within.append(low - 1.0 <= actual <= high + 1.0)

    def cells(self) -> list[str]:
        """Answers, median and 90th percentile of the error, share of the bands that held."""
        if not self.wrong:
            return ["0", "-", "-", "-"]
        middle, most = (100 * np.quantile(self.wrong, part) for part in (0.5, 0.9))
        return [str(len(self.wrong)), f"{middle:.0f}", f"{most:.0f}", f"{100 * np.mean(self.within):.0f}"]


def replay(name: str, count: int, seed: int = 0) -> str:
    """Ask at random submissions: quote for the newcomer, eta for a job that is there."""
    file, cluster, policy = CASES[name]
    scenario = load_scenario(str(TRACES / f"{file}.csv.gz"), cluster=cluster)
    moments, outcomes = watch(scenario, policy, count, seed)
    draw = random.Random(seed)
    quotes, etas, alone = Score(), Score(), Score()
    agreed, took = [], []
    for moment in moments:
        now = moment.snapshot.now
        basis = Basis(
            policy=policy_named(policy),
            curves=Curves(scenario.throughput),
            overhead=OVERHEAD,
            noise=NOISE,
            past=moment.past,
        )
        begun = time.process_time()
        answer = quote(moment.snapshot, moment.newcomer, basis)
        took.append(time.process_time() - begun)
        actual = outcomes[moment.newcomer.id]
        agreed.append(answer.taken == (actual.phase is not JobPhase.REJECTED))
        if answer.taken and answer.end is not None and actual.end_s is not None:
            quotes.add(answer.end.low_s, answer.end.expected_s, answer.end.high_s, actual.end_s, now)
        if not moment.snapshot.jobs:
            continue
        there = draw.choice(moment.snapshot.jobs).spec.id
        ends = outcomes[there].end_s
        if ends is not None:
            end = eta(moment.snapshot, there, basis).end
            etas.add(end.low_s, end.expected_s, end.high_s, ends, now)
            end = eta(moment.snapshot, there, replace(basis, past=(), noise=Noise())).end
            alone.add(end.low_s, end.expected_s, end.high_s, ends, now)
    active = np.mean([len(moment.snapshot.jobs) for moment in moments])
    cells = [name, cluster, policy, f"{active:.0f}", *quotes.cells(), f"{100 * np.mean(agreed):.0f}"]
    cells += [*etas.cells(), alone.cells()[1], f"{np.median(took):.2f}", f"{max(took):.2f}"]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "trace", "cluster", "policy", "jobs there",
    "quotes", "error %, median", "90 %", "in the band %", "taken or refused rightly %",
    "etas", "error %, median", "90 %", "in the band %", "median without newcomers and noise",
    "CPU s of a quote, median", "most",
)  # fmt: skip


# -- many jobs -----------------------------------------------------------------------------------------------


def crowd(running: int, waiting: int, promised: float, seed: int = 0) -> tuple[Snapshot, JobSpec, Curves]:
    """Jobs of cluster04 on 128x8: some run on one or two devices, most wait, a part has a (generous) deadline."""
    scenario = load_scenario(str(TRACES / "elasticflow-itp/cluster04.csv.gz"), cluster="128x8:A100")
    curves, draw = Curves(scenario.throughput), random.Random(seed)
    jobs = draw.sample(scenario.jobs, running + waiting + 1)
    now, nodes = 10.0 * (running + waiting), scenario.cluster.nodes
    free = [node.slots for node in nodes]
    views = []
    for place, job in enumerate(jobs[:-1]):
        wait = ((job.deadline_s or 0.0) - job.submit_s) * draw.uniform(10, 40)
        deadline = now + wait if draw.random() < promised else None
        spec = replace(job, submit_s=10.0 * place, deadline_s=deadline)
        if place >= running:
            views.append(JobView(spec=spec, phase=JobPhase.WAITING, waiting_since_s=spec.submit_s))
            continue
        count = min(job.gpus, 2)
        where = next(i for i, room in enumerate(free) if room >= count)
        free[where] -= count
        views.append(
            JobView(
                spec=spec,
                phase=JobPhase.RUNNING,
                workers=(("A100", count),),
                placement=((nodes[where].id, count),),
                work_done=curves.of(spec)[1] * draw.random() * 0.9,
                executed_s=500.0,
                service_s=500.0 * count,
                first_start_s=spec.submit_s,
            )
        )
    return Snapshot(now=now, cluster=scenario.cluster, jobs=tuple(views)), replace(jobs[-1], id="new"), curves


def large(policy: str, promised: float) -> str:
    """One quote on 500 running and 2,000 waiting jobs: no deadline; an hour; an hour, all jobs submitted just now."""
    snapshot, spec, curves = crowd(500, 2_000, promised)
    basis = Basis(policy=policy_named(policy), curves=curves, overhead=OVERHEAD, noise=NOISE, past=past_of(snapshot))
    loose, strict = (replace(spec, deadline_s=deadline) for deadline in (None, snapshot.now + 3_600.0))
    cells = []
    for there, asked in ((snapshot, loose), (snapshot, strict), (just_now(snapshot), strict)):
        wall, spent = time.perf_counter(), time.process_time()
        answer = quote(there, asked, basis)
        cells += [f"{time.process_time() - spent:.2f}", f"{time.perf_counter() - wall:.2f}", str(answer.runs)]
    return f"| {policy} | {100 * promised:.0f} | " + " | ".join(cells) + " |"


def just_now(snapshot: Snapshot) -> Snapshot:
    """The same, where nobody has waited yet: so nobody is behind its fair share and stands against a promise."""
    now = snapshot.now
    jobs = [
        replace(view, spec=replace(view.spec, submit_s=now), waiting_since_s=None if view.workers else now)
        for view in snapshot.jobs
    ]
    return replace(snapshot, jobs=tuple(jobs))


def past_of(snapshot: Snapshot) -> tuple[JobSpec, ...]:
    """As if the jobs had come over the last day."""
    step = 86_400.0 / len(snapshot.jobs)
    begin = snapshot.now - 86_400.0
    specs = [replace(view.spec, deadline_s=None) for view in snapshot.jobs]
    return tuple(replace(spec, submit_s=max(begin + step * i, 0.0)) for i, spec in enumerate(specs))


def rounds(policy: str, promised: float, running: int, waiting: int) -> str:
    """Ends from the few rounds that a quote can afford against ends from a round at every event."""
    snapshot, _, curves = crowd(running, waiting, promised)
    basis = Basis(policy=policy_named(policy), curves=curves, overhead=OVERHEAD, noise=Noise())
    few = world_of(snapshot, basis, basis.budget_ms / RUNS_AT_LEAST)
    every = replace(few, pace=None)
    begun = time.process_time()
    right = every.run(draw=None, until=())
    exact_s = time.process_time() - begun
    begun = time.process_time()
    about = few.run(draw=None, until=())
    few_s = time.process_time() - begun
    wrong = [abs(about.ends[name] - end) / (end - snapshot.now) for name, end in right.ends.items()]
    held = "all" if few.pace is None else str(few.pace.rounds)
    middle, most = (f"{100 * np.quantile(wrong, part):.0f}" for part in (0.5, 0.9))
    return f"| {policy} | {running} + {waiting} | {held} | {few_s:.2f} | {exact_s:.2f} | {middle} | {most} |"


def main(arguments: Sequence[str]) -> None:
    """Run what was asked for."""
    what, rest = arguments[0], arguments[1:]
    count = max((int(part.removeprefix("count=")) for part in rest if part.startswith("count=")), default=60)
    names = [part for part in rest if not part.startswith("count=")]
    if what == "replay":
        for line in (HEAD, ["---"] * len(HEAD)):
            print("| " + " | ".join(line) + " |")
        for name in names or CASES:
            print(replay(name, count), flush=True)
    elif what == "large":
        for policy in names or ("concertina", "elasticflow", "fifo", "tiresias", "srtf", "optimus"):
            for promised in (0.3, 1.0):
                print(large(policy, promised), flush=True)
    elif what == "rounds":
        for policy in names or ("fifo", "srtf", "edf", "tiresias", "optimus", "elasticflow", "concertina"):
            print(rounds(policy, 0.3, 200, 1_000), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
