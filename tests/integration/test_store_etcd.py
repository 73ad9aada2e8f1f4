"""What only a cluster can suffer: members that die, answers that are lost, requests that arrive late."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etcd_server import EtcdCluster, etcd, free_ports

from concertina.core.errors import LeaseGone, StoreUnavailable
from concertina.store import ABSENT, Change, Leadership, open_store

pytest.importorskip("aetcd", reason="the client for etcd is missing: pip install 'concertina[etcd]'")

import grpc

from concertina.store.etcd import EtcdStore
from concertina.store.etcd_members import Member

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with etcd(election_ms=300) as running:
        yield running


class Lost(grpc.RpcError):  # type: ignore[misc]
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "lost on purpose"


class Unreliable:
    """Stands before a member's transactions: those planned for are done but not answered, or kept back for later."""

    def __init__(self, member: Member) -> None:
        self.real = member.kv.Txn
        self.plan: list[str] = []
        self.kept: list[Any] = []
        member.kv.Txn = self

    def __call__(self, request: Any, *, timeout: float) -> Any:
        plan = self.plan.pop(0) if self.plan else ""
        if plan == "lose the answer":
            self.real(request, timeout=timeout)
            raise Lost
        if plan == "arrive late":
            self.kept.append(request)
            raise Lost
        return self.real(request, timeout=timeout)

    def arrive(self) -> bool:
        """What was kept back; whether it was done."""
        return bool(self.real(self.kept.pop(), timeout=5).succeeded)


@pytest.fixture
def store(cluster: EtcdCluster, request: pytest.FixtureRequest) -> Iterator[EtcdStore]:
    opened = open_store(cluster.address(f"t{abs(hash(request.node.name))}"))
    assert isinstance(opened, EtcdStore)
    with opened:
        opened.put("warm", b"")
        yield opened


@pytest.fixture
def line(store: EtcdStore) -> Unreliable:
    return Unreliable(store._members.preferred())


def changes(store: EtcdStore, key: str) -> list[bytes | None]:
    with store.watch(key, after=0) as watch:
        found: list[Change] = []
        while batch := watch.poll(0.3):
            found += batch
    return [change.value for change in found]


def test_a_put_whose_answer_was_lost_is_done_once(store: EtcdStore, line: Unreliable) -> None:
    line.plan = ["lose the answer"]
    revision = store.put("a", b"1")
    assert changes(store, "a") == [b"1"]
    entry = store.get("a")
    assert entry is not None
    assert entry.revision == revision


def test_a_compare_and_set_whose_answer_was_lost_is_won(store: EtcdStore, line: Unreliable) -> None:
    line.plan = ["lose the answer"]
    revision = store.compare_and_set("a", b"1", expected=ABSENT)
    assert revision is not None
    line.plan = ["lose the answer"]
    assert store.delete("a", expected=revision)
    line.plan = ["lose the answer"]
    assert not store.delete("a", expected=revision)
    assert changes(store, "a") == [b"1", None]


def test_a_request_that_arrives_late_is_not_done_again(store: EtcdStore, line: Unreliable) -> None:
    line.plan = ["arrive late"]
    store.put("a", b"1")
    store.put("a", b"2")
    assert not line.arrive()
    assert changes(store, "a") == [b"1", b"2"]


def test_a_refused_write_is_not_done_later_either(store: EtcdStore, line: Unreliable) -> None:
    store.put("a", b"1")
    line.plan = ["arrive late"]
    assert store.compare_and_set("a", b"2", expected=ABSENT) is None
    store.delete("a")  # now its condition would hold
    assert not line.arrive()
    line.plan = ["arrive late", "", "lose the answer"]  # the last one is the question whether it was done
    assert store.compare_and_set("a", b"3", expected=12345) is None
    assert not line.arrive()
    assert changes(store, "a") == [b"1", None]


def test_a_session_that_ran_out_is_begun_again(store: EtcdStore, cluster: EtcdCluster) -> None:
    store.put("a", b"1")
    lease = store._session._lease
    assert lease is not None
    cluster.ctl("lease", "revoke", f"{lease.id:x}")
    store.put("a", b"2")
    assert changes(store, "a") == [b"1", b"2"]


def test_a_write_is_not_reported_as_done_when_nobody_can_know(
    store: EtcdStore, cluster: EtcdCluster, line: Unreliable
) -> None:
    lease = store._session._lease
    assert lease is not None
    real = line.real

    def do_then_forget(request: Any, *, timeout: float) -> Any:
        answer = real(request, timeout=timeout)
        cluster.ctl("lease", "revoke", f"{lease.id:x}")  # as if it were away for a minute
        line.real = real
        return answer

    line.real, line.plan = do_then_forget, ["lose the answer"]
    with pytest.raises(StoreUnavailable, match="not known whether the last write was done"):
        store.put("a", b"1")
    store.put("a", b"2")
    assert changes(store, "a") == [b"1", b"2"]


def test_a_client_leaves_nothing_behind(cluster: EtcdCluster) -> None:
    with open_store(cluster.address("tidy")) as store:
        store.put("a", b"")
        store.delete("a")
        assert "tidy/sessions/" in cluster.ctl("get", "--prefix", "tidy/")
    assert cluster.ctl("get", "--prefix", "tidy/") == ""


def test_prefixes_are_worlds_of_their_own(cluster: EtcdCluster) -> None:
    with open_store(cluster.address("one")) as one, open_store(cluster.address("one1")) as other:
        other.put("a", b"")
        assert one.list_prefix("").entries == ()
        assert one.get("1/keys/a") is None


def test_a_cluster_that_is_not_there_gets_one_sentence() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailable, match=rf"etcd at 127\.0\.0\.1:{port} gave no answer within 0\.5 s") as caught:
        open_store(f"etcd://127.0.0.1:{port}/x", timeout_s=0.5)
    assert "\n" not in str(caught.value)


class Client(threading.Thread):
    """Does something again and again until it is told to stop; an exception is kept for the test."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work, self.ends, self.times = work, threading.Event(), 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ends.is_set():
                self.work()
                self.times += 1
        except BaseException as error:
            self.error = error

    def does(self, more: int) -> None:
        """Waits until it has done so many more."""
        wanted, until = self.times + more, time.monotonic() + PATIENCE_S
        while self.times < wanted:
            assert self.error is None, self.error
            assert time.monotonic() < until, f"{self.times} of {wanted} times"
            time.sleep(0.01)

    def stop(self) -> None:
        self.ends.set()
        self.join()
        assert self.error is None, self.error


@pytest.mark.parametrize(
    "end",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.slow)],
)
def test_nothing_is_lost_or_doubled_without_the_leader_of_three(end: signal.Signals) -> None:
    """One client puts, one watches, one keeps leases alive; all hang on the member that is killed or frozen."""
    acknowledged: list[tuple[str, int]] = []
    seen: list[Change] = []
    with etcd(3) as three:
        first = three.leader()
        with (
            open_store(three.address("x", first)) as writer,
            open_store(three.address("x", first)) as reader,
            open_store(three.address("x", first)) as keeper,
        ):
            lease = keeper.grant(5)
            keeper.put("alive", b"", lease=lease)
            office = Leadership.acquire(keeper, "job", 5)
            assert office is not None
            watch = reader.watch("n/", after=reader.list_prefix("").revision)

            def put() -> None:
                key = f"n/{len(acknowledged):05d}"
                acknowledged.append((key, writer.put(key, key.encode())))

            def keep() -> None:
                keeper.keep_alive(lease)
                assert office.renew()
                office.put_fenced("state", b"")
                time.sleep(0.1)

            putting, keeping = Client(put), Client(keep)
            watching = Client(lambda: seen.extend(watch.poll(0.2)))
            clients = [putting, watching, keeping]

            def go_on() -> None:
                """Everybody does, not only with what was under way."""
                putting.does(100)
                keeping.does(5)
                newest, until = acknowledged[-1][1], time.monotonic() + PATIENCE_S
                while not seen or seen[-1].revision < newest:
                    assert time.monotonic() < until, "the watch stands still"
                    time.sleep(0.01)

            for client in clients:
                client.start()
            try:
                go_on()
                three.processes[first].send_signal(end)
                go_on()
            finally:
                for client in clients:
                    client.ends.set()
                for client in clients:
                    client.join()
            assert [client.error for client in clients] == [None, None, None]
            until = time.monotonic() + PATIENCE_S
            while len(seen) < len(acknowledged) and time.monotonic() < until:
                seen.extend(watch.poll(0.5))
            seen.extend(watch.poll(0.5))
            watch.close()
            assert [(change.key, change.revision) for change in seen] == acknowledged
            entries = reader.list_prefix("n/").entries
            assert [(entry.key, entry.revision) for entry in entries] == acknowledged
            assert reader.get("alive") is not None
            assert office.holds()
            keeper.revoke(lease)
            with pytest.raises(LeaseGone):
                keeper.keep_alive(lease)
