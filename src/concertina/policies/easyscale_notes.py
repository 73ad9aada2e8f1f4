"""What EasyScale's policy finds in the table about a job: its configuration, and the notes of an earlier round."""

from __future__ import annotations

import numpy as np

from concertina.policies.table import Table

Counts = tuple[int, ...]
"""Devices of each type: a configuration."""

_BITS = 10
STUCK = 1 << 62
"""Flag in a job's note: it was slower with more at the time in `stamp`, and proposes nothing for a while."""
FASTER = 1 + 1e-9


def held(table: Table) -> dict[int, Counts]:
    """Devices by type of every job that has some."""
    none = [0] * len(table.types)
    found: dict[int, Counts] = {}
    for row in np.flatnonzero(table.held > 0).tolist():
        split = table.splits.get(table.keys[row])
        if split is None:
            counts = list(none)
            counts[int(table.kind[row])] = int(table.held[row])
            split = tuple(counts)
        found[row] = split
    return found


def slower(table: Table, row: int) -> bool:
    """Whether it runs slower now than before its last growth."""
    before = float(table.stamp[row])
    return 0 < int(table.level[row]) < STUCK and float(table.speed[row]) < before / FASTER


def stuck(table: Table, row: int, patience_s: float) -> bool:
    """Whether it found out not long ago that more devices made it slower."""
    return int(table.level[row]) >= STUCK and table.now - float(table.stamp[row]) < patience_s


def pack(counts: Counts) -> int:
    """A configuration as one number; 0 (none) where it does not fit into a note."""
    if len(counts) * _BITS > 60 or max(counts) >= 1 << _BITS:
        return 0
    return sum(count << _BITS * kind for kind, count in enumerate(counts))


def unpack(note: int, types: int) -> Counts:
    """The configuration again."""
    return tuple((note & ~STUCK) >> _BITS * kind & (1 << _BITS) - 1 for kind in range(types))
