"""Who gets how many nodes in which step of a look-ahead horizon, as data: the problem and its solutions.

Hu et al., "An optimal resource allocator of elastic training for deep learning jobs on cloud", section 4:
maximise the progress of all jobs, summed over jobs and steps, where progress is the share of the remaining
work that is done by the end of the step. Beyond the paper, every job has sizes and speeds of its own and
may wait. `marginal_gain` finds a good allocation quickly; `policies/allocation_prices.py` finds better ones
with a proven bound, `policies/milp.py` the best. Nothing here knows of a clock, a policy or a solver.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from concertina.core.errors import ConcertinaError
from concertina.policies.scaling_curve import law
from concertina.policies.table import Floats, Ints

PAPER_SIZES = (1, 2, 4, 8, 16)
"""The paper's legal numbers of nodes."""
_NOTHING = 1e-12
"""A gain for each node below which a move is rounding error."""
_ROUNDING = 1e-6
"""Of a bound, relative: a solver's tolerance."""


class NoAllocationError(ConcertinaError):
    """The jobs that may not wait need more nodes than there are."""

    def __init__(self, *, needed: int, nodes: int) -> None:
        super().__init__(f"jobs that may not wait need {needed} nodes at least, there are {nodes}; let them wait")
        self.needed, self.nodes = needed, nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What is left to do, and how fast that goes."""

    work: float
    """Above 0, in any unit."""
    sizes: tuple[int, ...]
    """Numbers of nodes it can run on, rising."""
    speeds: tuple[float, ...]
    """Work per unit of time on each size, each above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.work < float("inf"):
            raise ValueError(f"work is {self.work}, needed a finite number above 0")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes are {self.sizes}, needed rising whole numbers from 1 on")
        if len(self.speeds) != len(self.sizes) or not all(0 < s < float("inf") for s in self.speeds):
            raise ValueError(f"speeds are {self.speeds}, needed one above 0 for each of {self.sizes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationProblem:
    """Jobs, nodes, and a horizon of equal steps."""

    jobs: tuple[ElasticJob, ...]
    nodes: int
    steps: int = 5
    step: float = 5 / 60
    """Length of a step, in the unit of time of the speeds."""
    may_wait: bool = True
    """Whether a job may hold no nodes in a step. The paper's model gives every job its least size always."""

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.steps < 1 or not self.step > 0:
            raise ValueError(f"{self.nodes} nodes, {self.steps} steps of {self.step}: needed 0, 1, above 0")
        if not self.may_wait and self.least_nodes > self.nodes:
            raise NoAllocationError(needed=self.least_nodes, nodes=self.nodes)

    @property
    def least_nodes(self) -> int:
        """What all jobs need to run at once."""
        return sum(job.sizes[0] for job in self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An allocation, what it is worth, and what no allocation can exceed."""

    nodes: tuple[tuple[int, ...], ...]
    """Nodes of each job in each step; 0: it waits."""
    objective: float
    bound: float
    """Proven: no allocation has a larger objective."""
    method: str = ""
    """How it was found."""
    seconds: float = 0.0
    """By the clock that was handed in; 0 without one."""

    @property
    def gap(self) -> float:
        """How far the objective may be below the best, relative to the bound."""
        return (self.bound - self.objective) / self.bound if self.bound > 0 else 0.0


def paper_job(demand: float, sizes: Sequence[int] = PAPER_SIZES) -> ElasticJob:
    """A job by the paper's law: one node does one unit, each doubling keeps 0.8 of the speed per node."""
    return ElasticJob(work=demand, sizes=tuple(sizes), speeds=tuple(law(size) for size in sizes))


class Columns:
    """The problem as arrays. Choice 0 of a job is to wait, choice c its c-th size."""

    def __init__(self, problem: AllocationProblem) -> None:
        jobs = problem.jobs
        self.nodes, self.steps = problem.nodes, problem.steps
        self.first = 0 if problem.may_wait else 1
        """The least choice there is."""
        self.count: Ints = np.asarray([len(job.sizes) for job in jobs], dtype=np.int64)
        width = int(self.count.max(initial=0)) + 1
        self.size: Ints = np.zeros((len(jobs), width), dtype=np.int64)
        self.gain: Floats = np.zeros((len(jobs), width))
        """Share of the job's work that one step on this choice does."""
        kinds: dict[tuple[int, ...], list[int]] = {}
        for row, job in enumerate(jobs):
            kinds.setdefault(job.sizes, []).append(row)
        self.alike: list[tuple[tuple[int, ...], Ints]] = []
        """Jobs with the same sizes, together."""
        for sizes, members in kinds.items():
            rows: Ints = np.asarray(members, dtype=np.int64)
            self.alike.append((sizes, rows))
            self.size[rows, 1 : len(sizes) + 1] = sizes
            speed = np.asarray([jobs[row].speeds for row in members])
            work = np.asarray([[jobs[row].work] for row in members])
            self.gain[rows, 1 : len(sizes) + 1] = problem.step * speed / work

    def __len__(self) -> int:
        return len(self.count)

    def least(self) -> Ints:
        """Every job on its least choice in every step."""
        return np.full((len(self), self.steps), self.first, dtype=np.int64)

    def sizes_of(self, choice: Ints) -> Ints:
        """Nodes of each job in each step."""
        sizes: Ints = np.take_along_axis(self.size, choice, axis=1)
        return sizes

    def worth(self, choice: Ints) -> Floats:
        """Progress of each job, summed over the steps."""
        done = np.cumsum(np.take_along_axis(self.gain, choice, axis=1), axis=1)
        worth: Floats = np.minimum(done, 1.0).sum(axis=1)
        return worth

    def solution(self, choice: Ints, bound: float, method: str) -> Solution:
        """These choices as a checked solution."""
        nodes = self.sizes_of(choice)
        assert not len(self) or int(nodes.sum(axis=0).max()) <= self.nodes, "more nodes than there are"
        objective = float(self.worth(choice).sum())
        assert objective <= bound + _ROUNDING * max(bound, 1.0), "above its bound"
        return Solution(
            nodes=tuple(map(tuple, nodes.tolist())),
            objective=objective,
            bound=max(bound, objective),
            method=method,
        )


def progress(problem: AllocationProblem, nodes: Sequence[Sequence[int]]) -> float:
    """What an allocation is worth, by the definition, job by job."""
    total = 0.0
    for job, sizes in zip(problem.jobs, nodes, strict=True):
        speed, done = dict(zip(job.sizes, job.speeds, strict=True)), 0.0
        for size in sizes:
            done += problem.step * speed[size] if size else 0.0
            total += min(done, job.work) / job.work
    return total


def simple_bound(columns: Columns) -> float:
    """What every job would make of the whole cluster alone."""
    fastest = np.where(columns.size <= columns.nodes, columns.gain, 0.0).max(axis=1, initial=0.0)
    done = np.minimum(fastest[:, None] * np.arange(1, columns.steps + 1), 1.0)
    return float(done.sum())


def marginal_gain(problem: AllocationProblem) -> Solution:
    """From nothing, always the enlargement of one job in one step that gains most for each node."""
    columns = Columns(problem)
    return columns.solution(fill(columns, columns.least()), simple_bound(columns), "marginal gain")


def fill(columns: Columns, choice: Ints) -> Ints:
    """Hand out the nodes that `choice` leaves free, by gain for each node."""
    return _Climb(columns, choice).up()


def shed(columns: Columns, choice: Ints) -> Ints:
    """Take nodes back where `choice` uses more than there are, by loss for each node."""
    return _Climb(columns, choice).down()


_Move = tuple[float, int, int, int]
"""(key, job, step, choice)"""


class _Climb:
    """One allocation that is being changed move by move.

    A gain never grows and a loss never shrinks while all moves go one way, because progress stops at the end
    of the work: so a key on the heap is a bound, and it is enough to compute a move anew when it comes up.
    """

    def __init__(self, columns: Columns, choice: Ints) -> None:
        self.first, self.steps = columns.first, columns.steps
        self.size: list[list[int]] = columns.size.tolist()
        self.gain: list[list[float]] = columns.gain.tolist()
        self.count: list[int] = columns.count.tolist()
        self.choice: list[list[int]] = choice.tolist()
        used = columns.sizes_of(choice).sum(axis=0)
        self.free: list[int] = (columns.nodes - used).tolist()
        self.shape = choice.shape

    def up(self) -> Ints:
        """Enlarge while something fits."""
        heap = [m for job in range(len(self.choice)) for t in range(self.steps) if (m := self._more(job, t))]
        heapq.heapify(heap)
        while heap:
            move = heapq.heappop(heap)
            _, job, t, to = move
            now = self._more(job, t)
            if now is not None and now != move:
                heapq.heappush(heap, now)
            elif now is not None:
                self._set(job, t, to)
                again = self._more(job, t)
                if again is not None:
                    heapq.heappush(heap, again)
        return self._result()

    def down(self) -> Ints:
        """Diminish while some step uses too many."""
        for t in range(self.steps):
            if self.free[t] >= 0:
                continue
            heap = [m for job in range(len(self.choice)) if (m := self._less(job, t))]
            heapq.heapify(heap)
            while self.free[t] < 0:
                move = heapq.heappop(heap)
                now = self._less(move[1], t)
                if now == move:
                    self._set(move[1], t, move[3])
                    now = self._less(move[1], t)
                if now is not None:
                    heapq.heappush(heap, now)
        return self._result()

    def _set(self, job: int, t: int, to: int) -> None:
        size = self.size[job]
        self.free[t] -= size[to] - size[self.choice[job][t]]
        self.choice[job][t] = to

    def _more(self, job: int, t: int) -> _Move | None:
        """The best enlargement that fits; the key is less the gain for each node."""
        size, now, free = self.size[job], self.choice[job][t], self.free[t]
        best: _Move | None = None
        if free <= 0:
            return None
        left = self._left(job, t)
        had = self._brings(job, now, left)
        for to in range(now + 1, self.count[job] + 1):
            extra = size[to] - size[now]
            if extra > free:
                break
            key = (had - self._brings(job, to, left)) / extra
            if key < -_NOTHING and (best is None or key < best[0]):
                best = (key, job, t, to)
        return best

    def _less(self, job: int, t: int) -> _Move | None:
        """The diminution that loses least for each node."""
        size, now = self.size[job], self.choice[job][t]
        best: _Move | None = None
        left = self._left(job, t)
        had = self._brings(job, now, left)
        for to in range(self.first, now):
            key = (had - self._brings(job, to, left)) / (size[now] - size[to])
            if best is None or key < best[0]:
                best = (key, job, t, to)
        return best

    def _left(self, job: int, t: int) -> list[float]:
        """What would be left of the job at the end of step t and of each later one if it waited in t."""
        gain, choice = self.gain[job], self.choice[job]
        left = 1.0 - sum(gain[choice[step]] for step in range(t))
        found = [left]
        for step in range(t + 1, self.steps):
            left -= gain[choice[step]]
            found.append(left)
        return [some for some in found if some > 0]

    def _brings(self, job: int, choice: int, left: list[float]) -> float:
        """Progress that this choice in one step adds, over that step and the later ones."""
        gain = self.gain[job][choice]
        return sum([gain if gain < some else some for some in left])

    def _result(self) -> Ints:
        return np.asarray(self.choice, dtype=np.int64).reshape(self.shape)
