"""What step times say about a change of workers. Pure: marks in, figures out."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

# A mark: when a step ended, its number, the generation that made it.
Mark = tuple[float, int, int]


@dataclass(slots=True)
class Track:
    """The steps of one process."""

    about: Mapping[str, int]
    marks: list[Mark]

    def of(self, generation: int) -> list[Mark]:
        return [mark for mark in self.marks if mark[2] == generation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A change as it was asked for and took place."""

    kind: str  # grow, shrink, move
    at: float
    before: int  # generation that was asked to change
    after: int
    newcomer_at: float | None = None  # when the newcomer had been built and began to catch up
    let_in_at: float | None = None  # when it had


@dataclass(slots=True)
class Seen:
    """How the workers that stayed saw a change. Seconds."""

    kind: str
    pause: float  # of the gap across the change, what exceeds a usual step of the new world; the worst survivor's
    spread: float  # the same over the first three steps of the new world, where a delay may have been pushed to
    step: float  # usual step of the new world
    noise: float  # how far steps of the quiet new world lie from the usual one, median
    longest: float  # longest step between request and change, less a usual one of the old world
    survivors: int
    start_ratios: list[float] = field(default_factory=list)  # steps while the newcomer started, by a usual one
    catch_up_ratios: list[float] = field(default_factory=list)  # while it caught up

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def read_tracks(folder: Path) -> list[Track]:
    tracks = []
    for path in sorted(folder.glob("*.marks")):
        about, *rows = (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
        tracks.append(Track(about, [(at, step, generation) for at, step, generation in rows]))
    return tracks


def seen(change: Asked, tracks: Sequence[Track], next_asked: float) -> Seen | None:
    """How a change looked to those who trained before and after; None if nobody did both."""
    found: list[Seen] = []
    for track in tracks:
        old, new = track.of(change.before), track.of(change.after)
        quiet_new = [mark for mark in new if mark[0] < next_asked]
        if not old or len(quiet_new) < 4:
            continue
        times = [mark[0] for mark in quiet_new]
        usual = statistics.median(_gaps(times[1:]))
        gap = times[0] - old[-1][0]
        first_three = times[2] - old[-1][0]
        quiet_old = [at for at, _, _ in old if at < change.at]
        usual_old = statistics.median(_gaps(quiet_old[1:])) if len(quiet_old) > 3 else usual
        since = [at for at, _, _ in old if at >= change.at]
        row = Seen(
            kind=change.kind,
            pause=gap - usual,
            spread=first_three - 3 * usual,
            step=usual,
            noise=statistics.median(abs(gap - usual) for gap in _gaps(times[1:])),
            longest=max(_gaps([*quiet_old[-1:], *since]), default=usual_old) - usual_old,
            survivors=0,
        )
        if change.newcomer_at is not None:
            let_in = change.let_in_at or old[-1][0]
            for a, b in pairwise([*quiet_old[-1:], *since]):
                if b <= change.newcomer_at:
                    row.start_ratios.append((b - a) / usual_old)
                elif b <= let_in:
                    row.catch_up_ratios.append((b - a) / usual_old)
        found.append(row)
    if not found:
        return None
    worst = max(found, key=lambda row: row.pause)
    worst.survivors = len(found)
    return worst


def seen_by_restart(kinds: Sequence[str], tracks: Sequence[Track]) -> list[Seen]:
    """The same where nobody stays: between the last step of a first process and the first of its successor."""
    first = sorted((t for t in tracks if t.about["rank"] == 0 and t.marks), key=lambda track: track.marks[0][0])
    out = []
    for kind, (old, new) in zip(kinds, pairwise(first), strict=False):
        times = [mark[0] for mark in new.marks]
        gaps = _gaps(times[1:]) or [0.0]
        usual = statistics.median(gaps)
        gap = times[0] - old.marks[-1][0]
        noise = statistics.median(abs(gap - usual) for gap in gaps)
        out.append(
            Seen(kind=kind, pause=gap - usual, spread=gap - usual, step=usual, noise=noise, longest=0.0, survivors=0)
        )
    return out


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]
