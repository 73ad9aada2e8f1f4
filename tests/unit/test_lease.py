"""When a leader may act, with a clock in the test's hand."""

import pytest

from concertina.core.errors import Deposed, LeaseGone, StoreRequestError, StoreUnavailable
from concertina.store.election import Leadership
from concertina.store.lease import MARGIN, Tenure, at, ended, next_renewal, obeys, renewed
from concertina.store.memory import MemoryStore
from concertina.store.protocol import Lease

TENURE = Tenure(fence=7, ttl=10.0, sent=100.0)


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class DeafStore(MemoryStore):
    """Keeps leases alive only while it is asked nicely; `delay` passes while it answers."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock=clock)
        self.hand, self.deaf, self.delay = clock, False, 0.0

    def keep_alive(self, lease: Lease) -> None:
        if self.deaf:
            raise StoreUnavailable("deaf")
        super().keep_alive(lease)
        self.hand.now += self.delay


def test_a_tenure_ends_a_margin_before_its_lease() -> None:
    assert TENURE.until == 100.0 + 10.0 * (1 - MARGIN) == 109.0
    assert at(TENURE, 108.9) == TENURE
    assert at(TENURE, 109.0).over == "not renewed for 9.00 s with a lease of 10 s"


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    assert renewed(TENURE, sent=104.0, now=108.0) == Tenure(fence=7, ttl=10.0, sent=104.0)


def test_an_answer_that_comes_too_late_saves_nobody() -> None:
    late = renewed(TENURE, sent=104.0, now=109.5)
    assert late.over
    assert renewed(late, sent=109.5, now=109.6).over == late.over


def test_time_that_has_run_out_does_not_come_back() -> None:
    assert at(at(TENURE, 200.0), 100.0).over


def test_the_first_reason_stays() -> None:
    assert ended(ended(TENURE, "first"), "second").over == "first"


def test_three_renewals_fit_into_the_time_a_leader_has() -> None:
    assert next_renewal(TENURE) == 103.0
    assert next_renewal(Tenure(fence=7, ttl=10.0, sent=106.0)) == 109.0


@pytest.mark.parametrize(("highest", "fence", "obeyed"), [(0, 1, True), (5, 5, True), (5, 4, False), (5, 9, True)])
def test_an_older_leader_is_not_obeyed(highest: int, fence: int, obeyed: bool) -> None:
    assert obeys(highest, fence) is obeyed


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(clock: HandClock) -> DeafStore:
    return DeafStore(clock)


def lead(store: DeafStore, name: str = "job-1", ttl: float = 10.0) -> Leadership | None:
    return Leadership.acquire(store, name, ttl, clock=store.hand)


def test_there_is_one_leader_of_a_name_and_each_name_has_its_own(store: DeafStore) -> None:
    first = lead(store, "job-10")
    assert first is not None
    assert lead(store, "job-10") is None
    assert lead(store, "job-1") is not None  # whose key is the beginning of the other's
    assert first.holds()


def test_a_leader_is_deposed_before_another_can_be_chosen(store: DeafStore, clock: HandClock) -> None:
    first = lead(store)
    assert first is not None
    store.deaf = True
    moments = []
    for _ in range(110):
        clock.now += 0.1
        first.renew()
        moments.append((first.holds(), lead(store) is not None))
    assert (True, True) not in moments
    assert (False, False) in moments  # the margin
    assert (False, True) in moments


def test_fencing_numbers_grow_from_leader_to_leader(store: DeafStore, clock: HandClock) -> None:
    fences = []
    for turn in range(6):
        leader = lead(store)
        assert leader is not None
        fences.append(leader.fence)
        if turn % 2:
            leader.resign()
        else:
            clock.now += 10.0
    assert fences == sorted(set(fences))


def test_a_renewed_leader_stays_with_the_same_number(store: DeafStore, clock: HandClock) -> None:
    leader = lead(store)
    assert leader is not None
    for _ in range(10):
        clock.now = leader.renew_at
        assert leader.renew()
    assert lead(store) is None
    assert leader.put_fenced("state", b"x") is not None


def test_a_leader_whose_renewal_took_too_long_steps_down_for_good(store: DeafStore, clock: HandClock) -> None:
    leader = lead(store)
    assert leader is not None
    store.delay = 9.0
    assert not leader.renew()
    store.delay = 0.0
    assert not leader.renew()
    with pytest.raises(Deposed, match=r"leader 1 of 'job-1' is deposed: not renewed for 9\.00 s with a lease of 10 s"):
        leader.put_fenced("state", b"x")


def test_a_leader_without_a_lease_at_the_store_is_deposed(store: DeafStore) -> None:
    leader = lead(store)
    assert leader is not None
    store.revoke(Lease(id=1, ttl=10.0))
    assert not leader.renew()
    with pytest.raises(Deposed, match="its lease is gone from the store"):
        leader.check()


def test_a_deaf_store_is_no_reason_to_step_down_while_there_is_time(store: DeafStore, clock: HandClock) -> None:
    leader = lead(store)
    assert leader is not None
    store.deaf, clock.now = True, clock.now + 8.0
    assert leader.renew()
    store.deaf = False
    assert leader.renew()
    clock.now += 8.0
    assert leader.holds()


def test_the_store_refuses_an_old_leader_that_still_believes_in_itself(store: DeafStore, clock: HandClock) -> None:
    asleep = HandClock()  # the old leader's clock stands still: the worst that can happen to it
    old = Leadership.acquire(store, "job-1", 10.0, clock=asleep)
    clock.now += 10.0
    new = lead(store)
    assert old is not None
    assert new is not None
    assert old.holds()
    assert new.put_fenced("state", b"new") is not None
    with pytest.raises(Deposed, match="the store knows a newer leader, or none"):
        old.put_fenced("state", b"old")
    assert not old.holds()
    entry = store.get("state")
    assert entry is not None
    assert entry.value == b"new"


def test_an_old_leader_can_not_delete_either(store: DeafStore, clock: HandClock) -> None:
    old = Leadership.acquire(store, "job-1", 10.0, clock=HandClock())
    assert old is not None
    assert not old.delete_fenced("state")
    store.put("state", b"x")
    clock.now += 10.0
    with pytest.raises(Deposed):
        old.delete_fenced("state")
    assert store.get("state") is not None


def test_a_fenced_write_can_expect_a_revision(store: DeafStore) -> None:
    leader = lead(store)
    assert leader is not None
    revision = leader.put_fenced("state", b"1", expected=0)
    assert leader.put_fenced("state", b"2", expected=0) is None
    assert leader.holds()
    assert leader.put_fenced("state", b"2", expected=revision) is not None
    assert leader.delete_fenced("state")


def test_a_lease_that_ran_out_while_it_was_granted_elects_nobody(store: DeafStore, clock: HandClock) -> None:
    class Slow(MemoryStore):
        def grant(self, ttl: float) -> Lease:
            lease = super().grant(ttl)
            clock.now += 9.5
            return lease

    slow = Slow(clock=clock)
    assert Leadership.acquire(slow, "job-1", 10.0, clock=clock) is None
    assert slow.get("leaders/job-1") is None
    with pytest.raises(LeaseGone):
        slow.keep_alive(Lease(id=1, ttl=10.0))


@pytest.mark.parametrize("name", ["", "a/b", "a\n"])
def test_a_bad_name_gets_one_sentence(store: DeafStore, name: str) -> None:
    with pytest.raises(StoreRequestError, match="needed a name of printable characters without '/'"):
        lead(store, name)
