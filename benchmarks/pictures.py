"""The pictures of docs/results, each from the table of its page and from nothing else.

    python -m benchmarks.pictures              all of them
    python -m benchmarks.pictures rescale      this one

A benchmark that writes its table draws its picture at once. Each file says in its description what its rows were, so
that a test finds pictures that are older than their table.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pictures_of_jobs as jobs
from benchmarks import pictures_of_policies as policies
from benchmarks.pages import RESULTS
from benchmarks.picture_style import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, and from which page."""

    page: str
    read: Callable[[str], list[Any]]
    draw: Callable[[list[Any]], Figure]


PICTURES = {
    "rescale": Picture("rescale.md", jobs.read_rescale, jobs.draw_rescale),
    "sim-to-live": Picture("sim-to-live.md", jobs.read_sim_to_live, jobs.draw_sim_to_live),
    "scheduling": Picture("scheduling.md", policies.read_scheduling, policies.draw_scheduling),
    "elastic-policies": Picture("elastic-policies.md", policies.read_elastic, policies.draw_elastic),
    "concertina-policy": Picture("concertina-policy.md", policies.read_own_policy, policies.draw_own_policy),
    "allocation": Picture("allocation.md", policies.read_allocation, policies.draw_allocation),
    "questions": Picture("questions.md", policies.read_questions, policies.draw_questions),
    "simulator-rounds": Picture("simulator.md", policies.read_rounds, policies.draw_rounds),
}


def rows(name: str) -> list[Any]:
    picture = PICTURES[name]
    return picture.read((RESULTS / picture.page).read_text())


def mark(found: Sequence[Any]) -> str:
    """What the file says about its rows."""
    return f"rows {hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"


def draw(name: str, folder: Path = RESULTS) -> None:
    found = rows(name)
    try:
        save(PICTURES[name].draw(found), folder / f"{name}.svg", mark(found))
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(f"{name}.svg not drawn: needs matplotlib, seen none; install the extra `examples`, "
              f"then python -m benchmarks.pictures {name}", file=sys.stderr)  # fmt: skip


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        draw(name)


if __name__ == "__main__":
    main(sys.argv[1:])
