"""Allocation models against each other and against the paper's own, on small generated problems.

The paper's form (section 4.4: two indicators and a big M for each job, step and size) is kept here alone, as
an oracle. It has no solution where jobs outnumber nodes, and it lets no job wait.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.policies.allocation_model import (
    AllocationProblem,
    Columns,
    ElasticJob,
    Solution,
    fill,
    marginal_gain,
    paper_job,
    progress,
    shed,
)
from concertina.policies.allocation_prices import choose, price
from concertina.policies.milp import branch, solve

FEW = settings(max_examples=25, deadline=None)
MANY = settings(max_examples=60, deadline=None)


@st.composite
def jobs(draw: st.DrawFn) -> ElasticJob:
    """Any sizes and speeds, dents included."""
    sizes = sorted(draw(st.sets(st.sampled_from((1, 2, 3, 4, 8)), min_size=1, max_size=3)))
    speeds = [draw(st.integers(1, 40)) / 10 for _ in sizes]
    return ElasticJob(work=draw(st.integers(1, 60)) / 10, sizes=tuple(sizes), speeds=tuple(speeds))


@st.composite
def problems(draw: st.DrawFn, most: int = 6, most_steps: int = 4) -> AllocationProblem:
    members = tuple(draw(st.lists(jobs(), min_size=1, max_size=most)))
    least = sum(job.sizes[0] for job in members)
    may_wait = draw(st.booleans())
    return AllocationProblem(
        jobs=members,
        nodes=draw(st.integers(0 if may_wait else least, least + 12)),
        steps=draw(st.integers(1, most_steps)),
        step=0.5,
        may_wait=may_wait,
    )


@st.composite
def papers_problems(draw: st.DrawFn) -> AllocationProblem:
    demands = draw(st.lists(st.integers(2, 40), min_size=1, max_size=3))
    return AllocationProblem(
        jobs=tuple(paper_job(demand / 10, (1, 2, 4)) for demand in demands),
        nodes=draw(st.integers(len(demands), 4 * len(demands))),
        steps=draw(st.integers(1, 3)),
        step=0.25,
        may_wait=False,
    )


def papers_optimum(problem: AllocationProblem) -> float:
    """The final formulation of section 4.4, literally; n_min is 1 and n_max the largest size."""
    sizes = problem.jobs[0].sizes
    big = sizes[-1] + 1.0
    solver: Any = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    progressed = []
    nodes: list[list[Any]] = [[] for _ in range(problem.steps)]
    for job in problem.jobs:
        before: Any = 0.0
        for t in range(problem.steps):
            n = solver.addIntegral(lb=1, ub=sizes[-1])
            s = solver.addVariable(lb=0, ub=job.work)
            minus, plus = ({k: solver.addBinary() for k in sizes} for _ in range(2))
            for k in sizes:
                for delta, side in ((minus[k], n - k), (plus[k], k - n)):
                    solver.addConstr((1 - delta) * (1 / big) - big * delta <= side)
                    solver.addConstr(side <= big * (1 - delta))
            solver.addConstr(sum(minus.values()) + sum(plus.values()) == len(sizes) + 1)
            speeds = zip(sizes, job.speeds, strict=True)
            done = sum(problem.step * speed * (minus[k] + plus[k] - 1) for k, speed in speeds)
            solver.addConstr(s <= before + done)
            progressed.append(s * (1 / job.work))
            nodes[t].append(n)
            before = s
    for together in nodes:
        solver.addConstr(sum(together) <= problem.nodes)
    solver.maximize(sum(progressed))
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value)


def best_by_hand(problem: AllocationProblem) -> float:
    """Every allocation there is."""
    waits = (0,) if problem.may_wait else ()
    courses = [list(product((*waits, *job.sizes), repeat=problem.steps)) for job in problem.jobs]
    every = (plan for plan in product(*courses) if np.sum(plan, axis=0).max() <= problem.nodes)
    return max(progress(problem, plan) for plan in every)


def check_allocation(problem: AllocationProblem, found: Solution) -> None:
    """Legal sizes, never more nodes than exist, and worth what it says."""
    for job, plan in zip(problem.jobs, found.nodes, strict=True):
        assert len(plan) == problem.steps
        assert set(plan) <= {*job.sizes, *((0,) if problem.may_wait else ())}
    assert np.asarray(found.nodes).sum(axis=0).max() <= problem.nodes
    assert progress(problem, found.nodes) == pytest.approx(found.objective, abs=1e-9)
    assert found.objective <= found.bound


@FEW
@given(papers_problems())
def test_our_form_and_the_papers_agree(problem: AllocationProblem) -> None:
    assert branch(problem).objective == pytest.approx(papers_optimum(problem), abs=1e-4)


@FEW
@given(problems(most=2, most_steps=2))
def test_the_solver_finds_the_best_of_all_allocations(problem: AllocationProblem) -> None:
    best = best_by_hand(problem)
    assert branch(problem).objective == pytest.approx(best, abs=1e-6)
    assert solve(problem, gap=1e-6).objective == pytest.approx(best, abs=1e-5)


@MANY
@given(problems())
def test_prices_never_exceed_their_bound_nor_the_bound_falls_below_the_best(
    problem: AllocationProblem,
) -> None:
    found = price(problem)
    check_allocation(problem, found)
    best = branch(problem)
    check_allocation(problem, best)
    assert found.bound >= best.objective - 1e-9


@MANY
@given(problems(most=3), st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_any_prices_bound_the_best(problem: AllocationProblem, prices: list[int]) -> None:
    columns = Columns(problem)
    wanted, bound = choose(columns, np.asarray(prices[: problem.steps]) / 20, np.ones(len(columns)))
    assert bound >= branch(problem).objective - 1e-9
    if np.all(columns.sizes_of(wanted).sum(axis=0) == problem.nodes):
        assert columns.worth(wanted).sum() == pytest.approx(bound)


@MANY
@given(problems(), st.randoms(use_true_random=False))
def test_shedding_and_filling_keep_within_the_nodes_whatever_was_wanted(
    problem: AllocationProblem, random: Any
) -> None:
    columns = Columns(problem)
    wanted = np.asarray(
        [[random.randint(columns.first, len(job.sizes)) for _ in range(problem.steps)] for job in problem.jobs]
    )
    fitted = shed(columns, wanted)
    filled = fill(columns, fitted)
    check_allocation(problem, columns.solution(filled, np.inf, "any"))
    assert columns.worth(filled).sum() >= columns.worth(fitted).sum()
    assert np.all((columns.sizes_of(wanted).sum(axis=0) > problem.nodes) | (fitted == wanted).all(axis=0))


@MANY
@given(problems())
def test_marginal_gain_is_legal_and_never_above_the_best(problem: AllocationProblem) -> None:
    found = marginal_gain(problem)
    check_allocation(problem, found)
    assert found.objective <= branch(problem).objective + 1e-6


@FEW
@given(problems())
def test_the_same_problem_has_the_same_answer(problem: AllocationProblem) -> None:
    assert solve(problem, gap=1e-4) == solve(problem, gap=1e-4)
