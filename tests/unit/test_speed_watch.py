"""Who is slow, who stands still and who is silent: from signs of life to findings."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from concertina.master.machine_types import Pending, Phase, SlowFound, State, StuckFound, UnevenFound, Worker
from concertina.master.speed_watch import LASTING, PATIENCE, PREPARE_SECONDS, Finding, Sign, SpeedWatch

ARRIVE_S = 900.0


def job(shares: tuple[int, ...] = (2, 2), **more: object) -> State:
    edges = [sum(shares[:k]) for k in range(len(shares) + 1)]
    members = tuple(range(len(shares)))
    return State(
        virtual=sum(shares),
        target=len(shares),
        phase=Phase.TRAINING,
        members=members,
        shares=tuple(tuple(range(lo, hi)) for lo, hi in pairwise(edges)),
        workers={n: Worker(desk="desk", post="post") for n in members},
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def watch() -> SpeedWatch:
    return SpeedWatch(silence_s=10.0, stall_s=60.0, arrive_s=ARRIVE_S)


def train(watch: SpeedWatch, state: State, turn_s: tuple[float, ...], steps: int, first: int = 1) -> list[Finding]:
    """So many steps; what was found, in order."""
    found: list[Finding] = []
    for step in range(first, first + steps):
        for n in state.members:
            sign = Sign(generation=state.generation, step=step, turn_s=turn_s[n], turns=step, met=step)
            watch.heard(n, step * 0.1, sign)
        found += watch.findings(state, step * 0.1)
    return found


def test_even_workers_are_left_alone(watch: SpeedWatch) -> None:
    assert train(watch, job(), (0.1, 0.11), 200) == []


def test_a_worker_that_takes_three_times_as_long_is_found_well_within_20_steps(watch: SpeedWatch) -> None:
    found = train(watch, job(), (0.1, 0.3), 12)
    assert isinstance(found[0], UnevenFound)
    assert found[0].speeds == pytest.approx({0: 10.0, 1: 10 / 3})
    assert found[0].reason == "worker 1 takes 3.0 times as long as worker 0"


def test_an_imbalance_that_does_not_last_is_noise(watch: SpeedWatch) -> None:
    state = job()
    for round_ in range(10):
        first = 100 * round_ + 10
        assert train(watch, state, (0.1, 0.3), LASTING, first) == []
        assert train(watch, state, (0.1, 0.1), 3, first + LASTING) == []


def test_what_saves_next_to_nothing_is_not_worth_a_change(watch: SpeedWatch) -> None:
    assert train(watch, job(), (0.001, 0.003), 100) == []


def test_a_worker_that_has_recovered_gets_its_share_back(watch: SpeedWatch) -> None:
    found = train(watch, job((3, 1)), (0.1, 0.1), 12)
    assert isinstance(found[0], UnevenFound)


def test_a_worker_that_stays_slow_with_the_least_share_is_found_after_ten_steps(watch: SpeedWatch) -> None:
    state = job((3, 1))
    found = train(watch, state, (0.1, 0.9), 40)
    assert isinstance(found[0], SlowFound)
    assert found[0].worker == 1
    early = SpeedWatch(silence_s=10.0, stall_s=60.0, arrive_s=ARRIVE_S)
    assert train(early, state, (0.1, 0.9), PATIENCE) == []


def test_a_slow_worker_that_still_helps_stays(watch: SpeedWatch) -> None:
    assert train(watch, job((3, 1)), (0.1, 0.3), 100) == []


def test_the_minimum_is_kept(watch: SpeedWatch) -> None:
    assert train(watch, job((3, 1), minimum=2), (0.1, 0.9), 100) == []


def test_nothing_is_measured_during_a_change_or_of_another_generation(watch: SpeedWatch) -> None:
    pending = Pending(generation=1, members=(0,), shares=((0, 1, 2, 3),), joiners=(), leavers=(1,), reason="")
    assert train(watch, job(pending=pending), (0.1, 0.9), 50) == []
    newer = job(generation=3)
    for n in newer.members:
        watch.heard(n, 0.0, Sign(generation=2, step=60, turn_s=0.1 + n, turns=60))
    assert watch.findings(newer, 6.0) == []


def test_a_silent_worker_is_found_once(watch: SpeedWatch) -> None:
    state = job()
    train(watch, state, (0.1, 0.1), 5)
    watch.heard(0, 10.0)
    found = watch.findings(state, 10.8)
    assert [f.worker for f in found if isinstance(f, StuckFound)] == [1]
    assert watch.findings(state, 10.9) == []


def test_a_worker_that_has_not_arrived_may_take_its_time(watch: SpeedWatch) -> None:
    state = job((4,))
    state = State(virtual=4, target=1, workers={0: Worker()}, members=(0,), shares=state.shares)
    assert watch.findings(state, 0.0) == []
    assert watch.findings(state, ARRIVE_S - 1) == []
    assert len(watch.findings(state, ARRIVE_S + 1)) == 1


@pytest.mark.parametrize("ready", [False, True])
def test_a_newcomer_that_never_reaches_its_loop_is_given_up(watch: SpeedWatch, ready: bool) -> None:
    newcomer = Worker(desk="desk", post="post", ready=ready)
    pending = Pending(generation=2, members=(0, 1, 2), shares=((0,), (1,), (2,)), joiners=(2,), leavers=(), reason="")
    state = job((1, 2), pending=pending)
    state = replace(state, workers={**state.workers, 2: newcomer})

    def at(now: float) -> list[Finding]:
        for n in state.workers:
            watch.heard(n, now, Sign(generation=1, met=int(now)) if n < 2 else Sign())
        return watch.findings(state, now)

    assert at(0.0) == at(PREPARE_SECONDS) == []
    found = at(PREPARE_SECONDS + 5.0)
    wanted = StuckFound(2, "worker 2 had not reached its training loop 1805 s after its start")
    assert found == ([] if ready else [wanted])


@pytest.mark.parametrize(
    ("in_round", "met", "found"),
    [(True, 7, [1]), (False, 7, []), (True, 8, [])],
    ids=["in a step", "outside, evaluating", "waiting like the others"],
)
def test_a_worker_that_others_wait_for_within_a_step_is_found(
    watch: SpeedWatch, in_round: bool, met: int, found: list[int]
) -> None:
    state = job()
    for now in range(80):
        watch.heard(0, float(now), Sign(generation=0, step=4, met=8))
        watch.heard(1, float(now), Sign(generation=0, step=4, met=met, in_round=in_round))
        seen = watch.findings(state, float(now))
        if now <= 60:
            assert seen == []
        elif seen:
            break
    assert [f.worker for f in seen] == found


# -- links between workers -------------------------------------------------------------------------------------------


def complain(watch: SpeedWatch, now: float, *, of: int = 0, seconds: float = 60.0) -> None:
    for n in range(3):
        cut = ((of, seconds),) if n == 1 else ()
        watch.heard(n, now, Sign(waits_s=60.0, cut=cut))


def cut_off(watch: SpeedWatch, state: State, now: float) -> list[int]:
    return [finding.worker for finding in watch.findings(state, now) if isinstance(finding, StuckFound)]


def test_a_worker_that_is_let_go_for_a_link_is_found_once_and_what_it_says_counts_no_more(watch: SpeedWatch) -> None:
    state = job((1, 1, 1))
    complain(watch, 1.0)
    assert cut_off(watch, state, 1.0) == [1]
    complain(watch, 1.5, of=2)
    assert cut_off(watch, state, 1.5) == []


def test_a_complaint_that_was_not_repeated_counts_no_more(watch: SpeedWatch) -> None:
    state = job((1, 1, 1))
    complain(watch, 1.0)
    for n in range(3):
        watch.heard(n, 4.0)  # it is alive, and has said nothing about itself
    assert cut_off(watch, state, 4.0) == []


def test_a_link_that_has_been_down_for_less_than_the_limit_of_silence_costs_nobody(watch: SpeedWatch) -> None:
    state = job((1, 1, 1))
    complain(watch, 1.0, seconds=9.9)
    assert cut_off(watch, state, 1.0) == []
    hasty = SpeedWatch(silence_s=0.5, stall_s=60.0, arrive_s=ARRIVE_S)
    complain(hasty, 1.0, seconds=3.9)
    assert cut_off(hasty, state, 1.0) == []  # the ends of a link do not notice within such a time


def test_signs_of_life_cross_the_network_as_json() -> None:
    sign = Sign(generation=3, waits_s=1.5, cut=((4, 2.5), (7, 0.0)))
    fields = {name: getattr(sign, name) for name in sign.__dataclass_fields__}
    assert Sign.from_json(json.loads(json.dumps(fields))) == sign
    assert Sign.from_json({"step": 3}) == Sign(step=3)
