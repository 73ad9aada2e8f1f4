"""What a worker says to whoever started it: one JSON object per line, and how it ends.

Lines stay below the size that a pipe writes in one piece, so the workers of a job can share one pipe.
"""

import json
from collections.abc import Mapping

MAX_LINE = 4000  # bytes; POSIX guarantees 4096 to be atomic on Linux

# How a worker process ends.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STATE_LOST = 74  # what only a lost worker had cannot be made again: the job goes back to a checkpoint
EXIT_LEFT = 75  # the job goes on without this worker
EXIT_INTERRUPTED = 76  # asked to stop, state is saved where a checkpoint folder was given

MASTER = -1  # in the place of a worker's number: the process that coordinates the job

Scalar = str | int | float | bool | None
Event = Mapping[str, Scalar | list[int] | Mapping[str, float]]


def encode(event: Event) -> bytes:
    """One line. What is too long for one piece loses its longest text, never its structure."""
    line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    if len(line) <= MAX_LINE:
        return line
    texts = [k for k, v in event.items() if isinstance(v, str) and k != "event" and len(v) > 64]
    longest = max(texts, key=lambda k: len(str(event[k])), default="")
    if not longest:
        raise ValueError(f"event of {len(line)} bytes without text to shorten: {line[:120]!r}")
    keep = max(0, len(str(event[longest])) - (len(line) - MAX_LINE) - 16)
    return encode({**event, longest: str(event[longest])[:keep] + " ..."})


def decode(line: bytes) -> dict[str, object]:
    value = json.loads(line)
    if not isinstance(value, dict) or "event" not in value:
        raise ValueError(f"not an event: {line[:120]!r}")
    return value
