"""Work that has time: done in a thread that lets others go first."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from concertina.runtime.unhurried import LOW_PRIORITY, Unhurried

PATIENCE = 20.0
GIVE_WAY = """
import os, sys, threading
os.nice(int(sys.argv[1]))  # for threads that are still to come, which libraries may begin when they are imported
from concertina.runtime.unhurried import give_way
ends = threading.Event()
threading.Thread(target=ends.wait).start()
give_way()
found = {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")}
print(threading.active_count(), found)
ends.set()
"""


@pytest.fixture
def unhurried() -> Iterator[Unhurried]:
    made = Unhurried()
    yield made
    made.close()


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_it_works_at_low_priority_and_whoever_asks_keeps_its_own(unhurried: Unhurried) -> None:
    before, there = priority(), []
    unhurried.do(lambda: there.append(priority()))
    assert there == [max(LOW_PRIORITY, before)]
    assert priority() == before


def test_whoever_waits_hears_what_went_wrong(unhurried: Unhurried) -> None:
    def fails() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        unhurried.do(fails)


def test_what_nobody_waits_for_is_done_in_order_and_its_errors_are_told(
    unhurried: Unhurried, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []

    def fails() -> None:
        raise OSError("gone")

    unhurried.later(lambda: done.append(1))
    unhurried.later(fails)
    unhurried.do(lambda: done.append(2))
    assert done == [1, 2]
    assert "OSError: gone" in capfd.readouterr().err


def test_after_the_end_nothing_is_begun(unhurried: Unhurried) -> None:
    done: list[int] = []
    unhurried.do(lambda: done.append(1))
    unhurried.close()
    unhurried.later(lambda: done.append(2))
    assert done == [1]


@pytest.mark.parametrize("before", [0, LOW_PRIORITY + 2])
def test_a_process_that_gives_way_does_so_with_all_its_threads_and_never_comes_forward(before: int) -> None:
    command = [sys.executable, "-c", GIVE_WAY, str(before)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert found.stdout.split() == ["2", str({max(LOW_PRIORITY, min(19, priority() + before))})], found.stderr
