"""Shares over a horizon: known optima, hand-worked cases, and what is refused."""

from __future__ import annotations

import builtins
from itertools import count

import numpy as np
import pytest
from benchmarks.milp import REFERENCES, reference

from concertina.policies.allocation_model import (
    AllocationProblem,
    Columns,
    ElasticJob,
    NoAllocationError,
    marginal_gain,
    paper_job,
    progress,
    simple_bound,
)
from concertina.policies.allocation_prices import MOST_COURSES, find_prices, price
from concertina.policies.milp import NoSolverError, branch, solve


def used(nodes: tuple[tuple[int, ...], ...]) -> list[int]:
    return np.asarray(nodes).sum(axis=0).tolist()


@pytest.mark.parametrize(("size", "best"), REFERENCES.items())
def test_reference_instances_are_solved_within_one_per_cent_with_a_proof(size: tuple[int, int], best: float) -> None:
    problem = reference(*size)
    found = solve(problem)
    assert found.objective >= 0.99 * best
    assert best - 0.0005 <= found.bound <= found.objective / 0.99
    assert progress(problem, found.nodes) == pytest.approx(found.objective, abs=1e-9)
    assert max(used(found.nodes)) <= size[1]


def test_the_smallest_reference_instance_is_solved_to_the_optimum_by_the_solver() -> None:
    found = branch(reference(40, 70), gap=1e-4)
    assert found.objective == pytest.approx(38.713, abs=0.0005)
    assert found.bound == pytest.approx(found.objective, rel=2e-4)


def test_prices_close_the_gap_where_jobs_are_many() -> None:
    assert price(reference(1_000, 2_000)).gap < 0.001
    assert price(reference(1_000, 500, may_wait=True)).gap < 0.001


def test_equal_jobs_may_choose_differently() -> None:
    """One price for all would send all of them the same way: too many nodes, or too few."""
    problem = AllocationProblem(jobs=(paper_job(5.0),) * 60, nodes=90)
    assert price(problem).gap < 0.01


def test_jobs_of_a_few_kinds_are_told_apart_by_varied_prices() -> None:
    problem = AllocationProblem(jobs=(*map(paper_job, (0.3, 0.5, 2.0)),) * 12, nodes=54, steps=4)
    assert price(problem).gap < 0.002  # 0.007 without


def test_prices_do_not_run_away_where_only_one_allocation_is_left() -> None:
    """Any price from some level on is as good; a huge one would lose the bound in rounding."""
    small = ElasticJob(work=0.8, sizes=(1,), speeds=(0.1,))
    large = ElasticJob(work=0.9, sizes=(4, 8), speeds=(0.1, 1.5))
    problem = AllocationProblem(jobs=(small, large), nodes=5, steps=1, step=0.5, may_wait=False)
    assert find_prices(Columns(problem)).tolist() <= [1.0]
    assert price(problem).bound == pytest.approx(0.05 / 0.8 + 0.05 / 0.9, abs=1e-12)


def test_kinds_of_jobs_too_rare_for_the_sample_are_priced_all_the_same() -> None:
    few = tuple(paper_job(2.0 + i, (1, 2, 4)) for i in range(2))
    many = tuple(paper_job(0.2 + i / 100, (1, 2, 4, 8, 16)) for i in range(900))
    assert price(AllocationProblem(jobs=(*few, *many), nodes=1_200)).gap < 0.001
    each_its_own = tuple(paper_job(0.2 + i / 100, tuple(range(1 + i, 4 + i))) for i in range(400))
    assert price(AllocationProblem(jobs=each_its_own, nodes=1_200)).gap < 0.1


def test_one_job_takes_what_speeds_it_up_and_no_more() -> None:
    slow_when_large = ElasticJob(work=100.0, sizes=(1, 2, 4), speeds=(1.0, 1.5, 1.2))
    problem = AllocationProblem(jobs=(slow_when_large,), nodes=8, steps=3, step=1.0)
    for found in (marginal_gain(problem), price(problem), branch(problem)):
        assert found.nodes == ((2, 2, 2),)
        assert found.objective == pytest.approx((1.5 + 3.0 + 4.5) / 100)


def test_a_job_that_is_done_gives_its_nodes_to_the_next() -> None:
    short, long = (ElasticJob(work=work, sizes=(2,), speeds=(1.0,)) for work in (1.0, 10.0))
    problem = AllocationProblem(jobs=(long, short), nodes=2, steps=3, step=1.0)
    for found in (marginal_gain(problem), solve(problem, gap=1e-6)):
        assert found.nodes == ((0, 2, 2), (2, 0, 0))
        assert found.objective == pytest.approx(3 + 0.1 + 0.2)


def test_jobs_wait_where_there_are_more_of_them_than_nodes() -> None:
    jobs = tuple(paper_job(demand) for demand in (1.0, 1.1, 3.0, 4.0))
    found = solve(AllocationProblem(jobs=jobs, nodes=2))
    assert found.gap <= 0.01
    assert [row[0] for row in found.nodes] == [1, 1, 0, 0]
    with pytest.raises(NoAllocationError, match="need 4 nodes at least, there are 2") as caught:
        AllocationProblem(jobs=jobs, nodes=2, may_wait=False)
    assert (caught.value.needed, caught.value.nodes) == (4, 2)


def test_no_jobs_and_no_nodes_are_problems_too() -> None:
    nobody = AllocationProblem(jobs=(), nodes=4)
    nothing = AllocationProblem(jobs=(paper_job(1.0),), nodes=0)
    for find in (marginal_gain, price, branch, solve):
        assert find(nobody).nodes == ()  # type: ignore[operator]
        assert find(nothing).nodes == ((0,) * 5,)  # type: ignore[operator]
        assert find(nothing).gap == 0.0  # type: ignore[operator]


def test_the_simple_bound_is_every_job_alone_on_the_cluster() -> None:
    problem = AllocationProblem(jobs=(paper_job(1.0), paper_job(1.0, (8,))), nodes=4, steps=2, step=0.5)
    assert simple_bound(Columns(problem)) == pytest.approx(2.0)  # 4 nodes: 2.56 an hour; the other never fits


def test_solve_says_how_long_it_took_by_the_clock_it_is_given() -> None:
    ticks = count(10.0, 2.5)
    problem = AllocationProblem(jobs=(paper_job(1.0),), nodes=1)
    assert solve(problem, clock=lambda: next(ticks)).seconds == 2.5
    assert solve(problem).seconds == 0.0


def test_the_solver_is_asked_only_where_prices_leave_a_gap() -> None:
    problem = reference(5, 8, may_wait=True)
    gap = price(problem).gap
    assert gap > 1e-4
    assert solve(problem, gap=gap).method == "prices"
    found = solve(problem, gap=gap / 2)
    assert found.method == "highs"
    assert found.gap <= gap / 2


def test_a_missing_solver_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name == "highspy":
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NoSolverError, match=r"pip install 'concertina\[milp\]'"):
        branch(AllocationProblem(jobs=(paper_job(1.0),), nodes=1))


def test_too_many_courses_are_refused_instead_of_listed() -> None:
    job = paper_job(1.0, tuple(range(1, 14)))
    with pytest.raises(ValueError, match=f"more than {MOST_COURSES} courses"):
        price(AllocationProblem(jobs=(job,), nodes=4))


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"work": 0.0}, "work is 0.0"),
        ({"work": float("inf")}, "work is inf"),
        ({"sizes": ()}, "sizes are"),
        ({"sizes": (2, 1)}, "sizes are"),
        ({"sizes": (0, 1)}, "sizes are"),
        ({"speeds": (1.0,)}, "speeds are"),
        ({"speeds": (1.0, 0.0)}, "speeds are"),
    ],
)
def test_a_job_that_can_not_be_is_refused(fields: dict[str, object], seen: str) -> None:
    with pytest.raises(ValueError, match=seen):
        ElasticJob(**{"work": 1.0, "sizes": (1, 2), "speeds": (1.0, 1.6), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"nodes": -1}, {"steps": 0}, {"step": 0.0}])
def test_a_horizon_that_can_not_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needed 0, 1, above 0"):
        AllocationProblem(**{"jobs": (), "nodes": 1, **fields})  # type: ignore[arg-type]
