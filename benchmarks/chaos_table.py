"""What `benchmarks.chaos --json FILE` wrote, as tables in docs/results/chaos.md."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import REMINDER, RESULTS, put

PAGE = RESULTS / "chaos.md"
MARK = "faults"
KINDS = {
    "kill worker": "one worker killed",
    "kill two": "two killed",
    "kill newest": "the newest killed",
    "freeze worker": "one frozen",
    "cut links": "links to the master cut",
    "kill master": "master killed",
}
PHASES = {
    "change_begun": "change begun",
    "joined": "newcomer joined",
    "following": "following",
    "synced": "synced",
    "ready": "ready",
    "changed_over": "changed over",
    "recovering": "recovering",
    "step": "step",
}


def table(found: Mapping[str, Any]) -> str:
    """In short, and how often each kind of fault struck at each phase."""
    runs = found["runs"]
    struck: Counter[tuple[str, str]] = Counter()
    for run in runs:
        for what, count in run["faults"].items():
            kind, _, phase = what.partition(" at ")
            struck[kind, phase] += count
    seconds = [run["seconds"] for run in runs]
    problems = [run["problem"] for run in runs if run["problem"]]
    out = [
        "| | |",
        "|---|---|",
        f"| faults | {struck.total()} in {len(runs)} runs |",
        f"| hangs, differing digests, samples lost or doubled | {'; '.join(problems) or 0} |",
        f"| seconds of a run | {min(seconds, default=0):.0f} to {max(seconds, default=0):.0f} |",
        f"| machine | {found['cores']} cores, a load of {found['load']:.1f} before, {found['at_once']} at once |",
        "",
        f"| struck at | {' | '.join(PHASES.values())} | in all |",
        "|---" * (len(PHASES) + 2) + "|",
    ]
    for kind, name in KINDS.items():
        counts = [struck[kind, phase] for phase in PHASES]
        out.append(f"| {name} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    counts = [sum(struck[kind, phase] for kind in KINDS) for phase in PHASES]
    return "\n".join([*out, f"| in all | {' | '.join(map(str, counts))} | {sum(counts)} |"])


def write(path: Path) -> None:
    put(PAGE, MARK, table(json.loads(path.read_text())))
    print(f"in {PAGE}; {REMINDER}")
