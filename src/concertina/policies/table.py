"""The snapshot by columns: what a policy is handed.

A round over thousands of jobs has to be arithmetic on arrays, not a walk over objects. Row i is the i-th
active job in order of submission, in every column. A policy reads columns and returns new ones; it
changes nothing here. `from_snapshot` builds a table from a `Snapshot`; the simulator keeps one up to date
between events, and a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from concertina.core.cluster import Snapshot
from concertina.core.job import JobSpec, JobView, Reserved
from concertina.policies.mixed_speed import mixed_speed
from concertina.policies.placement import Placer
from concertina.policies.scaling_curve import Curves, ScalingCurve

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_INTS = ("gpus", "held", "kind", "allowed", "user", "level")
_FLOATS = (
    "submit", "deadline", "estimate", "asked_speed", "mark", "resume",
    "done_0", "left_0", "speed", "service_0", "executed_0", "waiting_since", "stamp",
)  # fmt: skip


class Table:
    """Columns over the active jobs, and what there is to share out."""

    def __init__(self, types: Sequence[str], capacity: Sequence[int], room: int = 64) -> None:
        self.now = 0.0
        self.types = tuple(types)
        self.capacity = list(capacity)
        """Devices that are up, by type."""
        self.used = [0] * len(self.types)
        """Devices held, by type."""
        self.specs: list[JobSpec] = []
        self.curves: list[ScalingCurve] = []
        self.splits: dict[int, tuple[int, ...]] = {}
        """Devices by type of the jobs (by `key`) that hold more than one type."""
        self.rooms: Placer | None = None
        """Free devices node by node, to be read and copied; None where places are not tracked."""
        self.reserved: dict[str, Reserved] = {}
        """What the policy has planned for jobs, by their id."""
        self.keys: list[int] = []
        """The keeper's own number of the job in each row."""
        self._ints = np.zeros((len(_INTS), room), dtype=np.int64)
        self._floats = np.zeros((len(_FLOATS), room), dtype=np.float64)
        self._columns = self._name_columns()
        self._start = self._end = 0
        """Rows live in this part of the columns, so that taking out an early or a late row is cheap alike."""

    def __len__(self) -> int:
        return len(self.keys)

    # -- columns ---------------------------------------------------------------------------------------------

    @property
    def gpus(self) -> Ints:
        """Devices asked for."""
        return self._columns["gpus"][self._start : self._end]

    @property
    def held(self) -> Ints:
        """Devices held now; 0 for a job that waits."""
        return self._columns["held"][self._start : self._end]

    @property
    def kind(self) -> Ints:
        """Index of the device type held (of the first, if several); -1 for a job that waits."""
        return self._columns["kind"][self._start : self._end]

    @property
    def allowed(self) -> Ints:
        """Bit k is set where the job may run on type k."""
        return self._columns["allowed"][self._start : self._end]

    @property
    def user(self) -> Ints:
        """A number per user."""
        return self._columns["user"][self._start : self._end]

    @property
    def level(self) -> Ints:
        """The policy's own note about the job from an earlier round; 0 at first."""
        return self._columns["level"][self._start : self._end]

    @property
    def stamp(self) -> Floats:
        """The policy's second note; 0 at first."""
        return self._columns["stamp"][self._start : self._end]

    @property
    def submit(self) -> Floats:
        """When it was submitted."""
        return self._columns["submit"][self._start : self._end]

    @property
    def deadline(self) -> Floats:
        """Absolute; infinite without one."""
        return self._columns["deadline"][self._start : self._end]

    @property
    def asked_speed(self) -> Floats:
        """Speed on the devices asked for, on the best type that may be used."""
        return self._columns["asked_speed"][self._start : self._end]

    @property
    def speed(self) -> Floats:
        """Speed now, by the curve."""
        return self._columns["speed"][self._start : self._end]

    @property
    def resume(self) -> Floats:
        """When it goes on after its last change of devices; in the past unless it pauses just now."""
        return self._columns["resume"][self._start : self._end]

    @property
    def waiting_since(self) -> Floats:
        """Since when it holds no devices; meaningless while it holds some."""
        return self._columns["waiting_since"][self._start : self._end]

    def service(self) -> Floats:
        """Device-seconds received until now."""
        at, c = slice(self._start, self._end), self._columns
        result: Floats = c["service_0"][at] + c["held"][at] * (self.now - c["mark"][at])
        return result

    def executed(self) -> Floats:
        """Seconds with devices until now."""
        at, c = slice(self._start, self._end), self._columns
        result: Floats = c["executed_0"][at] + (c["held"][at] > 0) * (self.now - c["mark"][at])
        return result

    def done(self) -> Floats:
        """Work done until now (what the job's own reports would say)."""
        at, c = slice(self._start, self._end), self._columns
        running = np.maximum(self.now - np.maximum(c["mark"][at], c["resume"][at]), 0.0)
        result: Floats = c["done_0"][at] + c["speed"][at] * running
        return result

    def left(self) -> Floats:
        """Work that is believed to be left: the estimate less what is done, never quite nothing."""
        result: Floats = np.maximum(self._columns["estimate"][self._start : self._end] - self.done(), 1e-9)
        return result

    def time_left(self) -> Floats:
        """Seconds it is believed to need on the devices it asked for."""
        result: Floats = self.left() / self.asked_speed
        return result

    def time_left_of(self, rows: Ints) -> Floats:
        """The same for some rows only."""
        c, at = self._columns, rows + self._start
        ran = np.maximum(self.now - np.maximum(c["mark"][at], c["resume"][at]), 0.0)
        left = np.maximum(c["estimate"][at] - c["done_0"][at] - c["speed"][at] * ran, 1e-9)
        result: Floats = left / c["asked_speed"][at]
        return result

    @property
    def waiting_left(self) -> Floats:
        """The same, right for jobs that wait: a column, not a sum."""
        return self._columns["left_0"][self._start : self._end]

    def free(self) -> list[int]:
        """Devices nobody holds, by type. Below zero right after nodes were lost."""
        return [up - used for up, used in zip(self.capacity, self.used, strict=True)]

    def with_columns(self, *, deadline: Floats, level: Ints) -> Table:
        """The same jobs with other deadlines and notes, to be read only: a what-if."""
        twin = copy(self)
        twin._columns = dict(self._columns)
        for name, values in (("deadline", deadline), ("level", level)):
            twin._columns[name] = self._columns[name].copy()
            twin._columns[name][self._start : self._end] = values
        return twin

    # -- for the keeper of the table -------------------------------------------------------------------------

    @property
    def raw(self) -> dict[str, npt.NDArray[Any]]:
        """All columns to write to, by place (see `at`): the keeper's way where it is in a hurry."""
        return self._columns

    def at(self, row: int) -> int:
        """The place of a row in `raw`, until a job comes or goes."""
        return self._start + row

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column to write to by row (the keeper's business, never a policy's)."""
        return self._columns[name][self._start : self._end]

    def add(self, key: int, spec: JobSpec, curve: ScalingCurve, *, estimate: float, user: int) -> int:
        """Append a job that waits, and return its row."""
        if self._end == len(self._columns["gpus"]):
            self._make_room()
        at = self._end
        self._end += 1
        self.keys.append(key)
        self.specs.append(spec)
        self.curves.append(curve)
        allowed = allowed_types(spec, self.types)
        c = self._columns
        c["gpus"][at], c["held"][at], c["kind"][at] = spec.gpus, 0, -1
        c["allowed"][at], c["user"][at], c["level"][at] = allowed, user, 0
        c["submit"][at] = spec.submit_s
        c["deadline"][at] = np.inf if spec.deadline_s is None else spec.deadline_s
        c["estimate"][at] = estimate
        c["asked_speed"][at] = asked_speed(spec, curve, self.types, allowed)
        c["left_0"][at] = max(estimate, 1e-9) / c["asked_speed"][at]
        c["mark"][at] = c["resume"][at] = c["waiting_since"][at] = self.now
        c["done_0"][at] = c["speed"][at] = c["service_0"][at] = c["executed_0"][at] = c["stamp"][at] = 0.0
        return at - self._start

    def remove(self, row: int) -> None:
        """Take a job out; the shorter side of the columns moves up to it."""
        del self.keys[row], self.specs[row], self.curves[row]
        start, end = self._start, self._end
        at = start + row
        if row < end - at:
            if row:
                for block in (self._ints, self._floats):
                    block[:, start + 1 : at + 1] = block[:, start:at]
            self._start += 1
        else:
            if at < end - 1:
                for block in (self._ints, self._floats):
                    block[:, at : end - 1] = block[:, at + 1 : end]
            self._end -= 1

    def _make_room(self) -> None:
        """Move the rows to the front of columns that are at least twice as long as needed."""
        at, count = slice(self._start, self._end), self._end - self._start
        size = max(64, 2 * count)
        ints = np.zeros((len(_INTS), size), dtype=np.int64)
        floats = np.zeros((len(_FLOATS), size), dtype=np.float64)
        ints[:, :count], floats[:, :count] = self._ints[:, at], self._floats[:, at]
        self._ints, self._floats = ints, floats
        self._columns = self._name_columns()
        self._start, self._end = 0, count

    def _name_columns(self) -> dict[str, npt.NDArray[Any]]:
        return {
            **dict(zip(_INTS, self._ints, strict=True)),
            **dict(zip(_FLOATS, self._floats, strict=True)),
        }

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, curves: Curves) -> Table:
        """The columns of a snapshot."""
        types = snapshot.cluster.types
        up = [n for n in snapshot.cluster.nodes if n.id not in snapshot.down]
        capacity = [sum(n.slots for n in up if n.device_type == kind) for kind in types]
        table = cls(types, capacity, room=max(64, 2 * len(snapshot.jobs)))
        table.now = snapshot.now
        users = {name: i for i, name in enumerate(dict.fromkeys(v.spec.user for v in snapshot.jobs))}
        table._add_all(snapshot.jobs, [curves.of(view.spec) for view in snapshot.jobs], users)
        return table

    def _add_all(
        self, views: Sequence[JobView], curves: Sequence[tuple[ScalingCurve, float]], users: Mapping[str, int]
    ) -> None:
        """`add_view` for all of an empty table at once, by columns: a round over thousands of jobs has to be quick."""
        every = (1 << len(self.types)) - 1
        speeds: dict[tuple[int, int, int], float] = {}
        ints: list[tuple[int, ...]] = []
        floats: list[tuple[float, ...]] = []
        for view, (curve, work) in zip(views, curves, strict=True):
            spec = view.spec
            allowed = allowed_types(spec, self.types) if spec.device_types else every
            key = (id(curve), spec.gpus, allowed)
            speed = speeds.get(key)
            if speed is None:
                speed = speeds[key] = asked_speed(spec, curve, self.types, allowed)
            deadline = math.inf if spec.deadline_s is None else spec.deadline_s
            since = self.now if view.waiting_since_s is None else view.waiting_since_s
            resumes = self.now if view.resumes_s is None else max(view.resumes_s, self.now)
            left = max(work - view.work_done, 1e-9) / speed
            ints.append((spec.gpus, 0, -1, allowed, users[spec.user], view.level))
            floats.append(
                (
                    spec.submit_s, deadline, work, speed, self.now, resumes, view.work_done, left, 0.0,
                    view.service_s, view.executed_s, since, view.stamp,
                )
            )  # fmt: skip
            if view.reserved:
                self.reserved[spec.id] = view.reserved
        count = self._end = len(views)
        self.keys, self.specs = list(range(count)), [view.spec for view in views]
        self.curves = [curve for curve, _ in curves]
        if count:
            self._ints[:, :count], self._floats[:, :count] = np.array(ints).T, np.array(floats).T
        for row, view in enumerate(views):
            if view.workers:
                self.hold(row, view.workers, nodes=len(view.placement) or None)

    def add_view(self, key: int, view: JobView, curve: ScalingCurve, work: float, *, user: int) -> None:
        """Append a job with what was observed of it."""
        row = self.add(key, view.spec, curve, estimate=work, user=user)
        c, at = self._columns, self.at(row)
        c["done_0"][at], c["service_0"][at], c["executed_0"][at] = view.work_done, view.service_s, view.executed_s
        c["left_0"][at] = max(work - view.work_done, 1e-9) / c["asked_speed"][at]
        c["level"][at], c["stamp"][at] = view.level, view.stamp
        if view.reserved:
            self.reserved[view.spec.id] = view.reserved
        if view.resumes_s is not None:
            c["resume"][at] = max(view.resumes_s, self.now)
        if view.waiting_since_s is not None:
            c["waiting_since"][at] = view.waiting_since_s
        if view.workers:
            self.hold(row, view.workers, nodes=len(view.placement) or None)

    def hold(self, row: int, workers: Sequence[tuple[str, int]], *, nodes: int | None) -> None:
        """Write down what a job holds, and its speed there."""
        for kind, count in workers:
            self.used[self.types.index(kind)] += count
        self.column("held")[row] = sum(count for _, count in workers)
        self.column("kind")[row] = self.types.index(workers[0][0])
        self.column("speed")[row] = self.speed_on(row, workers, nodes)
        if len(workers) > 1:
            by_type = dict(workers)
            self.splits[self.keys[row]] = tuple(by_type.get(kind, 0) for kind in self.types)

    def speed_on(self, row: int, workers: Sequence[tuple[str, int]], nodes: int | None) -> float:
        """What the curve says about (type, devices) pairs."""
        if len(workers) == 1:
            return self.curves[row].speed(*workers[0], nodes)
        return mixed_speed(self.curves[row], workers)


def allowed_types(spec: JobSpec, types: Sequence[str]) -> int:
    """The bits of the types a job may use."""
    if not spec.device_types:
        return (1 << len(types)) - 1
    return sum(1 << i for i, kind in enumerate(types) if kind in spec.device_types)


def asked_speed(spec: JobSpec, curve: ScalingCurve, types: Sequence[str], allowed: int) -> float:
    """The best speed over the allowed types on the devices asked for; tiny where none is known."""
    speeds = [curve.speed(kind, spec.gpus) for i, kind in enumerate(types) if allowed >> i & 1]
    return max(speeds, default=0.0) or 1e-12
