"""The way into the simulator: jobs, a cluster and a policy in, a `Result` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import ThroughputTable
from concertina.simulator.metrics import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What to keep besides outcomes and summary. All of it costs memory on long traces."""

    spans: bool = False
    load: bool = False
    decisions: bool = False


def simulate(
    jobs: Sequence[JobSpec],
    *,
    cluster: Cluster,
    policy: str = "fifo",
    throughput: ThroughputTable | None = None,
    overhead: str | float = "instant",
    seed: int = 0,
    trace: str = "trace",
    record: Record | None = None,
) -> Result:
    """Run `jobs` on `cluster` under `policy` and say how they fared."""
    raise NotImplementedError
