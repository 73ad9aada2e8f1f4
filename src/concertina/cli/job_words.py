"""A job as a person reads it: state, deadline and story in words. Pure: JSON and the present in, text out."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from concertina.cli.times import ago_or_ahead, at_clock, lasting
from concertina.core.errors import UsageError

Plain = Mapping[str, Any]

COLOURS = {
    "submitted": "cyan",
    "waiting": "yellow",
    "running": "green",
    "finished": "bold green",
    "rejected": "magenta",
    "cancelled": "dim",
    "failed": "bold red",
}
WORDS = {"rejected": "refused"}  # what people call it
TIGHT_SECONDS = 30.0
TYPING_SECONDS = 5
WIDE = 130  # columns from which on a reason fits beside its job


def phase_named(word: str) -> str:
    """What the server calls a phase that a person names as they read it."""
    phase = next((phase for phase, called in WORDS.items() if called == word), word)
    if phase not in COLOURS:
        raise UsageError(f"no phase {word!r}; needs one of {', '.join(WORDS.get(name, name) for name in COLOURS)}")
    return phase


def is_over(job: Plain) -> bool:
    return job["phase"] in ("finished", "rejected", "cancelled", "failed")


def state_words(job: Plain) -> str:
    """The phase, and what the job is busy with where that says more."""
    phase = str(job["phase"])
    activity = str(job.get("activity") or "")
    if phase == "submitted":
        return "being measured" if job["profiling"] else "submitted"
    if phase == "running" and activity in ("starting", "changing"):
        return activity
    if phase == "waiting" and activity in ("suspending", "suspended"):
        return activity
    return WORDS.get(phase, phase)


def state_text(job: Plain) -> Text:
    return Text(state_words(job), style=COLOURS.get(str(job["phase"]), ""))


def deadline_words(job: Plain, now: datetime, brief: bool = False) -> str:
    """`18:00:00, 12 min to spare`; for a job that has ended, whether it was kept. Brief: without the time of day."""
    deadline = job["deadline_s"]
    if deadline is None:
        return ""
    clock = ("wanted " if job["soft"] else "") + at_clock(deadline, now)
    slack = job["slack_s"]
    if job["phase"] == "finished" and job["ended_s"] is not None:
        early = deadline - job["ended_s"]
        more = f"{'kept' if early >= 0 else 'missed'} by {lasting(abs(early))}"
    elif is_over(job):
        return clock
    elif slack is None:
        more = ago_or_ahead(deadline, now.timestamp())
    else:
        more = f"{lasting(slack)} to spare" if slack >= 0 else f"{lasting(-slack)} too late"
    return more if brief else f"{clock}, {more}"


def over_words(job: Plain, now: datetime) -> str:
    """Why a job has ended, and what became of its deadline."""
    deadline = deadline_words(job, now) if job["phase"] == "finished" else ""
    return f"{job['reason']}; deadline {deadline}" if deadline else str(job["reason"])


def deadline_style(job: Plain) -> str:
    if job["deadline_s"] is None:
        return ""
    left = job["deadline_s"] - job["ended_s"] if job["ended_s"] is not None else job["slack_s"]
    if left is None:
        return ""
    return "red" if left < 0 else "yellow" if left < TIGHT_SECONDS and not is_over(job) else ""


def workers_words(job: Plain) -> str:
    """`2 of 4`: it trains on two workers and could use four."""
    most = job["max_workers"] or job["virtual"]
    return "" if is_over(job) else f"{len(job['slots'])} of {most}"


def end_words(job: Plain, now: datetime) -> str:
    if job["ended_s"] is not None:
        return ago_or_ahead(job["ended_s"], now.timestamp())
    return "" if job["eta_s"] is None else f"in {lasting(job['eta_s'] - now.timestamp())}"


def jobs_table(jobs: Sequence[Plain], now: datetime, width: int) -> Table:
    """One line for each job with its reason at the end, or two where the screen is narrow."""
    wide = width >= WIDE
    table = Table(box=None, padding=(0, 1), collapse_padding=not wide, header_style="dim", pad_edge=False)
    for heading in ("JOB", "STATE", "WORKERS", "PROGRESS", "END", "DEADLINE"):
        table.add_column(heading, no_wrap=True)
    if wide:
        table.add_column("REASON", overflow="fold", ratio=1)
    for job in jobs:
        cells: list[RenderableType] = [
            escape(str(job["id"])),
            state_text(job),
            workers_words(job),
            progress_cell(job, 10 if wide else 6),
            end_words(job, now),
            Text(deadline_words(job, now, brief=not wide), style=deadline_style(job)),
        ]
        table.add_row(*cells, *([Text(str(job["reason"]), style="dim")] if wide else []))
    return table


def reasons(jobs: Sequence[Plain], width: int) -> list[Text]:
    """What a narrow table has no room for: the reasons of those that have not ended."""
    if width >= WIDE:
        return []
    return [Text(f"{job['id']}: {job['reason']}", style="dim") for job in jobs if not is_over(job) and job["reason"]]


def progress_cell(job: Plain, width: int) -> Table | Text:
    """A bar and a share where the end is known, the step where it is not."""
    if job["progress"] is None or (is_over(job) and not job["step"]):
        return Text(f"step {job['step']}" if job["step"] else "")
    cell = Table.grid(padding=(0, 1))
    cell.add_row(
        ProgressBar(total=1.0, completed=job["progress"], width=width, style="dim"), Text(f"{job['progress']:4.0%}")
    )
    return cell


def summary(jobs: Sequence[Plain], slots: int, lent: int = 0) -> str:
    """`3 running on 4 of 4 slots, 1 waiting, 2 finished`"""
    used = sum(len(job["slots"]) for job in jobs)
    measured = sum(job["phase"] == "submitted" and job["profiling"] for job in jobs)
    counts = {phase: sum(job["phase"] == phase for job in jobs) for phase in COLOURS}
    head = f"{counts.pop('running')} running on {used} of {slots} slots"
    counts["submitted"] -= measured
    counts = {"being measured": measured, **counts}
    rest = [f"{count} {WORDS.get(phase, phase)}" for phase, count in counts.items() if count]
    if lent:
        rest.insert(0, f"{lent} {'slot' if lent == 1 else 'slots'} reclaimed")
    return ", ".join([head, *rest])


def verdict(job: Plain, now: datetime) -> str:
    """What became of a submission, in one or two sentences."""
    name, reason = job["id"], job["reason"]
    if job["phase"] == "rejected":
        earliest = job["earliest_s"]
        offer = "" if earliest is None else f"\nwhat could be promised now: --deadline {ahead_words(earliest, now)}"
        return f"refused: {reason}{offer}"
    if job["phase"] == "failed":
        return f"{name} failed: {job['error'] or reason}"
    if job["phase"] == "submitted":
        return f"{name} is not decided yet: {reason or 'the controller has not looked at it'}"
    if job["phase"] in ("finished", "cancelled"):  # it was quicker than the asking
        return f"taken as {name}, and already {job['phase']}: {over_words(job, now)}"
    if job["promised_s"] is not None:
        return f"taken as {name}: will be done by {when(job['promised_s'], now)}\n{reason}"
    return f"taken as {name}: {reason}"


def ahead_words(at: float, now: datetime) -> str:
    """How long from now, as it can be typed, with some seconds for the typing."""
    seconds = max(0, math.ceil((at - now.timestamp()) * 1.05 + TYPING_SECONDS))
    if seconds < 600:
        return f"{seconds}s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes}m" if minutes < 600 else f"{math.ceil(minutes / 60)}h"


def when(at: float, now: datetime) -> str:
    return f"{at_clock(at, now)} ({ago_or_ahead(at, now.timestamp())})"


def band_words(name: str, band: Plain | None, now: datetime) -> str:
    """`expected end: 18:00:05 (in 12 min), between 17:58:00 and 18:03:00`; empty where it is not known."""
    if band is None or band["expected_s"] is None:
        return ""
    if band["expected_s"] <= now.timestamp() + 1.0:
        return f"{name}: now"
    text, low, high = f"{name}: {when(band['expected_s'], now)}", band["low_s"], band["high_s"]
    if low is None or high is None or high - low < 2.0:
        return text
    return f"{text}, most likely between {at_clock(low, now)} and {at_clock(high, now)}"


def why_lines(answer: Plain, now: datetime) -> list[str]:
    lines = [str(answer["why"])]
    if answer["reason"] and answer["reason"] not in answer["why"]:
        lines.append(f"last decision: {answer['reason']}")
    bands = (band_words(f"expected {name}", answer[name], now) for name in ("start", "end"))
    return lines + [line for line in bands if line and not line.endswith(": now")]


def story(job: Plain, now: datetime) -> Table:
    """The changes of a job, oldest first."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("WHEN", "STEP", "WORKERS"):
        table.add_column(heading, no_wrap=True, justify="right" if heading != "WHEN" else "left")
    table.add_column("REASON")
    for change in job["history"]:
        table.add_row(
            at_clock(change["at_s"], now), str(change["step"]), str(change["workers"]), escape(change["reason"])
        )
    return table


def facts(job: Plain, now: datetime) -> list[tuple[str, str]]:
    """What `describe` lists, with names; what is not known is left out."""
    moment, no_eta = now.timestamp(), job["eta_s"] is None or is_over(job)
    rows = [
        ("job", f"{job['id']} ({job['name']}, of {job['user']})"),
        ("script", " ".join([job["script"], *job["args"]])),
        ("state", f"{state_words(job)}: {job['reason']}"),
        ("workers", f"{job['workers']} training, slots {', '.join(job['slots']) or 'none'}; {_range(job)}"),
        ("progress", _progress(job)),
        ("speed", "" if not job["steps_per_s"] else f"{job['steps_per_s']:.3g} steps/s"),
        ("expected end", "" if no_eta else f"{at_clock(job['eta_s'], now)}, {end_words(job, now)}"),
        ("deadline", deadline_words(job, now)),
        ("promised", "" if job["promised_s"] is None else at_clock(job["promised_s"], now)),
        ("could promise", "" if job["earliest_s"] is None else at_clock(job["earliest_s"], now)),
        ("submitted", f"{at_clock(job['submitted_s'], now)}, {ago_or_ahead(job['submitted_s'], moment)}"),
        ("started", "" if job["first_start_s"] is None else at_clock(job["first_start_s"], now)),
        ("ended", "" if job["ended_s"] is None else f"{at_clock(job['ended_s'], now)}, exit {job['exit']}"),
        ("values", "  ".join(f"{name} {value:.4g}" for name, value in (job["values"] or {}).items())),
        ("error", job["error"] or ""),
    ]
    return [(name, text) for name, text in rows if text]


def _range(job: Plain) -> str:
    spread = f"{job['min_workers']} to {job['max_workers'] or job['virtual']} of {job['virtual']} virtual workers"
    return f"pinned to {job['pinned']}; {spread}" if job["pinned"] and not is_over(job) else spread


def _progress(job: Plain) -> str:
    total = job["total_steps"]
    return f"step {job['step']}" + (f" of {total} ({job['progress'] or 0:.0%})" if total else "")
