"""Twenty real jobs on a live cluster of four slots, from one trace file, and the simulator on the same file.

    python -m benchmarks.live_trace                          live against simulated: makespan and mean JCT
    python -m benchmarks.live_trace --kill-controller 50     the server killed that many times during the run
    python -m benchmarks.live_trace --reclaim 20             half of the slots taken back that many times
    python -m benchmarks.live_trace --etcd                   two controllers on a real etcd, the leader killed
    python -m benchmarks.live_trace --table FILE...          tables and picture from what these wrote with --json

Each batch waits as it would for a GPU (examples/live_paced.py), so that two cores are not the bottleneck. In every
run: no job lost, none run twice, no slot used by two jobs, no promised deadline missed, and the model of every
finished job compared bit by bit with its DDP twin. Ends with an error if one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import live_replay, live_table
from benchmarks.live_bits import different_tensors, twin
from benchmarks.live_checks import Watcher, check_events, check_jobs, processes_left, read_events, wait_until
from benchmarks.live_cluster import Up, all_jobs, ask, cluster, free_port, wait_for_server
from benchmarks.live_jobs import make_trace, request_of, steps_of
from benchmarks.live_measure import give_curves, measure
from concertina.core.job import JobSpec
from concertina.simulator.readers import read_trace, write_trace
from concertina.store.address import open_store

TRACE = Path(__file__).with_name("live_trace.csv")
PACE_S = 0.2
RUN_SECONDS, RECLAIM_SECONDS = 1500.0, 3.0
OVER = ("finished", "rejected", "cancelled", "failed")


@dataclass
class Outcome:
    """Everything that is reported."""

    jobs: int
    slots: int
    seconds: float = 0.0
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # before the run
    kills: int = 0
    reclaims_s: list[float] = field(default_factory=list)
    takeovers_s: list[float] = field(default_factory=list)
    attempts: int = 0
    compared: int = 0
    different: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # promised, before slots were taken away
    problems: list[str] = field(default_factory=list)
    changes_watched: int = 0
    speeds: dict[str, dict[int, float]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)


class Trial:
    """One run of the trace on a live cluster."""

    def __init__(self, jobs: list[JobSpec], folder: Path, slots: int, store: str) -> None:
        self.jobs, self.folder, self.slots = jobs, folder, slots
        self.state = folder / "state"
        self.store = store or f"sqlite:{self.state / 'cluster.db'}"
        self.outcome = Outcome(jobs=len(jobs), slots=slots)
        self.began_s = 0.0
        self.over = threading.Event()

    def folder_of(self, job: JobSpec) -> Path:
        folder = self.folder / "jobs" / job.id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, url: str, url_of: Any = None) -> list[dict[str, Any]]:
        """Submits every job at its time and waits until all have ended."""
        self.began_s = time.time()
        where = url_of or (lambda: url)
        for job in self.jobs:
            time.sleep(max(0.0, self.began_s + job.submit_s - time.time()))
            ask(where(), "POST", "/jobs", request_of(job, PACE_S, self.folder_of(job), self.began_s))
        names = {job.id for job in self.jobs}
        ends = time.monotonic() + RUN_SECONDS
        while time.monotonic() < ends:
            found = [job for job in all_jobs(where()) if job["name"] in names]
            if len(found) >= len(names) and all(job["phase"] in OVER for job in found):
                break
            time.sleep(1.0)
        self.over.set()
        self.outcome.seconds = time.time() - self.began_s
        return found

    # -- after the run -----------------------------------------------------------------------------------------------

    def judge(self, found: list[dict[str, Any]], watcher: Watcher, args: argparse.Namespace) -> None:
        out = self.outcome
        found_wrong = check_jobs(found, {job.id: steps_of(str(job.model)) for job in self.jobs})
        if args.reclaim:  # a promise counts with the slots there were when it was given
            out.late = [problem for problem in found_wrong if "missed its deadline" in problem]
        out.problems += [problem for problem in found_wrong if problem not in out.late]
        ended = [job for job in found if job["phase"] == "finished"]
        for job in ended:
            out.problems += check_events(self.state, job["id"])
            out.attempts += sum(e["event"] == "keeper_started" for e in read_events(self.state, job["id"]))
        out.problems += watcher.problems
        out.changes_watched = watcher.changes
        if not args.no_bits:
            self._compare_bits(ended, Path(args.twins or self.folder / "twins"))

    def _compare_bits(self, ended: list[dict[str, Any]], twins: Path) -> None:
        kinds = {job.id: str(job.model) for job in self.jobs}
        for job in ended:
            ours = self.folder / "jobs" / job["name"] / "model.pt"
            names = different_tensors(ours, twin(kinds[job["name"]], twins)) if ours.exists() else ["-"]
            self.outcome.compared += 1
            if names:
                self.outcome.different.append(f"{job['id']}: {', '.join(names)}")


# -- disturbances -------------------------------------------------------------------------------------------------


def kill_servers(up: Up, times: int, trial: Trial, seed: int) -> None:
    """SIGKILL to the server, in office or while it starts, at random moments; and another at once."""
    chance = random.Random(seed)
    while trial.outcome.kills < times and not trial.over.wait(chance.uniform(0.5, 4.0)):
        up.kill()
        trial.outcome.kills += 1
        up.start()
        if chance.random() < 0.6:
            wait_for_server(up.state, up.url)
    wait_for_server(up.state, up.url)
    if trial.outcome.kills < times:
        trial.outcome.problems.append(f"the jobs ended after {trial.outcome.kills} of {times} kills")


def reclaim_slots(url: str, times: int, trial: Trial, watcher: Watcher) -> None:
    """Half of the slots taken back for a while; how long until nothing runs there."""
    half = trial.slots // 2
    while len(trial.outcome.reclaims_s) < times and not trial.over.wait(4.0):
        if sum(len(job.seen.slots) for job in watcher.mirror.jobs() if job.seen is not None) < trial.slots:
            continue  # under load only
        began = time.monotonic()
        ask(url, "POST", "/cluster/reclaim", {"slots": half, "return": False})
        wait_until(lambda: len(_lent(watcher)) >= half, 30.0, 0.01)
        lent = _lent(watcher)
        wait_until(lambda lent=lent: not watcher.busy_since_reclaim(lent), 60.0, 0.02)
        trial.outcome.reclaims_s.append(time.monotonic() - began)
        trial.over.wait(2.0)
        ask(url, "POST", "/cluster/reclaim", {"slots": 0, "return": True})
    if len(trial.outcome.reclaims_s) < times:
        trial.outcome.problems.append(f"only {len(trial.outcome.reclaims_s)} of {times} reclaims found a full cluster")


def _lent(watcher: Watcher) -> set[str]:
    return {f"{node.id}/{index}" for node in watcher.mirror.nodes() for index in node.lent}


# -- the command --------------------------------------------------------------------------------------------------


def main() -> int:
    args = _arguments()
    if args.table:
        live_table.write(args.table)
        return 0
    jobs = _jobs(args)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="concertina-live-"))
    if args.etcd:
        from benchmarks.live_etcd import run_with_standby

        outcome = run_with_standby(jobs, folder, args)
    else:
        outcome = _run(jobs, folder, args)
    _report(outcome)
    if args.json:
        args.json.write_text(json.dumps(asdict(outcome), indent=1))
    bad = outcome.problems or outcome.different or any(s > RECLAIM_SECONDS for s in outcome.reclaims_s)
    return 1 if bad else 0


def _run(jobs: list[JobSpec], folder: Path, args: argparse.Namespace) -> Outcome:
    trial = Trial(jobs, folder, args.slots, "")
    disturbed = bool(args.kill_controller or args.reclaim)
    if not disturbed:
        scripts = sorted({str(job.model).split(":")[0] for job in jobs})
        measured = measure(folder / "measuring", scripts, args.slots, PACE_S)
        trial.outcome.speeds, trial.outcome.costs = measured.speeds, asdict(measured.costs)
        give_curves(trial.store, jobs, measured, PACE_S)
    with ExitStack() as stack:
        up = stack.enter_context(cluster(trial.state, args.port or free_port(), "--slots", str(args.slots)))
        watcher = _watch(trial, stack)
        threads = []
        if args.kill_controller:
            threads.append(threading.Thread(target=kill_servers, args=(up, args.kill_controller, trial, args.seed)))
        if args.reclaim:
            threads.append(threading.Thread(target=reclaim_slots, args=(up.url, args.reclaim, trial, watcher)))
        for thread in threads:
            thread.start()
        found = trial.run(up.url)
        for thread in threads:
            thread.join(timeout=120.0)
        trial.judge(found, watcher, args)
    if left := processes_left(trial.state):
        trial.outcome.problems.append(f"processes left behind: {left}")
    if not disturbed:
        _compare(trial, found, args.policy, watcher)
    return trial.outcome


def _watch(trial: Trial, stack: ExitStack) -> Watcher:
    store = open_store(trial.store)
    stack.callback(store.close)
    watcher = Watcher(store)
    watcher.start()
    stack.callback(watcher.close)
    return watcher


def _compare(trial: Trial, found: list[dict[str, Any]], policy: str, watcher: Watcher) -> None:
    out = trial.outcome
    ours = live_replay.live(found, trial.began_s, watcher.held)
    costs = live_replay.Costs(**out.costs)
    speeds = {str(job.model): out.speeds[str(job.model).split(":")[0]] for job in trial.jobs}
    theirs = live_replay.simulated(live_replay.replay(trial.jobs, trial.slots, speeds, costs, policy))
    out.live, out.simulated = asdict(ours), asdict(theirs)


def _jobs(args: argparse.Namespace) -> list[JobSpec]:
    if args.make_trace:
        TRACE.write_text(write_trace(make_trace(args.seed, 20, PACE_S)))
    return list(read_trace(str(TRACE)).jobs)[: args.jobs]


def _report(out: Outcome) -> None:
    print(f"{out.jobs} jobs on {out.slots} slots in {out.seconds:.0f} s, {out.attempts} starts of keepers")
    print(
        f"{out.compared} models compared with DDP, {len(out.different)} differ; {out.changes_watched} changes watched"
    )
    if out.kills:
        print(f"server killed {out.kills} times")
    for name, times in (("reclaims", out.reclaims_s), ("take-overs", out.takeovers_s)):
        if times:
            print(f"{len(times)} {name}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
    for what, key in (("makespan", "makespan_s"), ("mean JCT", "mean_jct_s")):
        if out.live:
            a, b = out.live[key], out.simulated[key]
            print(f"{what}: live {a:.1f} s, simulated {b:.1f} s, difference {live_replay.differs(a, b):+.1%}")
    if out.live:
        print(f"refused: live {out.live['refused']}, simulated {out.simulated['refused']}")
    for sentence in out.late:
        print(f"after slots were taken away, {sentence}")
    for problem in out.problems + out.different:
        print(f"PROBLEM {problem}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, help="only the first so many of the trace")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--policy", default="concertina")
    parser.add_argument("--kill-controller", type=int, default=0, metavar="N")
    parser.add_argument("--reclaim", type=int, default=0, metavar="N")
    parser.add_argument("--etcd", action="store_true")
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--twins", default="", help="folder with models of DDP twins that were made before")
    parser.add_argument("--make-trace", action="store_true", help="write benchmarks/live_trace.csv anew")
    parser.add_argument("--folder", default="", help="for state and models; default: a new one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: what was found in such runs, into docs/results",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
