"""Synthetic traces: the same for a seed, with the load and the statistics that were asked for."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from concertina.core.job import JobSpec
from concertina.simulator.generate import FAMILIES, Recipe, generate, parse_recipe, synthetic_trace
from concertina.simulator.readers import TraceError


def _load(jobs: tuple[JobSpec, ...], gpus: int) -> float:
    asked = math.fsum(job.gpus * (job.duration_s or 0) for job in jobs)
    return asked / (gpus * (jobs[-1].submit_s - jobs[0].submit_s))


def test_the_same_seed_gives_the_same_jobs_and_another_seed_others() -> None:
    assert generate(Recipe(seed=3)) == generate(Recipe(seed=3))
    assert generate(Recipe(seed=3)) != generate(Recipe(seed=4))


def test_the_first_job_of_a_seed_stays_what_it_was() -> None:
    """A trace named in a paper or a bug report must be the same next year."""
    job = generate(Recipe(jobs=3, seed=1))[0]
    assert job == JobSpec(id="job-0", submit_s=16.771, gpus=1, user="team-0", duration_s=2954.165)


@pytest.mark.parametrize("arrivals", ["poisson", "diurnal"])
@pytest.mark.parametrize("like", FAMILIES)
def test_the_load_is_the_one_asked_for(like: str, arrivals: str) -> None:
    jobs = generate(Recipe(jobs=3000, load=0.7, gpus=256, like=like, arrivals=arrivals))
    assert len(jobs) == 3000
    assert _load(jobs, 256) == pytest.approx(0.7, rel=0.01)
    assert all(a.submit_s <= b.submit_s for a, b in pairwise(jobs))


PUBLISHED = [
    # family, share of one-device jobs, median duration of those in s, mean duration over all in s
    ("philly", 0.9317, 1117, 12_200),
    ("itp", 0.8248, 7722, 20_200),
    ("modelarts", 16 / 31, None, 232.6 * 60),
]


@pytest.mark.parametrize(("like", "single", "median", "mean"), PUBLISHED)
def test_sizes_and_durations_follow_the_published_figures(
    like: str, single: float, median: float | None, mean: float
) -> None:
    jobs = generate(Recipe(jobs=20_000, like=like, gpus=512))
    ones = sorted(job.duration_s or 0 for job in jobs if job.gpus == 1)
    assert len(ones) / len(jobs) == pytest.approx(single, abs=0.01)
    assert math.fsum(job.duration_s or 0 for job in jobs) / len(jobs) == pytest.approx(mean, rel=0.12)
    if median:
        assert ones[len(ones) // 2] == pytest.approx(median, rel=0.05)


def test_durations_have_a_heavy_tail() -> None:
    lasting = sorted((job.duration_s or 0 for job in generate(Recipe(jobs=10_000, like="philly"))), reverse=True)
    assert math.fsum(lasting[:500]) > 0.5 * math.fsum(lasting)  # one job in twenty takes more than half the time


def test_diurnal_arrivals_are_denser_by_day_and_rarer_on_weekends() -> None:
    jobs = generate(Recipe(jobs=20_000, gpus=64, arrivals="diurnal"))
    whole = [job for job in jobs if job.submit_s < jobs[-1].submit_s // (7 * 86_400) * 7 * 86_400]
    by_day = sum(10 <= job.submit_s % 86_400 / 3600 < 18 for job in whole) / 8
    by_night = sum(not 6 <= job.submit_s % 86_400 / 3600 < 22 for job in whole) / 8
    weekend = sum(job.submit_s // 86_400 % 7 >= 5 for job in whole) / 2
    assert by_day / by_night == pytest.approx(1.37 / 0.63, rel=0.1)
    assert weekend / ((len(whole) - 2 * weekend) / 5) == pytest.approx(0.5, rel=0.1)


def test_poisson_arrivals_have_exponential_gaps() -> None:
    jobs = generate(Recipe(jobs=20_000, arrivals="poisson"))
    gaps = [b.submit_s - a.submit_s for a, b in pairwise(jobs)]
    mean = math.fsum(gaps) / len(gaps)
    assert math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean == pytest.approx(1, abs=0.05)


def test_deadlines_are_as_many_and_as_tight_as_asked() -> None:
    jobs = generate(Recipe(jobs=5000, deadlines=0.3, soft=0.5, tight=1.2, loose=2.0))
    having = [job for job in jobs if job.deadline_s is not None]
    assert len(having) / len(jobs) == pytest.approx(0.3, abs=0.03)
    assert sum(job.soft for job in having) / len(having) == pytest.approx(0.5, abs=0.05)
    slack = [((job.deadline_s or 0) - job.submit_s) / (job.duration_s or 1) for job in having]
    assert 1.199 < min(slack) < 1.21
    assert 1.99 < max(slack) < 2.001


def test_no_job_is_larger_than_the_cluster() -> None:
    assert max(job.gpus for job in generate(Recipe(jobs=5000, gpus=4))) == 4


def test_users_are_as_many_as_asked_and_unequal() -> None:
    users = [job.user for job in generate(Recipe(jobs=5000, users=3))]
    assert users.count("team-0") / users.count("team-2") == pytest.approx(3, rel=0.15)
    assert set(users) == {"team-0", "team-1", "team-2"}


def test_a_name_is_a_recipe_and_a_trace() -> None:
    assert parse_recipe("synthetic:jobs=20, seed=4,load=0.5,like=philly") == Recipe(
        jobs=20, seed=4, load=0.5, like="philly"
    )
    trace = synthetic_trace("synthetic:jobs=20,gpus=64")
    assert (len(trace.jobs), trace.cluster, trace.name) == (20, "8x8", "synthetic:jobs=20,gpus=64")
    assert synthetic_trace("synthetic:").jobs == generate(Recipe())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("synthetic:jobs=many", "jobs=many; needed a whole number"),
        ("synthetic:load=nan", "load=nan; needed a finite number"),
        ("synthetic:load=0", "load=0.0; needed more than 0"),
        ("synthetic:jobs=0", "jobs=0; needed 1 or more"),
        ("synthetic:like=mars", "like=mars; needed one of philly, itp, modelarts"),
        ("synthetic:tight=2,loose=1", "loose=1.0; needed at least tight"),
        ("synthetic:speed=3", "'speed'; needed key=value with one of jobs, seed"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_in_one_sentence(name: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        synthetic_trace(name)
