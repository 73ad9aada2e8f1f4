"""Handing out whole gangs in an order: what most static policies come down to.

`take_in_order` is the inner loop of every preemptive policy and runs on arrays: walk the jobs in order,
give each what it asks for if that is still free, skip it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from concertina.policies.base import Shares
from concertina.policies.table import Bools, Ints, Table


def take_in_order(demand: Ints, free: int) -> Bools:
    """Which demands are met if each takes its devices in turn where enough are left, and is skipped where
    not.

    Takes the longest prefix that fits, drops what can no longer fit, and starts over: as many passes as there
    are distinct sizes, at worst.
    """
    taken: Bools = np.zeros(len(demand), dtype=np.bool_)
    if int(demand.sum()) <= free:
        taken[:] = True
        return taken
    where = np.flatnonzero(demand <= free)
    while where.size and free > 0:
        total = np.cumsum(demand[where])
        fits = int(np.searchsorted(total, free, side="right"))
        if fits:
            taken[where[:fits]] = True
            free -= int(total[fits - 1])
        where = where[fits:]
        where = where[demand[where] <= free]
    return taken


def gangs(table: Table, order: Ints) -> Shares:
    """Give every job, in this order of rows, the devices it asked for, or none."""
    if len(table.types) == 1:
        workers = np.zeros(len(table), dtype=np.int64)
        demand = table.gpus[order]
        taken = order[take_in_order(demand, table.capacity[0])]
        workers[taken] = table.gpus[taken]
        return Shares(workers=workers)
    return _gangs_by_type(table, order.tolist())


def _gangs_by_type(table: Table, order: Sequence[int]) -> Shares:
    """The same with several types: a running job stays on its type, others take the fastest that has room."""
    free = list(table.capacity)
    workers = np.zeros(len(table), dtype=np.int64)
    kinds = np.full(len(table), -1, dtype=np.int64)
    gpus, kind_now = table.gpus, table.kind
    for row in order:
        if not any(free):
            break
        kind = choose_type(table, row, free, stay=int(kind_now[row]))
        if kind >= 0:
            free[kind] -= int(gpus[row])
            workers[row], kinds[row] = gpus[row], kind
    return Shares(workers=workers, kind=kinds)


def choose_type(table: Table, row: int, free: Sequence[int], *, stay: int = -1, need: int = 0) -> int:
    """The type this job should take its gang (or `need` devices) from: its present one, else the fastest with
    room; -1 if none."""
    need, allowed = need or int(table.gpus[row]), int(table.allowed[row])
    if stay >= 0 and free[stay] >= need:
        return stay
    best, best_speed = -1, 0.0
    for kind, name in enumerate(table.types):
        if allowed >> kind & 1 and free[kind] >= need:
            speed = table.curves[row].speed(name, need)
            if speed > best_speed:
                best, best_speed = kind, speed
    return best
