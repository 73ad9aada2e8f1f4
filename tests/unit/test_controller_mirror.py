"""The mirror of the store, and records as JSON and back."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.mirror import KINDS, Mirror
from concertina.cluster.records import (
    Activity,
    Ask,
    ClusterState,
    Curve,
    JobRequest,
    JobSeen,
    JobState,
    NodeState,
    Op,
)
from concertina.core.errors import HistoryGone, StoreUnavailable
from concertina.core.job import JobPhase
from concertina.store import Store, open_store
from concertina.store.protocol import Change

RECORDS = sorted({*KINDS.values(), ClusterState}, key=lambda kind: kind.__name__)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RECORDS).flatmap(st.from_type))
def test_every_record_is_the_same_after_a_trip_through_the_store(record: Any) -> None:
    assert repr(load(type(record), dump(record))) == repr(record)  # words, since no number equals NaN


def test_fields_of_a_newer_writer_are_passed_over() -> None:
    raw = dump(Curve(key="k", speeds={2: 1.5})).replace(b'{"key"', b'{"colour":"red","key"')
    assert load(Curve, raw) == Curve(key="k", speeds={2: 1.5})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"id":"a","phase":"dancing"}', b"\xff"])
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        load(JobState, raw)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    address = "memory:" if request.param == "memory" else f"sqlite:{tmp_path / 'cluster.db'}"
    with open_store(address) as found:
        yield found


@pytest.fixture
def mirror(store: Store) -> Iterator[Mirror]:
    found = Mirror(store)
    found.start()
    yield found
    found.close()


def follow(mirror: Mirror, there: Callable[[], bool]) -> None:
    assert mirror.wait_until(there, 10.0)


def request(name: str, at: float = 0.0) -> JobRequest:
    return JobRequest(id=name, name=name, user="u", script="s.py", submitted_s=at)


def test_the_mirror_shows_what_was_there_and_what_comes(store: Store, mirror: Mirror) -> None:
    store.put(keys.REQUESTS + "b", dump(request("b", 2.0)))
    revision = store.put(keys.REQUESTS + "a", dump(request("a", 1.0)))
    follow(mirror, lambda: mirror.revision >= revision)
    assert [job.id for job in mirror.jobs()] == ["a", "b"]
    job = mirror.job("a")
    assert job is not None
    assert (job.state.phase, job.seen) == (JobPhase.SUBMITTED, None)
    assert mirror.revision_of(keys.REQUESTS + "a") == revision
    seen = JobSeen(id="a", attempt=1, activity=Activity.TRAINING, speeds={2: 3.5})
    store.put(keys.STATES + "a", dump(JobState(id="a", phase=JobPhase.RUNNING, slots=("n/0",))))
    store.put(keys.SEEN + "a", dump(seen))
    follow(mirror, lambda: mirror.seen("a") == seen)
    found = mirror.job("a")
    assert found is not None
    assert found.state.slots == ("n/0",)
    other = Mirror(store)
    other.start()
    assert [j.id for j in other.jobs()] == ["a", "b"], "a second one has all at once"
    other.close()


def test_everything_in_the_cluster_has_its_place(store: Store, mirror: Mirror) -> None:
    store.put(keys.CLUSTER, dump(ClusterState(policy="fifo", backend="local", lent=("n/1",))))
    store.put(keys.NODES + "n", dump(NodeState(id="n", device_type="cpu", slots=2)))
    store.put(keys.CURVES + "k", dump(Curve(key="k", speeds={1: 1.0})))
    store.put(keys.ASKS + "2", dump(Ask(id="2", op=Op.DRAIN, user="u", at_s=2.0)))
    last = store.put(keys.ASKS + "1", dump(Ask(id="1", op=Op.CANCEL, user="u", at_s=1.0)))
    follow(mirror, lambda: mirror.revision >= last)
    assert mirror.cluster is not None
    assert mirror.cluster.lent == ("n/1",)
    assert [node.id for node in mirror.nodes()] == ["n"]
    assert [ask.id for ask in mirror.asks()] == ["1", "2"]
    assert mirror.curve("k") == mirror.curves()["k"]
    store.delete(keys.ASKS + "1")
    store.delete(keys.CLUSTER)
    follow(mirror, lambda: mirror.cluster is None and len(mirror.asks()) == 1)
    assert mirror.revision_of(keys.ASKS + "1") == 0


def test_a_record_that_can_not_be_read_hides_no_other(store: Store, mirror: Mirror) -> None:
    store.put(keys.STATES + "bad", b"\xff{")
    store.put("somebody/else", b"1")
    revision = store.put(keys.REQUESTS + "a", dump(request("a")))
    follow(mirror, lambda: mirror.revision >= revision)
    assert [job.id for job in mirror.jobs()] == ["a"]


def test_listeners_hear_every_change_in_order(store: Store, mirror: Mirror) -> None:
    heard: list[Change] = []
    mirror.listen(heard.append)
    names = [f"j{i}" for i in range(50)]
    for name in names:
        store.put(keys.REQUESTS + name, dump(request(name)))
    follow(mirror, lambda: len(heard) == 50)
    assert [keys.job_of(change.key) for change in heard] == names


class Flaky:
    """A store that is away for a while, or has forgotten what was watched."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.away.is_set() and name == "watch":
            raise StoreUnavailable("away")
        return getattr(self._store, name)


def test_a_store_that_was_away_is_caught_up_with(store: Store) -> None:
    flaky = Flaky(store)
    flaky.away.set()
    mirror = Mirror(flaky)  # type: ignore[arg-type]
    mirror.start()
    store.put(keys.REQUESTS + "a", dump(request("a")))
    assert not mirror.wait_until(lambda: bool(mirror.jobs()), 0.5)
    assert mirror.stale_since is not None
    flaky.away.clear()
    follow(mirror, lambda: bool(mirror.jobs()))
    mirror.close()
    assert mirror.stale_since is None


def test_more_changes_than_the_store_keeps_are_taken_all_at_once() -> None:
    store = open_store("memory:")
    flaky = Flaky(store)
    first = replace(request("a"), name="old")
    store.put(keys.REQUESTS + "a", dump(first))
    store.put(keys.REQUESTS + "gone", dump(request("gone")))
    mirror = Mirror(flaky)  # type: ignore[arg-type]
    flaky.away.set()
    mirror.start()
    store.delete(keys.REQUESTS + "gone")
    for i in range(5000):
        store.put("busy", b"%d" % i)
    store.put(keys.REQUESTS + "a", dump(replace(first, name="new")))
    flaky.away.clear()
    follow(mirror, lambda: [job.request.name for job in mirror.jobs()] == ["new"])
    mirror.close()
    store.close()


class Torn:
    """A store whose first watch is too far behind, and that then does not answer once."""

    def __init__(self, store: Store) -> None:
        self._store, self._watches, self._lists = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def watch(self, prefix: str, *, after: int) -> Any:
        self._watches += 1
        if self._watches == 1:
            raise HistoryGone(after=after, oldest=after + 2)
        return self._store.watch(prefix, after=after)

    def list_prefix(self, prefix: str) -> Any:
        self._lists += 1
        if self._lists == 2:  # the first was at the start
            raise StoreUnavailable("no answer")
        return self._store.list_prefix(prefix)


def test_a_store_that_is_away_when_all_has_to_be_read_again_blinds_nobody(store: Store) -> None:
    mirror = Mirror(Torn(store))  # type: ignore[arg-type]
    mirror.start()
    revision = store.put(keys.REQUESTS + "a", dump(request("a")))
    follow(mirror, lambda: mirror.revision >= revision)
    assert [job.id for job in mirror.jobs()] == ["a"]
    mirror.close()
