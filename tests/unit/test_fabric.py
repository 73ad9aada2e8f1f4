"""Meetings through shared memory: all survivors of a crash have passed the same ones."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from concertina.runtime.fabric import MAIL, WORDS, Fabric, PeersLost, Post

MEMBERS = (3, 5, 9)


def fabrics(generation: int = 1, members: tuple[int, ...] = MEMBERS) -> dict[int, Fabric]:
    posts = [Post.create() for _ in members]
    return {member: Fabric(generation, members, member, posts) for member in members}


def together(work: Callable[[Fabric], Any], ends: dict[int, Fabric]) -> dict[int, Any]:
    """What each of them got."""
    found: dict[int, Any] = {}

    def run(member: int) -> None:
        try:
            found[member] = work(ends[member])
        except PeersLost as error:
            found[member] = error

    threads = [threading.Thread(target=run, args=(member,)) for member in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_everybody_hears_everybodys_words_in_the_order_of_ranks() -> None:
    def work(fabric: Fabric) -> list[list[list[int]]]:
        return [fabric.exchange([fabric.rank, turn]) for turn in range(50)]

    wanted = [[[rank, turn] for rank in range(3)] for turn in range(50)]
    assert together(work, fabrics()) == dict.fromkeys(MEMBERS, wanted)


def test_payloads_longer_than_a_page_arrive_whole() -> None:
    payloads = {3: b"", 5: bytes(range(256)) * 700, 9: b"x" * MAIL}
    found = together(lambda fabric: fabric.gather_bytes(payloads[MEMBERS[fabric.rank]]), fabrics())
    assert found == {member: list(payloads.values()) for member in MEMBERS}


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        fabrics(members=(3,))[3].exchange([0] * (WORDS + 1))


@pytest.mark.parametrize("posted", [0, 1, 2, 7])
@pytest.mark.parametrize("told_first", [True, False])
def test_all_survivors_pass_exactly_the_meetings_that_the_dead_one_posted(posted: int, told_first: bool) -> None:
    ends = fabrics()
    dead = ends.pop(9)
    for n in range(posted):  # posts without waiting, then dies
        dead._own.words[0] = n + 1
    if told_first:
        for fabric in ends.values():
            fabric.lose([9])

    def work(fabric: Fabric) -> int:
        passed = 0
        try:
            while True:
                fabric.meet()
                passed += 1
        except PeersLost:
            fabric.stop()
            return passed

    if not told_first:
        teller = threading.Timer(0.05, lambda: [fabric.lose([9]) for fabric in ends.values()])
        teller.start()
    assert together(work, ends) == {3: posted, 5: posted}


def test_one_that_stops_between_meetings_stops_the_others_before_they_are_told_of_the_loss() -> None:
    ends = fabrics()
    ends.pop(3).stop()  # it has missed something of worker 9's and will not come
    assert all(isinstance(found, PeersLost) for found in together(Fabric.meet, ends).values())


def test_a_generation_that_is_given_up_keeps_nobody() -> None:
    ends = fabrics()
    ends.pop(9)
    for fabric in ends.values():
        fabric.give_up()
    assert all(isinstance(found, PeersLost) for found in together(Fabric.meet, ends).values())


def test_what_a_dead_one_had_done_outside_of_meetings_still_counts() -> None:
    fabric = fabrics()[3]
    fabric.lose([9])
    fabric.wait_for(9, lambda: True)
    with pytest.raises(PeersLost):
        fabric.wait_for(9, lambda: False)


def test_a_page_of_one_who_is_gone_is_a_loss() -> None:
    own = Post.create()
    with pytest.raises(PeersLost, match="worker 5"):
        Fabric.form(1, (3, 5), 3, own, (own.segment.address, "999999999/fd/3"))


def _meet_until_killed(fabric: Fabric, lost: Any, report: Any) -> None:
    """One worker as a process of its own."""
    watcher = threading.Thread(target=lambda: (lost.wait(), fabric.lose([9])), daemon=True)
    watcher.start()
    passed = 0
    try:
        while True:
            fabric.meet()
            passed += 1
    except PeersLost:
        fabric.stop()
        report.send(passed)


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_processes_agree_when_one_is_killed_at_any_moment(delay: float) -> None:
    context = multiprocessing.get_context("fork")
    ends = fabrics()
    lost = {member: context.Event() for member in MEMBERS}  # one each: whoever is killed may hold its lock
    pipes = {member: context.Pipe(duplex=False) for member in MEMBERS}
    workers = {
        member: context.Process(
            target=_meet_until_killed, args=(ends[member], lost[member], pipes[member][1]), daemon=True
        )
        for member in MEMBERS
    }
    for worker in workers.values():
        worker.start()
    threading.Event().wait(delay)
    os.kill(workers[9].pid or 0, signal.SIGKILL)
    workers[9].join()
    lost[3].set()
    lost[5].set()
    counts = [pipes[member][0].recv() for member in (3, 5)]
    for member in (3, 5):
        workers[member].join()
    assert counts[0] == counts[1] == ends[9]._own.words[0]
