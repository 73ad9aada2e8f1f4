"""How many virtual workers each device runs, so that least of its speed is wasted (EasyScale 3.4.1, eq. 1a-1e).

Every virtual worker takes one mini-batch a step, and the step lasts as long as the slowest device needs for
all of its own. `deal` shares virtual workers out over single workers with a measured speed (the training
runtime). `plan` does it for counts of device types, several executors on one device included (a scheduler,
which wants to know what more devices would bring before it gives them). Knows no jobs and no devices.

One thing differs from the paper's print: equation 1c sums its first term over types, not over devices. Read
that way 1e would not give mini-batches per second. With N_i in front, as in the sum of 1e, it gives
maxP / f_overload, which is what the step time says; that is what is meant here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NEAR = 1e-9
"""Relative difference below which two step times are the same: far above rounding, far below any measurement."""


# -- single workers ------------------------------------------------------------------------------------------


def deal(virtual: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Virtual workers for each worker, by its measured speed (mini-batches/s), with the shortest possible step.

    Nobody is left without one as long as there are enough. Of all that are equally fast it is the most even,
    and for equal speeds the sizes of `VirtualPlacement.blocks`.
    """
    _check(virtual, speeds)
    least = 1 if virtual >= len(speeds) else 0
    slowest = step_time(_one_by_one(virtual, speeds, least), speeds)
    caps = [max(least, _fits(slowest, speed)) for speed in speeds]
    return _even(virtual, caps, least)


def step_time(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds a step takes: the slowest worker's."""
    return max((count / speed for count, speed in zip(dealt, speeds, strict=True)), default=0.0)


def _check(virtual: int, speeds: Sequence[float]) -> None:
    if virtual < 1:
        raise ValueError(
            f"{virtual} virtual workers to deal out, needed 1 or more; a job has as many as --virtual says"
        )
    if not speeds:
        raise ValueError("no worker to deal virtual workers to, needed 1 or more; wait until one has joined")
    for worker, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise ValueError(
                f"worker {worker} has the speed {speed}, needed a number of mini-batches per second above 0; "
                "leave a worker that stands still out"
            )


def _one_by_one(virtual: int, speeds: Sequence[float], least: int) -> list[int]:
    """Each virtual worker to whoever is done with it first: no other way has a shorter longest time."""
    dealt = [least] * len(speeds)
    heap = [((least + 1) / speed, worker) for worker, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(virtual - least * len(speeds)):
        _, worker = heap[0]
        dealt[worker] += 1
        heapq.heapreplace(heap, ((dealt[worker] + 1) / speeds[worker], worker))
    return dealt


def _fits(seconds: float, speed: float) -> int:
    """Mini-batches that a worker of this speed does in that time."""
    return math.floor(seconds * speed * (1 + _NEAR))


def _even(virtual: int, caps: Sequence[int], least: int) -> tuple[int, ...]:
    """Fill everyone up at the same height, nobody beyond its cap; the last few as `blocks` would."""
    dealt = [least] * len(caps)
    left = virtual - sum(dealt)
    while left:
        below = [worker for worker, cap in enumerate(caps) if dealt[worker] < cap]
        assert below, f"{caps} has no room for {virtual}"
        rest = min(left, len(below))
        for i, worker in enumerate(below):
            dealt[worker] += (i + 1) * rest // len(below) - i * rest // len(below)
        left -= rest
    return tuple(dealt)


# -- device types --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one type that a job may use."""

    count: int
    """N_i."""
    speeds: tuple[float, ...]
    """Mini-batches/s of one device that runs 1, 2, ... executors at once: C_i, and MC_i = m * C_i * I_i."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"{self.count} devices of one type, needed 0 or more")
        if not self.speeds or not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"speeds {self.speeds}, needed mini-batches per second above 0 for 1, 2, ... executors")


@dataclass(frozen=True, slots=True)
class VirtualPlan:
    """A configuration as a job proposes it (3.4.2): by device type, and what it is estimated to give."""

    virtual: int
    nums: tuple[int, ...]
    """Devices of each type."""
    executors: tuple[int, ...]
    """Executors on one device (m)."""
    threads: tuple[int, ...]
    """Most virtual workers on one executor (A_i). 0: the others are no faster with it."""
    waste: float
    """Mini-batches/s that the devices could do and do not (1c)."""
    perf: float
    """Mini-batches/s of all virtual workers together (1e)."""

    @property
    def waste_norm(self) -> float:
        """Part of what the devices could do that is wasted, 0 to 1 (1d)."""
        return self.waste / (self.waste + self.perf)

    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """Virtual workers of each device, type by type; they sum up to P."""
        caps = [
            m * threads for n, m, threads in zip(self.nums, self.executors, self.threads, strict=True) for _ in range(n)
        ]
        flat = iter(_even(self.virtual, caps, 0))
        return tuple(tuple(next(flat) for _ in range(n)) for n in self.nums)


def evaluate(
    virtual: int, groups: Sequence[DeviceGroup], executors: Sequence[int], threads: Sequence[int]
) -> VirtualPlan | None:
    """Equations 1a to 1e for one choice of executors and threads; None if not all virtual workers have a place."""
    there = [(g.count, g.speeds[m - 1], m * a) for g, m, a in zip(groups, executors, threads, strict=True) if g.count]
    capacity = sum(count * units for count, _, units in there)
    if not there or capacity < virtual:  # 1a
        return None
    overload = max(units / speed for _, speed, units in there)  # 1b
    idle = sum(count * (speed - units / overload) for count, speed, units in there)
    waste = idle + (capacity - virtual) / overload  # 1c
    total = sum(count * speed for count, speed, _ in there)
    return VirtualPlan(
        virtual=virtual,
        nums=tuple(g.count for g in groups),
        executors=tuple(executors),
        threads=tuple(threads),
        waste=waste,
        perf=total - waste,  # 1e
    )


def plan(virtual: int, groups: Sequence[DeviceGroup]) -> VirtualPlan | None:
    """The fastest way to run P virtual workers on these devices; None without devices.

    Exact: the step time is one of a short list (some executor does a whole number of mini-batches in it), and
    with more time there is never room for fewer.
    """
    if virtual < 1:
        raise ValueError(f"{virtual} virtual workers to plan for, needed 1 or more")
    times = sorted({time for group in groups if group.count for time in _times(virtual, group)})
    low, high = 0, len(times) - 1
    if high < 0:
        return None
    while low < high:
        middle = (low + high) // 2
        room = sum(g.count * max(_units(times[middle], g)) for g in groups if g.count)
        low, high = (low, middle) if room >= virtual else (middle + 1, high)
    return _within(virtual, groups, times[low])


def _times(virtual: int, group: DeviceGroup) -> Iterator[float]:
    """Step times at which one more virtual worker fits on each executor of a device."""
    for m, speed in enumerate(group.speeds, start=1):
        for threads in range(1, -(-virtual // m) + 1):
            yield threads * m / speed


def _units(seconds: float, group: DeviceGroup) -> list[int]:
    """Virtual workers that fit on one device in that time, with 1, 2, ... executors."""
    return [m * _fits(seconds, speed / m) for m, speed in enumerate(group.speeds, start=1)]


def _within(virtual: int, groups: Sequence[DeviceGroup], seconds: float) -> VirtualPlan | None:
    """A choice with room for all within this step time, of few executors: each needs memory."""
    units = [_units(seconds, group) for group in groups]
    most = [max(per) for per in units]
    spare = sum(g.count * room for g, room in zip(groups, most, strict=True)) - virtual
    executors, threads = [], []
    for group, per, room in zip(groups, units, most, strict=True):
        m = next(m for m, less in enumerate(per, start=1) if group.count * (room - less) <= spare)
        spare -= group.count * (room - per[m - 1])
        executors.append(m)
        threads.append(per[m - 1] // m)
    return evaluate(virtual, groups, executors, _trim(groups, executors, threads, spare))


def _trim(groups: Sequence[DeviceGroup], executors: Sequence[int], threads: Sequence[int], spare: int) -> list[int]:
    """Take spare room away, from the slowest devices first, so that those that are not needed show it."""
    trimmed = list(threads)
    for i in sorted(range(len(groups)), key=lambda i: groups[i].speeds[executors[i] - 1]):
        each = groups[i].count * executors[i]
        if each:
            fewer = min(trimmed[i], spare // each)
            trimmed[i] -= fewer
            spare -= fewer * each
    return trimmed
