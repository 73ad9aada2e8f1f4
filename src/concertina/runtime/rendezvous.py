"""How workers that nobody coordinates find each other: through a folder. For benchmarks of the runtime alone."""

import json
import os
import time
from pathlib import Path

from concertina.core.errors import ConcertinaError
from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement

LIMIT_SECONDS = 120.0


def meet_in(
    folder: Path, generation: int, own: int, members: tuple[int, ...], virtual: int, post: str, desk: str
) -> Formation:
    """Every member leaves its addresses; the generation of all of them, in blocks."""
    mine = folder / f"member-{generation}-{own}.json"
    draft = mine.with_suffix(".draft")
    draft.write_text(json.dumps([post, desk]))
    os.replace(draft, mine)
    until = time.monotonic() + LIMIT_SECONDS
    found: dict[int, tuple[str, str]] = {}
    while len(found) < len(members):
        for member in members:
            path = folder / f"member-{generation}-{member}.json"
            if member not in found and path.exists():
                found[member] = tuple(json.loads(path.read_text()))
        if time.monotonic() > until:
            missing = [member for member in members if member not in found]
            raise ConcertinaError(f"worker {missing[0]} did not come to {folder} within {LIMIT_SECONDS:.0f} s")
        time.sleep(0.005)
    return Formation(
        generation=generation,
        members=members,
        placement=VirtualPlacement.blocks(virtual, len(members)),
        posts=tuple(found[member][0] for member in members),
        desks=tuple(found[member][1] for member in members),
    )
