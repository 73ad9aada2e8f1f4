"""Slots taken away and given again every eight seconds: what it does to promises, and how many starts it costs.

    python -m benchmarks.lent_slots [POLICY]

The controller's pure turn on a cluster made of numbers (`tests/property/timed_cluster.py`), by the second: nine traces
like the live one, its speeds, four slots. Nothing is random and no clock is read; it takes about a minute.
"""

from __future__ import annotations

import statistics
import sys

from tests.property.test_lent_slots import KINDS, jobs_like_those_of_the_live_trace
from tests.property.timed_cluster import TimedCluster

from concertina.core.job import JobPhase

TRACES = range(1, 10)


def row(policy: str, launch_s: float, reclaims: int) -> str:
    starts = taken = promised = 0
    late: list[float] = []
    ends, waits = [], []
    for seed in TRACES:
        cluster = TimedCluster(KINDS, launch_s=launch_s, policy=policy)
        cluster.play(jobs_like_those_of_the_live_trace(seed), reclaims=reclaims)
        requests, states = cluster.world.requests, cluster.world.states
        done = [state for state in states.values() if state.phase is JobPhase.FINISHED]
        starts, taken, ends = starts + sum(cluster.starts.values()), taken + len(done), [*ends, cluster.now]
        waits += [(state.ended_s or 0.0) - requests[state.id].submitted_s for state in done]
        kept = [cluster.late_by(state.id) for state in done if state.promised_s is not None]
        promised, late = promised + len(kept), late + [by for by in kept if by > 0]
    figures = [f"{launch_s:.0f} s", str(reclaims), f"{starts / taken:.1f}", f"{len(late)} of {promised}"]
    figures += [
        f"{max(late, default=0.0):.0f} s",
        f"{statistics.fmean(waits):.0f} s",
        f"{statistics.fmean(ends):.0f} s",
    ]
    return f"| {' | '.join(figures)} |"


def main(policy: str = "concertina") -> None:
    print("| a start takes | reclaims | starts per job | promises late | worst | mean JCT | makespan |")
    print("|---|---|---|---|---|---|---|")
    for launch_s in (10.0, 18.0):
        for reclaims in (0, 20, 60):
            print(row(policy, launch_s, reclaims), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
