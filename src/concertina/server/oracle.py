"""Why, when and what if: answered by running the policy forward (concertina.questions), away from the event loop.

An answer costs up to a second of computing. So few are worked on at once, few wait, and one that was just given is
given again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from concertina.cluster.records import JobRequest
from concertina.questions import Eta, Quote
from concertina.server.errors import ApiError
from concertina.server.threads import start_threads

T = TypeVar("T")

AT_ONCE = 1  # more would only share the same core
WAITING = 16
KEEP_SECONDS = 2.0
KEEP = 256
LIMIT_SECONDS = 10.0  # less than the commands wait, so that they hear why there is no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    sentence: str
    eta: Eta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    quote: Quote
    profiled: bool  # how fast such a job is has been measured


class Oracle(Protocol):
    """Called from a thread, one call at a time. Raises ConcertinaError with a sentence for people."""

    def why(self, job_id: str) -> Why: ...

    def quote(self, request: JobRequest) -> Offer: ...


class NoOracle:
    """Where there is no controller to ask: a mirror alone does not know the policy."""

    def why(self, job_id: str) -> Why:
        raise ApiError(
            503, "no_oracle", "this server can not look ahead", "ask the server that `concertina up` started"
        )

    def quote(self, request: JobRequest) -> Offer:
        raise ApiError(
            503, "no_oracle", "this server can not look ahead", "ask the server that `concertina up` started"
        )


@dataclass(slots=True)
class _Asked:
    """A question, from when it is asked until its answer is forgotten."""

    task: asyncio.Task[object] | None = None
    answered: float | None = None  # when, by the loop's clock

    def is_good(self, now: float) -> bool:
        """Whether its answer, or the one to come, will do."""
        if self.answered is not None:
            return now - self.answered < KEEP_SECONDS
        return self.task is not None and not self.task.done()


class Bench:
    """Where questions are worked on: one thread, a short queue, a short memory."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Hashable, _Asked] = OrderedDict()
        self._waiting = 0

    def start(self) -> None:
        self._pool = start_threads(AT_ONCE, "concertina-oracle")

    def close(self) -> None:
        """Does not wait for an answer in the making: it ends by itself, and nobody hears it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def ask(self, key: Hashable, work: Callable[[], T]) -> T:
        """The answer to this question, perhaps one in the making or of a moment ago. Raises ApiError 503 when too many
        wait."""
        asked = self._kept.get(key)
        if asked is None or not asked.is_good(asyncio.get_running_loop().time()):
            if self._waiting >= WAITING:
                raise ApiError(503, "busy", f"{WAITING} questions wait already", "ask again in a few seconds")
            self._kept[key] = asked = _Asked()
            asked.task = asyncio.create_task(self._work(asked, work))
            self._kept.move_to_end(key)
            while len(self._kept) > KEEP:
                self._kept.popitem(last=False)
        assert asked.task is not None
        try:
            return await asyncio.wait_for(asyncio.shield(asked.task), LIMIT_SECONDS)  # type: ignore[arg-type]
        except TimeoutError:
            raise ApiError(503, "busy", "the answer takes too long", "ask again in a few seconds") from None

    async def _work(self, asked: _Asked, work: Callable[[], T]) -> object:
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._pool, work)
            asked.answered = loop.time()
            return found
        finally:
            self._waiting -= 1
