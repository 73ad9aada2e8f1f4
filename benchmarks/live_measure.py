"""How fast the scripts of the live trace are on 1, 2 and 4 workers, and what starting costs, on a live cluster.

The curves are then given to the cluster that runs the trace, so that it and the simulator decide with the same figures.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.live_checks import Watcher, read_events, wait_until
from benchmarks.live_cluster import ask, cluster, free_port
from benchmarks.live_jobs import EXAMPLES, request_of, steps_of
from benchmarks.live_replay import Costs
from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.curves import kind_of
from concertina.cluster.records import Curve, JobRequest
from concertina.core.job import JobSpec
from concertina.store.address import open_store

STEP_SECONDS = 180.0
LONG = 400  # epochs: it is cancelled long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    speeds: dict[str, dict[int, float]]
    """Script -> workers -> steps/s."""
    costs: Costs


def measure(folder: Path, scripts: list[str], slots: int, pace_s: float) -> Measured:
    """Each script once, alone: started on the slots that it is given, then pinned to other counts."""
    speeds, launches, grows = {}, [], []
    state = folder / "state"
    with ExitStack() as stack:
        up = stack.enter_context(cluster(state, free_port(), "--slots", str(slots)))
        store = open_store(f"sqlite:{state / 'cluster.db'}")
        stack.callback(store.close)
        watcher = Watcher(store)
        watcher.start()
        stack.callback(watcher.close)
        for script in scripts:
            found = _walk(up.url, watcher, script, slots, folder, pace_s)
            speeds[script] = found
            job = watcher.mirror.jobs()[-1]
            launches.append(_launch_s(state, job))
            grows += _grows_s(state, job)
    return Measured(speeds=speeds, costs=Costs(launch_s=statistics.median(launches), grow_s=statistics.median(grows)))


def _walk(url: str, watcher: Watcher, script: str, slots: int, folder: Path, pace_s: float) -> dict[int, float]:
    spec = JobSpec(id=f"measure-{script}", submit_s=0.0, gpus=slots, model=f"{script}:{LONG}", work=1.0)
    folder.mkdir(parents=True, exist_ok=True)
    job = ask(url, "POST", "/jobs", request_of(spec, pace_s, folder, 0.0))

    def seen() -> Any:
        found = watcher.mirror.job(job["id"])
        return found.seen if found else None

    def settled(count: int) -> bool:
        now = seen()
        return now is not None and now.workers == count and count in now.speeds

    wait_until(lambda: ask(url, "GET", f"/jobs/{job['id']}")["phase"] == "running", STEP_SECONDS, 0.3)
    for count in (slots, 2, 1):
        ask(url, "POST", f"/jobs/{job['id']}/resize", {"workers": count})
        wait_until(lambda count=count: settled(count), STEP_SECONDS, 0.2)
        time.sleep(40 * pace_s)  # a speed is an average of the last steps: let it settle
    found = dict(seen().speeds)
    ask(url, "DELETE", f"/jobs/{job['id']}")
    wait_until(lambda: not any(j.state.slots or j.keeper for j in watcher.mirror.jobs()), 60.0)
    return {count: found[count] for count in sorted(found)}


def _launch_s(state: Path, job: Any) -> float:
    """From the grant until it trains. (The first step is told of when the second one is complete.)"""
    trains = next(e["time"] for e in read_events(state, job.id) if e["event"] == "training")
    return float(trains - job.state.first_start_s)


def _grows_s(state: Path, job: Any) -> list[float]:
    """From each grant of more slots to the generation that has them."""
    formed = [(e["time"], e["workers"]) for e in read_events(state, job.id) if e["event"] == "generation_started"]
    found, before = [], 0
    for change in job.state.history:
        if before and change.workers > before:
            found += [at - change.at_s for at, workers in formed if workers >= change.workers and at > change.at_s][:1]
        before = change.workers
    return found


def give_curves(store: str, jobs: list[JobSpec], measured: Measured, pace_s: float) -> None:
    """Before the cluster starts: it knows every kind of the trace."""
    script = (EXAMPLES / "live_paced.py").read_bytes()
    Path(store.partition(":")[2]).parent.mkdir(parents=True, exist_ok=True)
    with open_store(store) as opened:
        for kind in {str(job.model) for job in jobs}:
            body = request_of(JobSpec(id="x", submit_s=0.0, gpus=1, model=kind, work=1.0), pace_s, Path("/"), 0.0)
            args = body["args"]
            assert isinstance(args, list)
            request = JobRequest(
                id="x",
                name="x",
                user="x",
                script=str(body["script"]),
                args=tuple(args),
                virtual=int(str(body["virtual"])),
            )
            curve = Curve(
                key=kind_of(request, script),
                speeds=measured.speeds[kind.split(":")[0]],
                source="given",
                total_steps=steps_of(kind),
            )
            opened.put(keys.CURVES + curve.key, dump(curve))
