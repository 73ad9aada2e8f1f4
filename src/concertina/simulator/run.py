"""The way into the simulator: jobs, a cluster and a policy in, a `Result` out."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.policies.admission import on_terms, terms_of
from concertina.policies.base import Policy
from concertina.policies.hybrid_curves import curves_for
from concertina.policies.registry import policy_named
from concertina.policies.scaling_curve import ThroughputTable
from concertina.simulator.engine import Setting, Simulation
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Fault, Noise
from concertina.simulator.overhead import LARGE_CLUSTER, OverheadModel, overhead_named
from concertina.simulator.recorder import Record


def simulate(
    jobs: Sequence[JobSpec],
    *,
    cluster: Cluster,
    policy: str | Policy = "fifo",
    throughput: ThroughputTable | None = None,
    overhead: str | float | OverheadModel = "instant",
    noise: Noise | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    gap_s: float = 0.0,
    tick_s: float = 0.0,
    placement: str = "best-fit",
    trace: str = "trace",
    record: Record | None = None,
) -> Result:
    """Run `jobs` on `cluster` under `policy` and say how they fared.

    `placement` is `best-fit` (compact where possible, spread where not), `buddy` (others move aside so
    that jobs are compact) or `count` (no places, only numbers: fastest). `gap_s` is the least time
    between two rounds.
    """
    model = overhead_named(overhead)
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    setting = Setting(
        cluster=cluster,
        policy=_priced(chosen, model, cluster),
        curves=curves_for(getattr(chosen, "scaling", "strong"), throughput),
        overhead=model,
        noise=noise or Noise(),
        faults=faults,
        seed=seed,
        gap_s=gap_s,
        tick_s=tick_s,
        placement=placement,
        record=record or Record(),
    )
    with _without_collector():
        return Simulation(jobs, setting).run(time.perf_counter, trace)


def _priced(policy: Policy, model: OverheadModel, cluster: Cluster) -> Policy:
    """The policy with promises that count what a change costs here, where that is more than they expect."""
    terms = terms_of(policy)
    if terms is None:
        return policy
    large = model.large_s if cluster.slots >= LARGE_CLUSTER else 0.0
    flat = max(model.rescale_s + model.grow_s, model.resume_s, model.launch_s) + model.per_doubling_s + large
    return on_terms(policy, cost=terms.cost.at_least(flat, model.per_doubling_s))


@contextmanager
def _without_collector() -> Iterator[None]:
    """A simulation makes no cycles, and walking over a hundred thousand jobs to find none takes a while."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
