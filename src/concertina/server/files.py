"""Reading what a job's keeper writes: events and logs, a page at a time. Touches the disk: call it from a thread.

Positions are bytes from the beginning of a file, always behind a whole line. Names come from the folder's own listing,
never from a request.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_BYTES = 256 * 1024
_LOG = re.compile(r"([a-z0-9][a-z0-9_-]{0,40})\.log")


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines, and where the next one begins."""

    lines: list[bytes]
    next: int
    at_end: bool  # the file has no more whole lines now


def job_folder(state: Path, job_id: str) -> Path:
    return state / "jobs" / job_id


def events_path(state: Path, job_id: str) -> Path:
    return job_folder(state, job_id) / "events.jsonl"


def read_lines(path: Path, after: int, limit: int, most_bytes: int = PAGE_BYTES, *, over: bool = False) -> Lines:
    """At most `limit` lines from byte `after` on. A line without its end is not there yet, unless all is `over`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if after >= size:
                return Lines([], min(after, size), True)
            file.seek(after)
            data = file.read(most_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return Lines([], 0, True)
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) == most_bytes:  # one endless line: cut it
        return Lines([data], after + len(data), False)
    lines = data[:whole].split(b"\n")[:-1]
    if over and whole < len(data) and after + len(data) >= size:
        lines.append(data[whole:])
    taken = lines[:limit]
    used = min(sum(len(line) + 1 for line in taken), len(data))
    return Lines(taken, after + used, after + used >= size or not taken)


def tail_start(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin, as far as the last page goes."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - PAGE_BYTES)
            file.seek(begin)
            data = file.read(PAGE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if begin:  # into the middle of a line
        cut = data.find(b"\n") + 1
        data, begin = data[cut:], begin + cut
    whole = data[: data.rfind(b"\n") + 1]
    ends = [at for at in range(len(whole)) if whole[at] == 10]
    return begin + (ends[-lines - 1] + 1 if len(ends) > lines else 0)


def log_names(state: Path, job_id: str) -> list[str]:
    """The workers that have a log, in order: 0, 1, 2, 10, ..."""
    try:
        found = os.listdir(job_folder(state, job_id) / "logs")
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [match[1].removeprefix("worker-") for name in found if (match := _LOG.fullmatch(name))]
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def log_path(state: Path, job_id: str, worker: str) -> Path:
    """`worker` is one of `log_names`."""
    stem = f"worker-{worker}" if worker.isdigit() else worker
    return job_folder(state, job_id) / "logs" / f"{stem}.log"


def parse(line: bytes) -> dict[str, Any] | None:
    """One event, with null for what JSON has no number for; None if it is no event."""
    try:
        found = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None
