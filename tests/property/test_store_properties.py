"""SQLite against memory, its slow-witted but obvious twin; and leaders that never meet, whatever their clocks do."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.core.errors import ConcertinaError, Deposed
from concertina.store.election import Leadership
from concertina.store.memory import MemoryStore
from concertina.store.protocol import Guard, Lease, Store
from concertina.store.sqlite import SqliteStore

MEMORY = Path("/dev/shm")  # nothing here is about the disk
KEYS = st.sampled_from(["a", "a/1", "a/2", "b", "ü"])
VALUES = st.binary(max_size=3)
REVISIONS = st.integers(0, 12)
LEASES = st.one_of(st.none(), st.integers(1, 3).map(lambda number: Lease(id=number, ttl=1.0)))
GUARDS = st.one_of(st.none(), st.builds(Guard, key=KEYS, revision=REVISIONS))
EXPECTED = st.one_of(st.none(), REVISIONS)
CALLS = st.one_of(
    st.tuples(st.just("get"), st.tuples(KEYS), st.fixed_dictionaries({})),
    st.tuples(st.just("put"), st.tuples(KEYS, VALUES), st.fixed_dictionaries({"lease": LEASES})),
    st.tuples(
        st.just("compare_and_set"),
        st.tuples(KEYS, VALUES),
        st.fixed_dictionaries({"expected": EXPECTED, "lease": LEASES, "guard": GUARDS}),
    ),
    st.tuples(st.just("delete"), st.tuples(KEYS), st.fixed_dictionaries({"expected": EXPECTED, "guard": GUARDS})),
    st.tuples(st.just("list_prefix"), st.tuples(st.sampled_from(["", "a", "a/"])), st.fixed_dictionaries({})),
    st.tuples(st.just("grant"), st.tuples(st.sampled_from([1.0, 3.0])), st.fixed_dictionaries({})),
    st.tuples(st.just("keep_alive"), st.tuples(LEASES.filter(bool)), st.fixed_dictionaries({})),
    st.tuples(st.just("revoke"), st.tuples(LEASES.filter(bool)), st.fixed_dictionaries({})),
    st.tuples(st.just("poll"), st.tuples(), st.fixed_dictionaries({})),
    st.tuples(st.just("pass"), st.tuples(st.sampled_from([0.5, 1.0, 3.0])), st.fixed_dictionaries({})),
)


class Hand:
    """A clock in the test's hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def outcome(store: Store, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    try:
        return getattr(store, name)(*args, **kwargs)
    except ConcertinaError as error:
        return type(error), str(error)


@settings(max_examples=100, deadline=None)
@given(st.lists(CALLS, min_size=5, max_size=40))
def test_sqlite_and_memory_give_the_same_answers(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    clock = Hand()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        sqlite = SqliteStore.open(Path(folder) / "s.db", clock=clock)
        memory = MemoryStore(clock=clock)
        with sqlite, memory, sqlite.watch("a", after=0) as one, memory.watch("a", after=0) as other:
            for name, args, kwargs in calls:
                if name == "pass":
                    clock.now += args[0]
                elif name == "poll":
                    assert one.poll(0) == other.poll(0)
                else:
                    assert outcome(sqlite, name, args, kwargs) == outcome(memory, name, args, kwargs), name
            assert sqlite.list_prefix("") == memory.list_prefix("")


class Slow(MemoryStore):
    """Time passes before a request is carried out, and again before its answer is there."""

    def __init__(self, clock: Hand) -> None:
        super().__init__(clock=clock)
        self.hand, self.there, self.back = clock, 0.0, 0.0

    def grant(self, ttl: float) -> Lease:
        self.hand.now += self.there
        lease = super().grant(ttl)
        self.hand.now += self.back
        return lease

    def keep_alive(self, lease: Lease) -> None:
        self.hand.now += self.there
        super().keep_alive(lease)
        self.hand.now += self.back

    def compare_and_set(self, *args: Any, **kwargs: Any) -> int | None:
        self.hand.now += self.there
        revision = super().compare_and_set(*args, **kwargs)
        self.hand.now += self.back
        return revision


DELAYS = st.sampled_from([0.0, 0.0, 1.0, 5.0, 10.0])  # seconds, for leases of ten
MOVES = st.lists(
    st.tuples(st.sampled_from(["stand", "renew", "write", "resign"]), st.integers(0, 1), DELAYS, DELAYS, DELAYS),
    min_size=8,
    max_size=40,
)
RATES = st.sampled_from([0.91, 1.0, 1.2])


@settings(max_examples=300, deadline=None)
@given(MOVES, st.tuples(RATES, RATES))
def test_leaders_never_meet(moves: list[tuple[str, int, float, float, float]], rates: tuple[float, float]) -> None:
    """Two candidates with clocks of their own, up to 9 % slow; requests and answers take as long as they like."""
    time = Hand()
    store = Slow(time)
    clocks = [lambda rate=rate: 500 + rate * time.now for rate in rates]
    leaders: list[Leadership | None] = [None, None]
    fences: list[int] = []
    written: list[int] = []
    for move, who, pause, store.there, store.back in moves:
        time.now += pause
        leader = leaders[who]
        if move == "stand":
            new = Leadership.acquire(store, "x", 10.0, clock=clocks[who])
            if new is not None:
                leaders[who] = new
                fences.append(new.fence)
        elif leader is not None and move == "renew":
            leader.renew()
        elif leader is not None and move == "resign":
            leader.resign()
        elif leader is not None:
            try:
                leader.put_fenced("state", b"%d" % leader.fence)
                written.append(leader.fence)
            except Deposed:
                pass
        holding = [(leader, rate) for leader, rate in zip(leaders, rates, strict=True) if leader and leader.holds()]
        assert len(holding) <= 1
        for leader, rate in holding:  # and if nothing more happens, it gives up before the store does
            assert (leader._tenure.until - 500) / rate <= store._leases[leader._lease.id].expires
    assert fences == sorted(set(fences))
    assert written == sorted(written)
