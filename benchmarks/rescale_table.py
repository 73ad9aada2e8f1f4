"""The figures of `benchmarks.rescale` as tables, in its page under docs/results."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.pages import REMINDER, RESULTS, put

PAGE = RESULTS / "rescale.md"
MARKS = {"cpu": "measured", "cuda": "measured on a GPU"}
ALONE_MARK = "measured from one worker on"  # with --workers 1, for a machine with two cores
KEPT_MARK = "measured with memory kept"  # the same, where the C library keeps what is freed
HOSTS_MARK = "measured on several hosts"
STILL_MARK = "measured while nothing changes"
KINDS = ("grow", "shrink", "move")
NAMES = {
    "ours": "**concertina**",
    "copy": "copying at the switch (Elan's way)",
    "resume": "stop, checkpoint, resume",
    "torchrun": "torchrun's elastic restart",
}

DETAILS = (
    "MB",
    "change",
    "pause, median ms",
    "tenth of a step or 20 ms",
    "three steps",
    "noise",
    "longest, median / worst",
    "starting",
    "catching up (steps)",
)
ON_HOSTS = (
    "MB of parameters",
    "each link",
    "",
    "growing",
    "moving one",
    "shrinking",
    "step, ms",
    "steps while catching up",
    "pieces left for the switch",
)


def _ms(values: Sequence[float]) -> str:
    if not values:
        return "not measured"
    return f"{1000 * statistics.median(values):,.0f} / {1000 * max(values):,.0f} ({len(values)})"


def _of(found: Mapping[str, Any], kind: str, what: str) -> list[Any]:
    return [row[what] for row in found["changes"] if row["kind"] == kind]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def in_short(found: Mapping[str, Any]) -> str:
    """One line, or a few."""
    if found["way"] == "overhead":
        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in found["microseconds"].items())
        total = sum(found["microseconds"].values())
        return f"P={found['virtual']}: {total:.0f} microseconds of CPU per step ({parts})"
    head = f"{found['way']}, {found['megabytes']:g} MB ({found['seconds']} s, load {found['load'][0]:.1f}): "
    body = "; ".join(
        f"{kind} {_ms(_of(found, kind, 'pause'))} ms of a {1000 * _median(_of(found, kind, 'step')):.0f} ms step"
        for kind in KINDS
        if _of(found, kind, "pause")
    )
    return head + body + (f"; not seen: {found['not_seen']}" if found["not_seen"] else "")


def _pauses(results: Sequence[Mapping[str, Any]]) -> list[str]:
    out = [
        f"Pause of the workers that stay, ms: median / worst (changes). {_worlds(results)}",
        "A usual step of the new world beside it.",
        "",
        "| MB of parameters | | growing | shrinking | moving one | step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for size in sorted({found["megabytes"] for found in results}):
        for way, name in NAMES.items():
            for found in results:
                if found["way"] == way and found["megabytes"] == size:
                    cells = " | ".join(_ms(_of(found, kind, "pause")) for kind in KINDS)
                    steps = ", ".join(
                        f"{1000 * _median(_of(found, k, 'step')):.0f}" for k in KINDS if _of(found, k, "step")
                    )
                    out.append(f"| {size:g} | {name} | {cells} | {steps} |")
    return out


def _worlds(results: Sequence[Mapping[str, Any]]) -> str:
    """How many workers there were."""
    before = sorted({found["workers"] for found in results})
    return "; ".join(f"Growing {n} -> {n + 1}, shrinking {n + 1} -> {n}, moving one of {n + 1}." for n in before)


def _details(results: Sequence[Mapping[str, Any]]) -> list[str]:
    out = [
        "Ours in detail. *Three steps*: what the first three steps of the new world took beyond three usual ones.",
        "*Noise*: how far its later steps lie from a usual one (median). *Longest*: the longest step between request",
        "and change, beyond a usual one. *Starting*, *catching up*: steps while the newcomer started, and while it",
        "caught up, in usual ones.",
        "",
        f"| {' | '.join(DETAILS)} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in sorted((f for f in results if f["way"] == "ours"), key=lambda f: f["megabytes"]):
        for kind in KINDS:
            pause, step = _median(_of(found, kind, "pause")), _median(_of(found, kind, "step"))
            goal = max(0.02, step / 10)
            start = [ratio for row in _of(found, kind, "start_ratios") for ratio in row]
            catch = [ratio for row in _of(found, kind, "catch_up_ratios") for ratio in row]
            out.append(
                f"| {found['megabytes']:g} | {kind} | {1000 * pause:.1f} | {1000 * goal:.0f}: "
                f"{'met' if pause <= goal else '**missed**'} | {1000 * _median(_of(found, kind, 'spread')):.1f} | "
                f"{1000 * _median(_of(found, kind, 'noise')):.1f} | {_ms(_of(found, kind, 'longest'))} | "
                f"{f'{_median(start):.2f}' if start else '-'} | "
                f"{f'{_median(catch):.2f} ({len(catch)})' if catch else '-'} |"
            )
        kept = "every worker kept its process" if found["pids_kept"] else "**some worker was started again**"
        out += [f"| {found['megabytes']:g} | | {kept}; troubles: {len(found['troubles'])} | | | | | | |"]
    return out


def _ratios(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Growing: others' median pause by ours, which counts as 1 ms at least."""
    out = ["Growing, the median pause of others in ours (ours counted as at least 1 ms):", ""]
    for size in sorted({found["megabytes"] for found in results}):
        medians = {
            f["way"]: _median(_of(f, "grow", "pause"))
            for f in results
            if f["megabytes"] == size and _of(f, "grow", "pause")
        }
        if "ours" in medians:
            ours = max(1e-3, medians.pop("ours"))
            words = [f"{NAMES[way]} {value / ours:,.0f} times" for way, value in medians.items()]
            out.append(f"- {size:g} MB: {', '.join(words) or 'not measured'}")
    return out


def _overhead(results: Sequence[Mapping[str, Any]]) -> list[str]:
    out = [
        "CPU time of coordination while nothing changes, microseconds per step and worker; two workers, tiny model:",
        "",
        "| P | in all | of which |",
        "|---|---|---|",
    ]
    for found in sorted(results, key=lambda f: f["virtual"]):
        parts = ", ".join(f"{name} {taken:.1f}" for name, taken in found["microseconds"].items())
        out.append(f"| {found['virtual']} | {sum(found['microseconds'].values()):.0f} | {parts} |")
    return out


def _on_hosts(results: Sequence[Mapping[str, Any]]) -> str:
    out = [_worlds(results), "", f"| {' | '.join(ON_HOSTS)} |", "|---" * len(ON_HOSTS) + "|"]
    rows = sorted(results, key=lambda f: (f["megabytes"], f["rate"], f["name"] == ""))
    for found in rows:
        pauses = " | ".join(_ms(_of(found, kind, "pause")) for kind in ("grow", "move", "shrink"))
        steps = ", ".join(f"{1000 * _median(_of(found, k, 'step')):.0f}" for k in ("grow", "move", "shrink"))
        ratios = [r for kind in ("grow", "move") for row in _of(found, kind, "catch_up_ratios") for r in row]
        late = ", ".join("all" if n < 0 else str(n) for n in sorted(set(found["late"])))
        head = f"{found['megabytes']:g} | {found['rate'] or 'unlimited'} | {found['name'] or '**following**'}"
        slower = f"{_median(ratios):.2f} ({len(ratios)})" if ratios else "-"
        out.append(f"| {head} | {pauses} | {steps} | {slower} | {late} |")
    loads = ", ".join(f"{found['load'][0]:.1f}" for found in rows)
    return "\n".join([*out, "", f"Load of the machine before each: {loads}."])


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([*_pauses(results), "", *_details(results), "", *_ratios(results), "", _loads(results)])


def _still(results: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([*_overhead(results), "", _loads(results)])


def _loads(results: Sequence[Mapping[str, Any]]) -> str:
    loads = (f"{f['way']} {f.get('megabytes', f.get('virtual')):g}: {f['load'][0]:.1f}" for f in results)
    return f"Load of the machine before each row: {', '.join(loads)}."


def write(scratch: Path) -> None:
    """Puts tables for which there are rows between their marks of the page, and draws its picture; all else stays."""
    every = [json.loads(path.read_text()) for path in sorted(scratch.glob("*.json"))]
    changes = [found for found in every if found["way"] not in ("hosts", "overhead")]
    alone = [found for found in changes if found["workers"] == 1]
    changes = [found for found in changes if found["workers"] > 1]
    sections = [
        (HOSTS_MARK, _on_hosts, [found for found in every if found["way"] == "hosts"]),
        (STILL_MARK, _still, [found for found in every if found["way"] == "overhead"]),
        (ALONE_MARK, tables, [found for found in alone if not found.get("keeps_memory")]),
        (KEPT_MARK, tables, [found for found in alone if found.get("keeps_memory")]),
        *((mark, tables, [f for f in changes if f.get("device", "cpu") == device]) for device, mark in MARKS.items()),
    ]
    for mark, render, rows in sections:
        if rows:
            put(PAGE, mark, render(rows))
    pictures.draw("rescale")
    print(f"{len(every)} rows, in {PAGE}; {REMINDER}")
