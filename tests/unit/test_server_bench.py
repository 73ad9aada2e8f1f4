"""Questions about the future: each is worked on once, whoever asks it meanwhile."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from concertina.server import oracle
from concertina.server.oracle import Bench


def run(work: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        bench.start()
        try:
            await work(bench)
        finally:
            bench.close()

    asyncio.run(main())


def test_a_question_that_takes_long_is_worked_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "KEEP_SECONDS", 0.05)
    asked, answer = [], threading.Event()

    def think() -> int:
        asked.append(1)
        answer.wait(10.0)
        return len(asked)

    async def work(bench: Bench) -> None:
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.create_task(bench.ask("why", think)))
            await asyncio.sleep(0.1)  # longer than an answer is kept
        answer.set()
        assert await asyncio.gather(*waiting) == [1, 1, 1]
        await asyncio.sleep(0.1)
        assert await bench.ask("why", think) == 2, "an old answer is not given again"

    run(work)


def test_an_answer_is_kept_for_a_moment_and_a_failure_is_not() -> None:
    asked: list[int] = []

    def think() -> int:
        asked.append(1)
        if len(asked) == 1:
            raise ValueError("not yet")
        return len(asked)

    async def work(bench: Bench) -> None:
        with pytest.raises(ValueError, match="not yet"):
            await bench.ask("why", think)
        assert [await bench.ask("why", think) for _ in range(2)] == [2, 2]

    run(work)
