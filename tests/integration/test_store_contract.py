"""One contract for every store: memory, SQLite and a real etcd server.

A lease has to run out in real time here; the waits below are limits, and a test ends as soon as it has seen what it
waits for. What time does to a lease is proved with a clock in the hand in tests/unit/test_lease.py and tests/property.
What only SQLite or only etcd can suffer is in the files beside this one.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_server import EtcdCluster, etcd

from concertina.core.errors import (
    Deposed,
    HistoryGone,
    LeaseGone,
    StoreError,
    StoreRequestError,
)
from concertina.store import ABSENT, Change, Guard, Leadership, Store, Watch, open_store
from concertina.store.memory import MemoryStore
from concertina.store.protocol import MAX_VALUE
from concertina.store.sqlite import SqliteStore

PATIENCE_S = 10.0
TAKEOVER_S = 2.0  # that a candidate may have to wait beyond the end of a lease


@dataclass
class Place:
    """Where stores of one kind are opened."""

    kind: str
    ttl: float  # about the shortest lease it grants
    open_at: Callable[[str], Callable[[], Store]]  # a name nobody used before -> opens a store there
    cluster: EtcdCluster | None = None


@pytest.fixture(scope="module", params=["memory", "sqlite", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    def in_memory(name: str) -> Callable[[], Store]:
        store = MemoryStore()
        return lambda: store

    if request.param == "memory":
        yield Place("memory", 0.3, in_memory)
    elif request.param == "sqlite":
        folder = tmp_path_factory.mktemp("stores")
        yield Place("sqlite", 0.3, lambda name: lambda: open_store(f"sqlite:{folder / name}.db"))
    else:
        with etcd(election_ms=300) as cluster:
            yield Place("etcd", 1.0, lambda name: lambda: open_store(cluster.address(name)), cluster)


@pytest.fixture
def opener(place: Place, request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Opens one more client of this test's own store."""
    opened: list[Store] = []
    open_here = place.open_at(f"t{abs(hash(request.node.name))}")

    def opening() -> Store:
        opened.append(open_here())
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Callable[[], Store]) -> Store:
    return opener()


def take(watch: Watch, count: int) -> list[Change]:
    """The next changes, at least so many; fewer only if they do not come."""
    found: list[Change] = []
    until = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < until:
        found += watch.poll(until - time.monotonic())
    return found


def wait_until(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


def value(store: Store, key: str) -> bytes | None:
    entry = store.get(key)
    return entry.value if entry else None


def test_what_was_put_is_there_for_every_client(store: Store, opener: Callable[[], Store]) -> None:
    assert store.get("a") is None
    first = store.put("a", b"1")
    second = store.put("a", b"2")
    assert 0 < first < second
    entry = opener().get("a")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision, entry.lease) == ("a", b"2", second, None)


@pytest.mark.parametrize(
    "content", [b"", b"\0", bytes(range(256)), b"x" * MAX_VALUE], ids=["empty", "nul", "all", "1M"]
)
def test_a_value_is_any_bytes(store: Store, content: bytes) -> None:
    store.put("a", content)
    assert value(store, "a") == content


def test_a_key_is_created_once(store: Store, opener: Callable[[], Store]) -> None:
    revision = store.compare_and_set("a", b"1", expected=ABSENT)
    assert revision is not None
    assert opener().compare_and_set("a", b"2", expected=ABSENT) is None
    assert value(store, "a") == b"1"


def test_compare_and_set_wants_the_newest_revision(store: Store) -> None:
    first = store.put("a", b"1")
    second = store.compare_and_set("a", b"2", expected=first)
    assert second is not None
    assert second > first
    assert store.compare_and_set("a", b"3", expected=first) is None
    assert value(store, "a") == b"2"
    assert store.delete("a")
    assert store.compare_and_set("a", b"3", expected=second) is None
    assert store.put("a", b"1") > second  # a key that comes back does not come back at an old revision
    assert store.compare_and_set("a", b"3", expected=second) is None


def test_a_guard_holds_only_at_its_revision(store: Store) -> None:
    revision = store.put("guard", b"")
    guard = Guard(key="guard", revision=revision)
    assert store.compare_and_set("a", b"1", expected=None, guard=guard) is not None
    assert store.delete("a", guard=guard)
    store.put("a", b"1")
    store.put("guard", b"")
    assert store.compare_and_set("a", b"2", expected=None, guard=guard) is None
    assert not store.delete("a", guard=guard)
    store.delete("guard")
    assert store.compare_and_set("a", b"2", expected=None, guard=guard) is None
    assert store.compare_and_set("a", b"2", expected=None, guard=Guard(key="guard", revision=ABSENT)) is not None
    assert value(store, "a") == b"2"


def test_a_key_is_deleted_once(store: Store) -> None:
    assert not store.delete("a")
    revision = store.put("a", b"1")
    assert not store.delete("a", expected=revision + 1000)
    assert store.delete("a", expected=revision)
    assert not store.delete("a")
    assert store.get("a") is None


def test_a_listing_holds_the_keys_with_a_prefix_in_order(store: Store) -> None:
    for key in ["b", "a/2", "a/10", "a0", "a", "ä/1", "a/ü"]:
        store.put(key, key.encode())
    last = store.put("a/1", b"a/1")
    listing = store.list_prefix("a/")
    assert [entry.key for entry in listing.entries] == ["a/1", "a/10", "a/2", "a/ü"]
    assert all(entry.value == entry.key.encode() for entry in listing.entries)
    assert listing.revision == last
    assert [entry.key for entry in store.list_prefix("").entries] == [
        "a",
        "a/1",
        "a/10",
        "a/2",
        "a/ü",
        "a0",
        "b",
        "ä/1",
    ]
    assert store.list_prefix("nothing").entries == ()


def test_keys_vanish_when_their_lease_is_revoked(store: Store) -> None:
    lease = store.grant(60)
    assert lease.ttl >= 60
    for key in ["a", "b", "freed", "taken over"]:
        store.put(key, b"", lease=lease)
    attached = store.get("a")
    assert attached is not None
    assert attached.lease == lease.id
    other = store.grant(60)
    store.put("freed", b"")
    store.put("taken over", b"", lease=other)
    store.revoke(lease)
    store.revoke(lease)  # no error
    assert [entry.key for entry in store.list_prefix("").entries] == ["freed", "taken over"]


def test_what_is_over_is_over(store: Store) -> None:
    lease = store.grant(60)
    store.revoke(lease)
    with pytest.raises(LeaseGone, match=f"lease {lease.id} ran out or was revoked"):
        store.keep_alive(lease)
    with pytest.raises(LeaseGone, match=f"lease {lease.id} ran out or was revoked"):
        store.put("a", b"", lease=lease)
    assert store.get("a") is None


def test_keys_vanish_with_their_lease_unless_it_is_kept_alive(place: Place, store: Store) -> None:
    dying, kept = store.grant(place.ttl), store.grant(place.ttl)
    before = store.put("dying", b"", lease=dying)
    store.put("kept", b"", lease=kept)
    gone: list[Change] = []
    with store.watch("", after=before + 1) as watch:
        until = time.monotonic() + PATIENCE_S
        while not gone and time.monotonic() < until:
            store.keep_alive(kept)
            gone += watch.poll(place.ttl / 4)
    assert [(change.key, change.value) for change in gone] == [("dying", None)]
    assert [entry.key for entry in store.list_prefix("").entries] == ["kept"]
    with pytest.raises(LeaseGone):
        store.keep_alive(dying)
    store.keep_alive(kept)


def test_a_key_of_a_lease_that_ran_out_is_gone_without_a_watch(place: Place, store: Store) -> None:
    store.put("a", b"", lease=store.grant(place.ttl))
    assert wait_until(lambda: store.get("a") is None)
    assert store.list_prefix("").entries == ()


def test_a_watch_is_told_that_a_lease_ran_out_though_nobody_else_asks(place: Place, store: Store) -> None:
    written = store.put("a", b"", lease=store.grant(place.ttl))
    with store.watch("a", after=written) as watch:
        assert [(change.key, change.value) for change in take(watch, 1)] == [("a", None)]


def test_a_watch_sees_every_change_once_and_in_order(store: Store, opener: Callable[[], Store]) -> None:
    before = store.list_prefix("").revision
    revisions = [store.put(f"a/{i}", b"%d" % i) for i in range(5)]
    store.put("b", b"")
    with opener().watch("a/", after=before) as watch:
        past = take(watch, 5)
        assert watch.poll(0) == ()
        store.put("b", b"")
        store.delete("a/3")
        revisions.append(store.put("a/0", b"new"))
        future = take(watch, 2)
        assert watch.poll(0) == ()
    assert [change.revision for change in past] == revisions[:5]
    assert [(change.key, change.value) for change in past] == [(f"a/{i}", b"%d" % i) for i in range(5)]
    assert [(change.key, change.value) for change in future] == [("a/3", None), ("a/0", b"new")]
    assert future[1].revision == revisions[5]


def test_a_watch_goes_on_where_another_one_ended(store: Store) -> None:
    seen: list[Change] = []
    position = store.list_prefix("").revision
    for turn in range(4):
        for i in range(3):
            store.put(f"a/{i}", b"%d" % turn)
        with store.watch("a/", after=position) as watch:
            seen += take(watch, 1)
            position = watch.revision
    with store.watch("a/", after=position) as watch:
        seen += take(watch, 12 - len(seen))
    assert [(change.key, change.value) for change in seen] == [
        (f"a/{i}", b"%d" % t) for t in range(4) for i in range(3)
    ]


def test_a_watch_after_a_listing_misses_and_repeats_nothing(store: Store, opener: Callable[[], Store]) -> None:
    """While somebody else is writing."""
    writer = opener()
    writing = threading.Thread(target=lambda: [writer.put(f"a/{i}", b"") for i in range(60)])
    writing.start()
    listing = store.list_prefix("a/")
    with store.watch("a/", after=listing.revision) as watch:
        rest = take(watch, 60 - len(listing.entries))
    writing.join()
    keys = [entry.key for entry in listing.entries] + [change.key for change in rest]
    assert sorted(keys) == sorted(f"a/{i}" for i in range(60))


def test_several_keys_of_one_lease_are_reported_each(store: Store) -> None:
    lease = store.grant(60)
    for i in range(3):
        last = store.put(f"a/{i}", b"", lease=lease)
    with store.watch("a/", after=last) as watch:
        store.revoke(lease)
        found = take(watch, 3)
    assert sorted((change.key, change.value) for change in found) == [(f"a/{i}", None) for i in range(3)]


def test_a_closed_watch_ends_whoever_waits_on_it(store: Store) -> None:
    watch = store.watch("a", after=store.list_prefix("").revision)
    found: list[tuple[Change, ...]] = []
    waiting = threading.Thread(target=lambda: found.append(watch.poll(60)))
    waiting.start()
    watch.close()
    waiting.join(PATIENCE_S)
    assert found == [()]


def test_changes_too_old_to_be_kept_are_refused_not_skipped(place: Place, tmp_path: Path) -> None:
    if place.kind == "memory":
        store: Store = MemoryStore(keep_changes=10)
    elif place.kind == "sqlite":
        store = SqliteStore.open(tmp_path / "short.db", keep_changes=10)
    else:
        store = place.open_at("short")()
    with store:
        first = store.put("a", b"")
        for _ in range(30):
            last = store.put("a", b"")
        if place.cluster:
            place.cluster.ctl("compaction", str(last))
        with store.watch("a", after=first) as watch, pytest.raises(HistoryGone, match="list the prefix again"):
            take(watch, 1)
        with store.watch("a", after=last - 1) as watch:
            assert [change.revision for change in take(watch, 1)] == [last]


def test_no_update_is_lost_between_threads(store: Store, opener: Callable[[], Store]) -> None:
    store.put("n", b"0")

    def count(client: Store, times: int) -> None:
        while times:
            entry = client.get("n")
            assert entry is not None
            times -= client.compare_and_set("n", b"%d" % (int(entry.value) + 1), expected=entry.revision) is not None

    counting = [threading.Thread(target=count, args=(client, 20)) for client in (store, store, opener())]
    for thread in counting:
        thread.start()
    for thread in counting:
        thread.join()
    assert value(store, "n") == b"60"


@pytest.mark.parametrize("key", ["", "x" * 513, "a\nb", "a\0b"], ids=["empty", "long", "newline", "nul"])
def test_a_bad_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(StoreRequestError, match="needed 1 to 512 printable characters"):
        store.put(key, b"")
    with pytest.raises(StoreRequestError):
        store.get(key)


def test_bad_values_and_times_are_refused(store: Store) -> None:
    with pytest.raises(StoreRequestError, match="needed at most 1048576"):
        store.put("a", b"x" * (MAX_VALUE + 1))
    with pytest.raises(StoreRequestError, match="is str, needed bytes"):
        store.put("a", "text")  # type: ignore[arg-type]
    for ttl in (0, -1, float("nan"), float("inf")):
        with pytest.raises(StoreRequestError, match="needed more than 0"):
            store.grant(ttl)
    assert store.list_prefix("").entries == ()


def test_a_closed_store_says_so(place: Place) -> None:
    store = place.open_at("closed")()
    store.put("a", b"")
    store.close()
    with pytest.raises(StoreError, match="this store is closed"):
        store.get("a")
    with pytest.raises(StoreError, match="this store is closed"):
        store.put("a", b"")


def test_a_second_candidate_is_in_soon_after_the_lease_ran_out(
    place: Place, store: Store, opener: Callable[[], Store]
) -> None:
    first = Leadership.acquire(store, "job", place.ttl, holder="one")
    assert first is not None
    other = opener()
    assert Leadership.acquire(other, "job", place.ttl) is None
    second = Leadership.acquire(other, "job", place.ttl, holder="two", wait_s=place.ttl + TAKEOVER_S)
    assert second is not None
    assert second.fence > first.fence
    assert not first.holds()
    assert not first.renew()
    assert value(store, "leaders/job") == b"two"
    with pytest.raises(Deposed):
        first.put_fenced("state", b"old")


def test_a_leader_that_renews_stays_and_one_that_resigns_makes_room(
    place: Place, store: Store, opener: Callable[[], Store]
) -> None:
    first = Leadership.acquire(store, "job", place.ttl)
    assert first is not None
    other = opener()
    until = time.monotonic() + 2 * place.ttl
    while time.monotonic() < until:
        assert first.renew()
        assert Leadership.acquire(other, "job", place.ttl) is None
        time.sleep(place.ttl / 10)
    first.resign()
    second = Leadership.acquire(other, "job", place.ttl)
    assert second is not None
    assert second.fence > first.fence


def test_two_leaders_never_both_write(place: Place, store: Store, opener: Callable[[], Store]) -> None:
    """Leaders that trust no clock but the store: they write until refused. Leases are cut short at random moments."""

    def never() -> float:
        return 0.0  # their own clocks stand still, so that only the store can stop them

    lock = threading.Lock()
    ends = threading.Event()
    current: list[Leadership] = []

    def campaign(client: Store) -> None:
        while not ends.is_set():
            leader = Leadership.acquire(client, "job", 60.0, clock=never)
            if leader is None:
                continue
            with lock:
                current.append(leader)
            try:
                while not ends.is_set():
                    leader.put_fenced("state", b"%d" % leader.fence)
                    time.sleep(0.0005)  # the watch below may be starved, and history is short
            except Deposed:
                continue

    threads = [threading.Thread(target=campaign, args=(client,)) for client in (store, opener(), opener())]
    killer, chance = opener(), random.Random(7)
    written: list[Change] = []
    with killer.watch("state", after=killer.list_prefix("").revision) as watch:
        for thread in threads:
            thread.start()
        for _ in range(5):
            time.sleep(chance.uniform(0.01, 0.06))
            killer.delete("leaders/job")  # as when the lease runs out
            written += watch.poll(0)
        ends.set()
        for thread in threads:
            thread.join()
        last = killer.put("state", b"0")
        while not written or written[-1].revision < last:
            written += watch.poll(PATIENCE_S)
    fences = [int(change.value or b"0") for change in written[:-1]]
    assert fences == sorted(fences)  # once a newer leader has written, no older one ever does
    assert len({leader.fence for leader in current}) == len(current) >= 2
    assert len(set(fences)) >= 2
