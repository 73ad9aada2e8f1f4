"""Slots that are taken away and given again every few seconds: promises stay in front, starts are not wasted."""

import random

import pytest
from tests.property.timed_cluster import Incoming, TimedCluster

KINDS = {
    "mlp": {1: 1.24, 2: 2.47, 3: 3.66, 4: 4.86},
    "digits": {1: 1.24, 2: 2.41, 3: 3.43, 4: 4.46},
    "chars": {1: 1.22, 2: 1.75, 3: 2.47, 4: 3.20},
}
STEPS = {"mlp": 32, "digits": 22, "chars": 40}  # in an epoch


def jobs_like_those_of_the_live_trace(seed: int, count: int = 20) -> list[Incoming]:
    chance, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        kind, epochs = chance.choice([("mlp", 3), ("mlp", 4), ("digits", 5), ("digits", 8), ("chars", 2), ("chars", 3)])
        steps, due = STEPS[kind] * epochs, None
        if chance.random() < 0.5:
            due = round(at + 60 + chance.choice((3.0, 6.0, 9.0, 12.0)) * steps * 0.2, 1)
        found.append(Incoming(f"{kind}-{number:02d}", round(at, 1), kind, steps, due))
        at += chance.uniform(0.4, 1.6) * 20
    return found


@pytest.mark.parametrize(("seed", "launch_s", "reclaims"), [(1, 10.0, 60), (2, 18.0, 60), (3, 5.0, 20)])
def test_nobody_without_a_promise_is_given_slots_past_a_promise_that_was_lost(
    seed: int, launch_s: float, reclaims: int
) -> None:
    """Not so for every seed: a short job that is behind its fair time may fill a gap that the plan of the lost ones
    leaves, if they end no later by that plan (574 with starts of 10 s and 60 reclaims)."""
    cluster = TimedCluster(KINDS, launch_s=launch_s)
    cluster.play(jobs_like_those_of_the_live_trace(seed), reclaims=reclaims)
    assert not cluster.unfair


def test_a_promised_job_that_loses_slots_every_few_seconds_is_not_starved() -> None:
    cluster = TimedCluster(KINDS, launch_s=18.0)
    cluster.play(jobs_like_those_of_the_live_trace(8), reclaims=60)
    late = {job: cluster.late_by(job) for job, state in cluster.world.states.items() if state.promised_s is not None}
    assert cluster.world.turns > 1000
    assert max(late.values()) < 240.0, late  # 554 s before it was kept in front
    assert not cluster.unfair


@pytest.mark.parametrize("policy", ["concertina", "elasticflow", "srtf", "greedy", "tiresias"])
def test_no_policy_stops_a_job_for_one_without_a_promise_before_its_start_was_worth_it(policy: str) -> None:
    cluster = TimedCluster(KINDS, launch_s=10.0, policy=policy)
    cluster.play(jobs_like_those_of_the_live_trace(3))
    for job, state in cluster.world.states.items():
        begun_s = None
        for line in state.history:
            if line.workers and begun_s is None:
                begun_s = line.at_s
            elif not line.workers and begun_s is not None:
                whole = line.at_s - begun_s >= 15.0 or state.ended_s == line.at_s
                assert whole or cluster.promised_at(line.at_s), f"{job}: {line}"
                begun_s = None
