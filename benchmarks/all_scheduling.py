"""All scheduling benchmarks at once, in parallel processes, on a machine that has nothing else to do.

    python -m benchmarks.all_scheduling OUT speeds             what is timed, on a few cores only (first)
    python -m benchmarks.all_scheduling OUT rest               promises, our own policy, milp; a process on each core
    python -m benchmarks.all_scheduling OUT more               mixes with every policy, replays and other long ones
    python -m benchmarks.all_scheduling OUT PART ...           only these parts (see `--list`)
    python -m benchmarks.all_scheduling OUT --tables           the tables of docs/results from what is in OUT

Each task writes OUT/<task>.json when it is done. What is there already is not run again, so a call that was cut off
(`--for`, seconds) is simply repeated. Traces: `--traces FOLDER` or CONCERTINA_TRACES, else ../shared/traces.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ITP = ("195job", "philly_103959", "cluster10", "elasticVpollux_e", "cluster06", "cluster01", "cluster05", "cluster02",
       "cluster08", "cluster07", "cluster04")  # fmt: skip
"""The traces with deadlines of their own, the quickest first."""
VCS = ("e13805", "2869ce", "7f04ca", "ed69ec", "0e4a51", "103959", "6214e9", "11cb48", "b436b2", "6c71a0", "ee9e8c")
OTHERS = ("elasticflow", "elastic-tiresias", "optimus", "srtf", "greedy", "milp")
"""The policies that a mix is compared with: those that were ever the best, and elasticflow."""
REPLAYS = ("195job", "cluster10", "philly_103959", "elasticVpollux_e", "195job-own", "cluster10-own", "195job-fifo",
           "195job-tiresias", "cluster06-fifo", "cluster06-tiresias", "cluster06-srtf")  # fmt: skip
MORE = ("mix", "vc-mix", "harder", "replay", "easyscale", "chronus")
SPEEDS = ("speed", "decision", "own-decision", "large", "instances")
_TRACES = "| trace | cluster | policy | met | admitted | of these late | CPU s |"
HEADS = {
    "traces": _TRACES,
    "noise": _TRACES,
    "speed": _TRACES,
    "philly": "| virtual cluster | step times | met | admitted | of these late |",
    "overheads": "| cost of a change | jobs like | met | admitted | of these late |",
    "large": "| policy | promised % | CPU s, no deadline | wall s | runs | CPU s, an hour | wall s | runs "
    "| CPU s, an hour, all just submitted | wall s | runs |",
    "chronus": _TRACES,
}
"""Of the parts whose benchmark prints rows alone."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a benchmark in a process of its own."""

    part: str
    cpu_s: float
    """About how long, on one core."""
    module: str
    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """Also the file's."""
        said = "-".join(arg for arg in self.args if not arg.startswith("-"))
        return "".join(c if c.isalnum() or c in "-_" else "_" for c in f"{self.part}-{said}")


def tasks() -> Iterator[Task]:
    """Everything there is."""
    yield from _promises()
    yield from _own()
    for nodes in (70, 90, 110, 130, 150, 170, 190):
        for seed in (0, 1):
            yield Task("queueing", 60, "milp", ("queueing", str(nodes), f"seed={seed}"))
        yield Task("harder", 150, "milp", ("harder", str(nodes)))
    yield Task("instances", 10, "milp", ("instances",))
    for policy in ("concertina", "elasticflow", "fifo", "tiresias", "srtf", "optimus"):
        yield Task("large", 10, "questions", ("large", policy))
    for case in REPLAYS:
        yield Task("replay", 60, "questions", ("replay", "count=30", case))
    yield Task("easyscale", 400, "elastic_policies", ("easyscale",))


def _promises() -> Iterator[Task]:
    large = {"cluster04": 250.0, "cluster07": 130.0, "cluster08": 130.0, "cluster02": 60.0, "cluster05": 20.0}
    for name in ITP:
        yield Task("traces", large.get(name, 10), "promises", ("traces", name))
        yield Task("noise", large.get(name, 10), "promises", ("noise", name))
    for name in ("195job", "cluster01", "cluster04"):
        yield Task("speed", large.get(name, 10), "promises", ("traces", name))
    for vc in ("2869ce", "b436b2", "6214e9", "ed69ec"):
        for noise in ("0", "0.1"):
            yield Task("philly", 60, "promises", ("philly", vc, noise))
    for overhead in ("instant", "elasticflow", "stop-resume", "60"):
        for like in ("itp", "philly"):
            yield Task("overheads", 120, "promises", ("overheads", overhead, like))
    for name in ("philly_SLO", "philly_MIX1"):
        yield Task("chronus", 450, "promises", ("chronus", name))
    yield Task("decision", 20, "promises", ("decision",))


def _own() -> Iterator[Task]:
    large = {"cluster04": 400.0, "cluster07": 300.0, "cluster08": 300.0, "cluster02": 120.0, "cluster05": 60.0}
    for name in ITP:
        yield Task("own-traces", large.get(name, 10), "own_policy", ("traces", name, "-p", "concertina"))
        for policy in ("concertina", *OTHERS):
            if policy != "milp" or name not in large:
                cpu_s = large.get(name, 20) * (3 if policy == "concertina" else 1)
                yield Task("mix", cpu_s, "own_policy", ("mix", name, "-p", policy))
    for vc in VCS:
        for policy in ("concertina", "elasticflow"):
            alone = ("traces", vc, "-p", policy, "--overhead", "concertina")
            yield Task("own-traces", 60, "own_policy", alone)
        for first in ("400", "700", "1500"):
            for policy in ("concertina", *OTHERS[:-1]):
                args = ("mix", vc, "-p", policy, "--first", first, "--overhead", "concertina")
                yield Task(
                    "vc-mix", int(first) / (4 if policy in ("concertina", "elasticflow") else 40), "own_policy", args
                )
        yield Task("fairness", 30, "own_policy", ("fairness", vc, "-p", "concertina", "--overhead", "concertina"))
    for name in ITP[:7]:
        yield Task("fairness", 30, "own_policy", ("fairness", name, "-p", "concertina", "--overhead", "concertina"))
    yield Task("own-decision", 20, "own_policy", ("decision",))


# -- running -------------------------------------------------------------------------------------------------


def run_one(task: Task, out: Path) -> None:
    """Run a task here and write what it printed, cell by cell."""
    module = __import__(f"benchmarks.{task.module}", fromlist=["main"])
    said, wall, spent = io.StringIO(), time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(said):
        if task.module == "milp":
            sys.argv = ["milp", *task.args]
            module.main()
        else:
            module.main(list(task.args))
    lines = said.getvalue().splitlines()
    write(out, task, {
        "lines": lines,
        "rows": [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")],
        "cpu_s": round(time.process_time() - spent, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
    })  # fmt: skip


def write(out: Path, task: Task, found: dict[str, object]) -> None:
    """In one go, so that a call that is cut off leaves no half file."""
    about = {"part": task.part, "command": " ".join(("python -m", f"benchmarks.{task.module}", *task.args))}
    draft = out / f"{task.name}.part"
    draft.write_text(json.dumps({**about, **found}, indent=1))
    draft.rename(out / f"{task.name}.json")


def run_all(chosen: Sequence[Task], out: Path, jobs: int, limit_s: float, for_s: float) -> int:
    """Longest first, so many at once; how many are left to do."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    begun = time.monotonic()
    waiting = sorted((t for t in chosen if not (out / f"{t.name}.json").exists()), key=lambda t: t.cpu_s)
    running: dict[Task, tuple[subprocess.Popen[bytes], float]] = {}
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < jobs and now - begun < for_s:
            task = waiting.pop()
            command = [sys.executable, "-m", "benchmarks.all_scheduling", str(out), "--one", task.name]
            with (out / f"{task.name}.log").open("wb") as log:
                running[task] = (subprocess.Popen(command, env=env, stdout=log, stderr=log), now)
        for task, (process, since) in list(running.items()):
            if process.poll() is None and now - begun < for_s and now - since < limit_s:
                continue
            if process.poll() is None:
                process.kill()
            code = process.wait()
            del running[task]
            if code and now - since >= limit_s:
                write(out, task, {"error": f"not done in {limit_s:.0f} s", "lines": [], "rows": []})
            print(f"{now - begun:6.0f} s  {task.name}: {'done' if not code else f'ended with {code}'}", flush=True)
        if not running and now - begun >= for_s:
            break
        time.sleep(0.2)
    left = [task.name for task in chosen if not (out / f"{task.name}.json").exists()]
    print(f"{len(chosen) - len(left)} of {len(chosen)} done; left: {', '.join(left) or 'none'}")
    return len(left)


def tables(out: Path) -> None:
    """What was printed, part by part, rows in the order of the tasks; for docs/results."""
    heads: dict[str, str] = {}
    parts = list(dict.fromkeys(task.part for task in tasks()))
    for task in sorted(tasks(), key=lambda task: parts.index(task.part)):
        path = out / f"{task.name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        if task.part not in heads:
            heads[task.part] = ""
            print(f"\n## {task.part}\n")
            if head := HEADS.get(task.part):
                print(head, "| --- " * (head.count("|") - 1) + "|", sep="\n")
        lines = [line for line in found["lines"] if not line.startswith("| ---")]
        for line in lines:
            is_head = line.startswith(("| trace |", "| nodes |", "| jobs more |", "| jobs on nodes |"))
            if is_head and line == heads[task.part]:
                continue
            if is_head:
                heads[task.part] = line
                print(line, "| --- " * (line.count("|") - 1) + "|", sep="\n")
            else:
                print(line)
        if not lines:
            print(f"{found['command']}: {found.get('error', 'said nothing')}")
        elif task.part == "speed":
            print(f"  wall {found['wall_s']} s, CPU {found['cpu_s']} s, loading included")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--jobs", "-j", type=int, default=0, help="processes at once; cores less one, 5 for `speeds`")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for one task")
    parser.add_argument("--for", type=float, default=530.0, dest="for_s", help="seconds for this call")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--list", action="store_true", help="parts with the number of tasks and their CPU seconds")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.traces:
        os.environ["CONCERTINA_TRACES"] = str(given.traces.resolve())
    given.out.mkdir(parents=True, exist_ok=True)
    everything = {task.name: task for task in tasks()}
    if given.one:
        run_one(everything[given.one], given.out)
        return
    if given.tables:
        tables(given.out)
        return
    known = {task.part for task in everything.values()}
    groups = {"speeds": set(SPEEDS), "more": set(MORE), "rest": known - {*SPEEDS, *MORE}}
    wanted = set().union(*(groups.get(part, {part}) for part in given.parts or ["rest"]))
    if wanted - known:
        parser.error(f"no part is called {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known))}")
    chosen = [task for task in everything.values() if task.part in wanted]
    if given.list:
        for part in dict.fromkeys(task.part for task in everything.values()):
            those = [task for task in everything.values() if task.part == part]
            print(f"{part}: {len(those)} tasks, about {sum(task.cpu_s for task in those):.0f} CPU s")
        return
    cores = os.cpu_count() or 2
    jobs = given.jobs or (min(5, cores) if wanted <= set(SPEEDS) else max(cores - 1, 1))
    sys.exit(1 if run_all(chosen, given.out, jobs, given.limit, given.for_s) else 0)


if __name__ == "__main__":
    main()
