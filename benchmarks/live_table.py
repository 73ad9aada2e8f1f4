"""What `benchmarks.live_trace --json FILE` wrote, as tables and a picture in docs/results/sim-to-live.md."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.live_replay import differs
from benchmarks.pages import REMINDER, RESULTS, put

PAGE = RESULTS / "sim-to-live.md"
MARK, FIRE_MARK = "live against simulated", "under fire"
UNDER_FIRE = (
    "What was done",
    "Jobs",
    "In",
    "Models equal to DDP's",
    "Seconds until it was so, median / longest",
    "Jobs lost, run twice or late; slots shared",
    "Load before",
)
GOALS = {"makespan_s": "5 %", "mean_jct_s": "10 %"}


def tables(found: Mapping[str, Any]) -> str:
    return "\n".join([*_totals(found), "", _measured(found), "", *_jobs(found["live"], found["simulated"])])


def _totals(found: Mapping[str, Any]) -> list[str]:
    live, simulated = found["live"], found["simulated"]
    names = {"makespan_s": "makespan", "mean_jct_s": f"mean JCT of the {len(live['jct_s'])} that finished"}
    out = ["| | Live | Simulated | Difference | Goal |", "|---|---|---|---|---|"]
    for key, name in names.items():
        both = f"{live[key]:.1f} s | {simulated[key]:.1f} s"
        out.append(f"| {name} | {both} | {100 * differs(live[key], simulated[key]):+.1f} % | {GOALS[key]} |")
    for key, name in (("refused", "refused"), ("missed", "deadlines missed of jobs that were taken")):
        ours, theirs = (", ".join(f"`{job}`" for job in side[key]) or "none" for side in (live, simulated))
        out.append(f"| {name} | {ours} | {'the same' if ours == theirs else theirs} | | |")
    different = f"{len(found['different'])} of {found['compared']}"
    return [*out, f"| models that differ from DDP's | {different} | | | 0 |"]


def _measured(found: Mapping[str, Any]) -> str:
    speeds = "; ".join(
        f"`{script}` " + ", ".join(f"{speed:.2f} on {workers}" for workers, speed in curve.items())
        for script, curve in found["speeds"].items()
    )
    costs = found["costs"]
    return (
        f"Measured before the run: {costs['launch_s']:.1f} s from the grant of slots until a job trains, "
        f"{costs['grow_s']:.1f} s from the\ngrant of further slots until it trains on them, too; steps/s by workers: "
        f"{speeds}. Load of the machine before: {found['load']:.1f}."
    )


def _jobs(live: Mapping[str, Any], simulated: Mapping[str, Any]) -> list[str]:
    names = sorted({*live["jct_s"], *simulated["jct_s"]}, key=lambda name: name.rpartition("-")[2])
    out = [
        "Completion time of each job (JCT) in seconds, and the slots granted to it, from which second on:",
        "",
        "| Job | Live | Simulated | Slots, live | Slots, simulated |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        jct = " | ".join(f"{side['jct_s'][name]:.0f}" if name in side["jct_s"] else "-" for side in (live, simulated))
        slots = " | ".join(_steps(side["slots"].get(name, ())) for side in (live, simulated))
        out.append(f"| {name} | {jct} | {slots} |")
    return out


def _steps(steps: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{slots} from {at:.0f}" for at, slots in steps)


def under_fire(results: Sequence[Mapping[str, Any]]) -> str:
    out = [f"| {' | '.join(UNDER_FIRE)} |", "|---" * len(UNDER_FIRE) + "|"]
    for found in results:
        times = [*found["reclaims_s"], *found["takeovers_s"]]
        spread = f"{statistics.median(times):.2f} / {max(times):.2f}" if times else "-"
        equal = f"{found['compared'] - len(found['different'])} of {found['compared']}"
        wrong = [*found["problems"], *found["late"]]
        row = (_done_to(found), found["jobs"], f"{found['seconds']:.0f} s", equal, spread, "; ".join(wrong) or "none")
        out.append(f"| {' | '.join(map(str, row))} | {found['load']:.1f} |")
    return "\n".join(out)


def _done_to(found: Mapping[str, Any]) -> str:
    if found["takeovers_s"]:
        return f"two servers on etcd, the leader killed {found['kills']} times: another in office"
    if found["reclaims_s"]:
        return (
            f"half of the slots reclaimed {len(found['reclaims_s'])} times while all were busy: no process left on them"
        )
    return f"the server killed {found['kills']} times"


def write(paths: Sequence[Path]) -> None:
    """Runs under fire compare nothing; they have a table of their own."""
    results = [json.loads(path.read_text()) for path in paths]
    for found in results:
        if found["live"]:
            put(PAGE, MARK, tables(found))
            pictures.draw("sim-to-live")
    if fire := [found for found in results if not found["live"]]:
        put(PAGE, FIRE_MARK, under_fire(fire))
    print(f"in {PAGE}; {REMINDER}")
