"""A real interface on a free loopback port, over a store in memory, without or with a controller of a few lines."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from concertina.cli.serve import listen, url_of
from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import Ask, ClusterState, JobRequest, JobState, NodeState, Op, Reply
from concertina.core.job import JobPhase
from concertina.server.app import create_app
from concertina.server.parts import Parts
from concertina.server.serve import Server
from concertina.store.lease import leader_key
from concertina.store.memory import MemoryStore
from concertina.store.protocol import Store

LIMIT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One that answers."""

    url: str
    store: Store
    mirror: Mirror
    state: Path
    http: httpx.Client

    def submit(self, script: Path, **more: Any) -> dict[str, Any]:
        answer = self.http.post("/api/v1/jobs", json={"script": str(script), **more})
        assert answer.status_code in (201, 202), answer.text
        found: dict[str, Any] = answer.json()
        return found

    def put(self, key: str, record: Any) -> None:
        """What a controller or keeper would write, and the mirror has it."""
        revision = self.store.put(key, dump(record))
        assert self.mirror.wait(revision - 1, LIMIT_SECONDS) >= revision


@contextmanager
def interface(state: Path, store: Store | None = None, port: int = 0, **more: Any) -> Iterator[Interface]:
    store = store or MemoryStore()
    mirror = Mirror(store)
    mirror.start()
    sock = listen("127.0.0.1", port)
    url = url_of("127.0.0.1", sock.getsockname()[1])
    server = Server(create_app(Parts(**{"store": store, "mirror": mirror, "state": state, **more})), sock)
    thread = threading.Thread(target=server.run, name="interface")
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS, trust_env=False) as http:
            http.get("/healthz")  # all its threads are there then: none of them begins in a test, as a leak would
            yield Interface(url=url, store=store, mirror=mirror, state=state, http=http)
    finally:
        server.stop()
        thread.join(LIMIT_SECONDS)
        mirror.close()
        store.close()
    assert not thread.is_alive()


class Stub:
    """In place of a controller: takes every job at once, refuses those named `refuse`, obeys asks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asks: list[Ask] = []
        self.silent = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        store.put(leader_key(keys.CONTROLLER), b"stub")
        store.put(keys.CLUSTER, dump(ClusterState(policy="concertina", backend="local", controller="stub")))
        store.put(keys.NODES + "here", dump(NodeState(id="here", device_type="cpu", slots=4)))

    def __enter__(self) -> "Stub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(LIMIT_SECONDS)

    def _run(self) -> None:
        at = 0
        while not self._ends.is_set():
            with self.store.watch("", after=at) as watch:
                for change in watch.poll(0.05):
                    if change.value is not None and not self.silent:
                        self._obey(change.key, change.value)
                at = watch.revision

    def _obey(self, key: str, value: bytes) -> None:
        if key.startswith(keys.REQUESTS):
            request = load(JobRequest, value)
            no = request.name == "refuse"
            state = JobState(
                id=request.id,
                phase=JobPhase.REJECTED if no else JobPhase.WAITING,
                reason="too late: 4 slots are not enough" if no else "it waits for a slot",
                earliest_s=time.time() + 60 if no else None,
            )
            self.store.compare_and_set(keys.STATES + request.id, dump(state), expected=0)
        elif key.startswith(keys.ASKS):
            self._answer(load(Ask, value))

    def _answer(self, ask: Ask) -> None:
        self.asks.append(ask)
        entry = self.store.get(keys.STATES + ask.target) if ask.target else None
        if entry is not None:
            state = load(JobState, entry.value)
            change: dict[str, Any] = {"phase": JobPhase.CANCELLED, "reason": "cancelled"} if ask.op is Op.CANCEL else {}
            change |= {"pinned": ask.number} if ask.op is Op.RESIZE else {}
            self.store.put(keys.STATES + ask.target, dump(replace(state, **change)))
        accepted = not (ask.op is Op.RECLAIM and ask.number > 4)
        reason = "done" if accepted else "there are 4 slots"
        self.store.put(keys.ANSWERS + ask.id, dump(Reply(id=ask.id, accepted=accepted, reason=reason)))
        self.store.delete(keys.ASKS + ask.id)
