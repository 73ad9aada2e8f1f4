"""Streams of events for clients of different speed, in one loop, without sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Self

from concertina.cluster import keys
from concertina.cluster.codec import dump
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import JobRequest, JobState
from concertina.server.app import create_app
from concertina.server.auth import Caller
from concertina.server.events import Hub
from concertina.server.parts import Parts
from concertina.store.memory import MemoryStore, MemoryWatch
from concertina.store.protocol import Change

ADMIN = Caller(name="root", admin=True)
LIMIT_SECONDS = 20.0


def jobs_in(chunk: bytes) -> list[tuple[str, str]]:
    """(id, reason) of every job event."""
    found = []
    for frame in chunk.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line)
        if lines.get("event") == "job":
            data = json.loads(lines["data"])
            found.append((data["id"], data["reason"]))
    return found


class BitByBit(MemoryStore):
    """Hands history out as etcd does: not at once, and one revision at a time."""

    def watch(self, prefix: str, *, after: int) -> Any:
        return BitByBitWatch(super().watch(prefix, after=after))


class BitByBitWatch:
    def __init__(self, watch: MemoryWatch) -> None:
        self._watch, self.revision, self._asked = watch, watch.revision, False
        self._there: list[Change] = []

    def poll(self, limit_s: float) -> tuple[Change, ...]:
        if not self._asked and limit_s == 0.0:
            self._asked = True
            return ()
        self._there = self._there or [*self._watch.poll(limit_s)]
        first, self._there = self._there[:1], self._there[1:]
        self.revision = first[0].revision if first else self.revision
        return tuple(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()


def run(work: Any, store: MemoryStore | None = None) -> None:
    """`work(hub, store)` in a loop of its own."""

    async def main() -> None:
        nonlocal store
        store = store or MemoryStore()
        mirror = Mirror(store)
        for name in ("a", "b", "c"):
            store.put(keys.REQUESTS + name, dump(JobRequest(id=name, name=name, user="u", script="/s")))
        mirror.start()
        hub: Hub = create_app(Parts(store=store, mirror=mirror, state=Path("/nowhere"))).state.context.hub
        hub.start()
        try:
            await asyncio.wait_for(work(hub, store), LIMIT_SECONDS)
        finally:
            hub.close()
            mirror.close()

    asyncio.run(main())


async def say(hub: Hub, store: MemoryStore, job: str, reason: str) -> None:
    """A change, and the flush that tells of it."""
    revision = store.put(keys.STATES + job, dump(JobState(id=job, reason=reason)))
    while hub.revision < revision:
        await asyncio.sleep(0.01)


def following(stream: AsyncIterator[bytes]) -> Coroutine[Any, Any, bytes]:
    return stream.__anext__()  # type: ignore[return-value]


def test_a_slow_client_gets_everything_it_missed_once_and_as_it_is_now() -> None:
    async def work(hub: Hub, store: MemoryStore) -> None:
        slow = hub.stream(ADMIN, None)
        await following(slow)
        for job, reason in (("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")):
            await say(hub, store, job, reason)
        assert jobs_in(await following(slow)) == [("b", "2"), ("a", "3"), ("c", "4")]

    run(work)


def test_clients_that_keep_up_share_the_same_bytes() -> None:
    async def work(hub: Hub, store: MemoryStore) -> None:
        streams = [hub.stream(ADMIN, None) for _ in range(3)]
        for stream in streams:
            await following(stream)
        waiting = [asyncio.create_task(following(stream)) for stream in streams]
        await say(hub, store, "a", "1")
        chunks = await asyncio.gather(*waiting)
        assert jobs_in(chunks[0]) == [("a", "1")]
        assert all(chunk is chunks[0] for chunk in chunks)

    run(work)


def test_a_client_that_comes_back_gets_what_came_after_its_last_event() -> None:
    async def work(hub: Hub, store: MemoryStore) -> None:
        await say(hub, store, "a", "1")
        seen = hub.revision
        await say(hub, store, "b", "2")
        await say(hub, store, "a", "3")
        assert jobs_in(await following(hub.stream(ADMIN, seen))) == [("b", "2"), ("a", "3")]
        assert jobs_in(await following(hub.stream(ADMIN, hub.revision))) == []

    run(work)


def test_what_happened_before_the_server_was_there_is_told_however_slowly_the_store_hands_it_out() -> None:
    store = BitByBit()
    for job, reason in (("a", "1"), ("b", "2"), ("c", "3"), ("b", "4")):
        store.put(keys.STATES + job, dump(JobState(id=job, reason=reason)))

    async def work(hub: Hub, store: MemoryStore) -> None:
        assert jobs_in(await following(hub.stream(ADMIN, 1))) == [("a", "1"), ("b", "4"), ("c", "3")]

    run(work, store)


def test_nothing_is_remembered_of_jobs_that_were_forgotten() -> None:
    async def work(hub: Hub, store: MemoryStore) -> None:
        await say(hub, store, "a", "1")
        await say(hub, store, "b", "2")
        for prefix in (keys.REQUESTS, keys.STATES):
            store.delete(prefix + "a")
        await say(hub, store, "b", "3")
        assert [name for kind, name in hub._last if kind == "job"] == ["b"]

    run(work)
