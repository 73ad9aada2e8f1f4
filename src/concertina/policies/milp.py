"""The best shares over a look-ahead horizon, planned anew every few minutes.

Hu et al., "An optimal resource allocator of elastic training for deep learning jobs on cloud", section 4. The
paper's model picks powers of two with two indicator variables and a big M for each job, step and size; here
one binary variable stands for each choice, which says the same, solves several times as fast and lets jobs
wait where there are more of them than nodes. The only file that knows a solver, and it is asked only where
prices alone (`allocation_prices.py`) leave too wide a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from concertina.core.errors import ConcertinaError
from concertina.policies.allocation_model import AllocationProblem, Columns, ElasticJob, Solution
from concertina.policies.allocation_prices import price
from concertina.policies.base import Shares
from concertina.policies.rolling import Sizing, deal_types, is_moment, next_moment, stamped
from concertina.policies.table import Floats, Ints, Table


class NoSolverError(ConcertinaError):
    """The solver is needed and not installed."""

    def __init__(self) -> None:
        super().__init__("highspy is not installed; try pip install 'concertina[milp]'")


class SolverError(ConcertinaError):
    """The solver stopped without an answer."""

    def __init__(self, *, status: str) -> None:
        super().__init__(f"the solver stopped without an allocation: {status}")
        self.status = status


def solve(
    problem: AllocationProblem,
    *,
    gap: float = 0.01,
    most_nodes: int = 100_000,
    clock: Callable[[], float] = lambda: 0.0,
) -> Solution:
    """An allocation whose objective is within `gap` of the proven bound (relative), and that bound.

    Prices first; the solver, from there, only if their gap is wider. `most_nodes` limits the solver's search
    tree (never the time, so that the same problem has the same answer); where that stops it early, the
    gap of the solution tells.
    """
    started = clock()
    found = price(problem)
    if found.gap > gap:
        found = branch(problem, start=found, gap=gap, most_nodes=most_nodes)
    return replace(found, seconds=clock() - started)


def branch(
    problem: AllocationProblem,
    *,
    start: Solution | None = None,
    gap: float = 1e-6,
    most_nodes: int = 100_000,
) -> Solution:
    """Branch and bound over one binary variable for each (job, step, size)."""
    try:
        import highspy  # here, so that who never plans needs no solver
    except ImportError as missing:
        raise NoSolverError from missing
    columns = Columns(problem)
    if not len(columns):
        return columns.solution(columns.least(), 0.0, "highs")
    model = _Model(columns, may_wait=problem.may_wait)
    solver = _solver(highspy)
    for option, value in (
        ("output_flag", False), ("threads", 1), ("mip_rel_gap", gap), ("mip_max_nodes", most_nodes),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    solver.passModel(model.as_lp(highspy))
    if start is not None:
        given = highspy.HighsSolution()
        given.col_value = model.values(start).tolist()
        solver.setSolution(given)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SolverError(status=solver.modelStatusToString(solver.getModelStatus()))
    choice = model.choices(np.asarray(solver.getSolution().col_value))
    bound = float(info.mip_dual_bound)
    return columns.solution(choice, min(bound, start.bound) if start else bound, "highs")


def _solver(highspy: Any) -> Any:
    """A new solver. (The library is typed in part only.)"""
    return highspy.Highs()


class _Model:
    """Variables: x for each (job, step, choice above waiting), then s, the progress, for each (job, step)."""

    def __init__(self, columns: Columns, *, may_wait: bool) -> None:
        self.columns, self.may_wait = columns, may_wait
        steps = columns.steps
        job = np.repeat(np.arange(len(columns)), columns.count * steps)
        within = np.concatenate([np.arange(count * steps) for count in columns.count.tolist()])
        self.job: Ints = job
        self.step: Ints = within // columns.count[job]
        self.choice: Ints = within % columns.count[job] + 1

    def as_lp(self, highspy: Any) -> Any:
        """Maximise the sum of s, subject to capacity, one choice each, and progress by what is chosen."""
        columns, steps, picks = self.columns, self.columns.steps, len(self.job)
        pairs = len(columns) * steps
        pair = self.job * steps + self.step
        later = np.flatnonzero(np.arange(pairs) % steps)
        rows, cols, values = (
            np.concatenate(parts)
            for parts in zip(
                (self.step, np.arange(picks), columns.size[self.job, self.choice]),  # capacity
                (steps + pair, np.arange(picks), np.ones(picks)),  # one choice
                (steps + pairs + pair, np.arange(picks), -columns.gain[self.job, self.choice]),  # progress
                (steps + pairs + np.arange(pairs), picks + np.arange(pairs), np.ones(pairs)),
                (steps + pairs + later, picks + later - 1, -np.ones(len(later))),
                strict=True,
            )
        )
        order = np.lexsort((rows, cols))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = picks + pairs, steps + 2 * pairs
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.col_cost_ = np.repeat((0.0, 1.0), (picks, pairs))
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
        lp.row_lower_ = np.repeat((-np.inf, 0.0 if self.may_wait else 1.0, -np.inf), (steps, pairs, pairs))
        lp.row_upper_ = np.repeat((float(columns.nodes), 1.0, 0.0), (steps, pairs, pairs))
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger] * picks + [kinds.kContinuous] * pairs
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(cols[order], np.arange(lp.num_col_ + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order], values[order]
        return lp

    def values(self, start: Solution) -> Floats:
        """The variables of a solution."""
        columns = self.columns
        nodes: Ints = np.asarray(start.nodes, dtype=np.int64)
        picked = columns.size[self.job, self.choice] == nodes[self.job, self.step]
        gain = np.zeros(nodes.shape)
        np.add.at(gain, (self.job, self.step), picked * columns.gain[self.job, self.choice])
        done = np.minimum(np.cumsum(gain, axis=1), 1.0)
        values: Floats = np.concatenate([picked.astype(np.float64), done.ravel()])
        return values

    def choices(self, values: Floats) -> Ints:
        """The choice of every job in every step."""
        chosen: Ints = np.zeros((len(self.columns), self.columns.steps), dtype=np.int64)
        picked = np.flatnonzero(values[: len(self.job)] > 0.5)
        chosen[self.job[picked], self.step[picked]] = self.choice[picked]
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpPolicy:
    """Plans a horizon ahead, carries out its first step, and plans again."""

    name: str = "milp"
    paper: str = "Hu et al. (2021), section 4"
    admission: str = "fits-elastic"
    period_s: float = 300.0
    """Time between two plans, and length of a step."""
    steps: int = 5
    """How far it looks ahead."""
    most: int = 16
    """Devices a job may grow to, if it did not ask for more."""
    gap: float = 0.01
    """How far from the best a plan may be, relative."""

    def allocate(self, table: Table) -> Shares:
        """The queue always, all shares anew at their moments."""
        sizing, moment = Sizing(table, self.most), is_moment(table, self.period_s)
        sizing.repair()
        if moment:
            for kind, rows in enumerate(deal_types(sizing, table.capacity)):
                if rows:
                    self._plan(sizing, kind, rows)
        sizing.start_waiting()
        return Shares(
            workers=sizing.workers,
            kind=sizing.kind,
            stamp=stamped(table, moment),
            wake_s=next_moment(table, self.period_s, sizing.workers),
        )

    def explain(self, table: Table, row: int, before: int, after: int) -> str:
        """What it brings."""
        ahead = f"over the next {self.period_s * self.steps / 60:g} minutes"
        if after > before:
            return f"{after} devices bring more progress here than elsewhere {ahead}, or are idle"
        if after < before:
            return f"{before - after} of its devices bring more progress elsewhere {ahead}"
        return f"a device for it would bring less progress than where it is now {ahead}"

    def _plan(self, sizing: Sizing, kind: int, rows: list[int]) -> None:
        """Resize the jobs of one device type to the first step of the best plan."""
        left = sizing.table.left()
        ladders = [sizing.ladder(row, kind) for row in rows]
        jobs = tuple(
            ElasticJob(work=float(left[row]), sizes=sizes, speeds=speeds)
            for row, (sizes, speeds) in zip(rows, ladders, strict=True)
        )
        nodes = sizing.table.capacity[kind]
        problem = AllocationProblem(
            jobs=jobs,
            nodes=nodes,
            steps=self.steps,
            step=self.period_s,
            may_wait=sum(job.sizes[0] for job in jobs) > nodes,
        )
        for row, plan in zip(rows, solve(problem, gap=self.gap).nodes, strict=True):
            sizing.resize(row, kind, plan[0])
