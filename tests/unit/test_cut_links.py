"""Whom a job lets go when workers cannot reach each other."""

from dataclasses import replace

import pytest

from concertina.master.cut_links import Complaint, cut_off, whom_to_let_go
from concertina.master.machine_types import Pending, Phase, Stage, State, StuckFound, Worker

LIMIT_S = 10.0


def job(members: tuple[int, ...] = (0, 1, 2), **more: object) -> State:
    return State(
        virtual=4,
        target=len(members),
        phase=Phase.TRAINING,
        members=members,
        workers={n: Worker(desk="desk") for n in members},
        **more,  # type: ignore[arg-type]
    )


def growing(stage: Stage = Stage.BUILDING, **more: object) -> State:
    """Workers 3 and 4 are to join 0, 1 and 2."""
    pending = Pending(
        generation=1, members=(0, 1, 2, 3, 4), shares=(), joiners=(3, 4), leavers=(), reason="", stage=stage, **more
    )  # type: ignore[arg-type]
    state = job(pending=pending)
    return replace(state, workers={n: Worker(desk="desk") for n in pending.members})


def told(waits_s: float = 60.0, **cut: dict[int, float]) -> dict[int, Complaint]:
    """Five workers; `w1={0: 12.0}`: worker 1 has not reached worker 0 for 12 seconds."""
    return {n: Complaint(waits_s=waits_s, cut=cut.get(f"w{n}", {})) for n in range(5)}


def gone(found: list[StuckFound]) -> list[int]:
    return [finding.worker for finding in found]


def test_of_two_that_are_cut_from_each_other_the_one_without_virtual_worker_0_goes() -> None:
    (found,) = cut_off(job(), told(w0={1: 12.0}), LIMIT_S)
    assert found == StuckFound(1, "worker 1 and worker 0 have not reached each other for 12.0 s")


def test_it_does_not_matter_which_end_complains() -> None:
    for said in (told(w0={1: 12.0}), told(w1={0: 12.0}), told(w0={1: 12.0}, w1={0: 11.0})):
        assert gone(cut_off(job(), said, LIMIT_S)) == [1]


def test_one_that_reaches_nobody_goes_even_if_it_is_the_main_worker() -> None:
    assert gone(cut_off(job(), told(w0={1: 12.0, 2: 11.0}), LIMIT_S)) == [0]
    assert gone(cut_off(job(), told(w1={0: 12.0}, w2={0: 12.0}), LIMIT_S)) == [0]


def test_links_that_the_ends_notice_later_count_too() -> None:
    """Otherwise worker 1 would go for the link that was noticed first, and then the next one."""
    assert gone(cut_off(job(), told(w0={1: 10.1, 2: 6.0}), LIMIT_S)) == [0]


def test_a_link_that_has_just_broken_does_not() -> None:
    assert gone(cut_off(job((0, 1, 2, 3, 4)), told(w0={1: 10.1}, w2={3: 0.5}), LIMIT_S)) == [1]


def test_two_hosts_that_are_cut_from_each_other_lose_the_one_with_fewer_workers() -> None:
    cut = {f"w{n}": {3: 12.0, 4: 12.0} for n in (0, 1, 2)}
    assert gone(cut_off(job((0, 1, 2, 3, 4)), told(**cut), LIMIT_S)) == [3, 4]
    assert gone(cut_off(job((3, 4, 0, 1, 2)), told(**cut), LIMIT_S)) == [3, 4]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (job(), told()),
        (job(), told(w0={1: 9.9})),
        (job(), told(waits_s=9.9, w0={1: 60.0})),
        (job(), {n: said for n, said in told(w0={1: 60.0}).items() if n != 1}),
        (job(), told(w0={4: 60.0})),
        (job(), told(w0={0: 60.0})),
        (job(exits={2: 0}), told(w0={1: 60.0})),
        (job(interrupted=True), told(w0={1: 60.0})),
        (replace(job(), phase=Phase.STOPPING), told(w0={1: 60.0})),
        (growing(Stage.STARTING), told(w0={3: 60.0})),
    ],
    ids=[
        "all links are up",
        "not for long enough",
        "nobody waits, as while the main worker evaluates and the others still compute",
        "one end is not heard",
        "with somebody who is no member",
        "with itself",
        "the first has come to its end",
        "the job is being interrupted",
        "the job is ending",
        "newcomers need not reach anybody yet",
    ],
)
def test_nobody_goes(state: State, said: dict[int, Complaint]) -> None:
    assert cut_off(state, said, LIMIT_S) == []


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.TRAINING, Phase.REGROUPING])
def test_a_link_is_missed_in_every_phase_in_which_workers_meet(phase: Phase) -> None:
    assert gone(cut_off(replace(job(), phase=phase), told(w0={1: 12.0}), LIMIT_S)) == [1]


def test_newcomers_go_rather_than_those_who_have_the_state_and_nobody_has_to_wait_for_them() -> None:
    assert gone(cut_off(growing(), told(waits_s=0.0, w0={3: 12.0, 4: 12.0}), LIMIT_S)) == [3, 4]
    assert gone(cut_off(growing(Stage.ARMED), told(waits_s=0.0, w4={1: 12.0}), LIMIT_S)) == [4]


def test_newcomers_that_have_changed_over_are_members() -> None:
    state = growing(Stage.ARMED, switched=(0, 1, 2, 3, 4))
    assert gone(cut_off(state, told(w0={3: 12.0, 4: 12.0}), LIMIT_S)) == [0]


def test_the_fewest_go_where_the_one_with_the_most_cut_links_is_not_among_them() -> None:
    """Worker 0 is cut from 1, 2 and 3, and each of these from one more: letting 0 go saves nothing."""
    pairs = {(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6)}
    assert whom_to_let_go(pairs, tuple(range(7))) == (1, 2, 3)


def test_large_jobs_are_decided_quickly_enough() -> None:
    """Half of 256 workers from the other half, and a tangle for which there is no quick way."""
    halves = {(a, b) for a in range(128) for b in range(128, 256)}
    assert whom_to_let_go(halves, tuple(range(256))) == tuple(range(128, 256))
    tangle = {(min(a, b), max(a, b)) for a in range(120) for k in (1, 7, 31, 43) if (b := (a * 3 + k) % 120) != a}
    found = set(whom_to_let_go(tangle, tuple(range(120))))
    assert all(found & set(pair) for pair in tangle)
