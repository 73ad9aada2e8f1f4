"""What a keeper decides, learns from events, and says to the store."""

import errno
import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.keeper import EACH_STEP, Office, Task, step_stride
from concertina.cluster.keeper_book import FEWEST, WARM_UP, JobBook, SpeedMeter
from concertina.cluster.keeper_job import Ending, Outcome
from concertina.cluster.keeper_link import StoreLink
from concertina.cluster.keeper_plan import (
    AGAIN_S,
    LINGER_S,
    SUSPEND_S,
    Interrupt,
    Kill,
    Nothing,
    Refuse,
    Remove,
    Resize,
    Seated,
    Situation,
    Stop,
    is_settled,
    plan,
)
from concertina.cluster.keeper_start import environment, is_held, job_folder, keeper_alive, me, start_ticks, take_lock
from concertina.cluster.records import Activity, JobRequest, JobSeen, JobState, Keeper
from concertina.cluster.settle import known_work
from concertina.core.errors import StoreUnavailable, UsageError
from concertina.store.memory import MemoryStore
from concertina.store.protocol import Store

# -- the plan --------------------------------------------------------------------------------------------------------


def on(*slots: str, **more: Any) -> tuple[Seated, ...]:
    """Members 0, 1, ... on these slots."""
    return tuple(Seated(worker=n, slot=slot, **more) for n, slot in enumerate(slots))


def situation(workers: tuple[Seated, ...], *slots: str, taken_at: float = 100.0, **more: Any) -> Situation:
    """At second 100, settled but for what is said."""
    members = [w for w in workers if w.member]
    base: dict[str, Any] = {
        "now": 100.0,
        "slots": slots,
        "workers": workers,
        "members": len(members),
        "taken": {w.slot: taken_at for w in workers if w.slot not in slots},
        "target": len(members),
        "asked": 90.0,
    }
    return Situation(**{**base, **more})


def newcomer(worker: int, slot: str, **more: Any) -> Seated:
    return Seated(worker=worker, slot=slot, member=False, **more)


def test_a_settled_job_is_left_alone() -> None:
    s = situation(on("a", "b"), "b", "a")
    assert is_settled(s)
    assert plan(s) == Nothing()


@pytest.mark.parametrize(
    "more",
    [
        {"workers": (*on("a", "b"), newcomer(2, "b"))},
        {"workers": on("a", "b", started=False)},
        {"members": 3},
        {"changes": True},
        {"unseated": (3,)},
        {"slots": ("a", "c")},
    ],
)
def test_settled_is_exactly_on_the_slots_and_nothing_else(more: dict[str, Any]) -> None:
    assert not is_settled(replace(situation(on("a", "b"), "a", "b"), **more))


def test_more_slots_are_grown_into() -> None:
    assert plan(situation(on("a"), "a", "b", "c")) == Resize(workers=3)


def test_fewer_slots_are_left_by_those_who_are_there() -> None:
    assert plan(situation(on("a", "b", "c"), "b")) == Remove(
        workers=(0, 2), replaced=False, reason="its slots were taken away"
    )


def test_in_haste_a_worker_leaves_before_another_comes() -> None:
    s = situation(on("a", "b", "c"), "a", "d", "c")
    assert plan(s) == Remove(workers=(1,), replaced=False, reason="its slot was taken away")
    gone = situation((on("a")[0], Seated(worker=2, slot="c")), "a", "d", "c", target=2)
    assert plan(gone) == Resize(workers=3)


def test_with_time_another_comes_first() -> None:
    s = situation(on("a", "b", "c"), "a", "d", "c", vacate_s=30.0)
    assert plan(s) == Remove(workers=(1,), replaced=True, reason="its slot was taken away")


def test_with_time_a_shrink_and_a_move_at_once_are_one_change() -> None:
    s = situation(on("a", "b", "c"), "a", "d", vacate_s=30.0)
    first = plan(s)
    assert first == Remove(workers=(1,), replaced=True, reason="its slot was taken away")
    leaving = tuple(replace(w, leaving=w.worker == 1) for w in s.workers)
    assert plan(replace(s, workers=leaving)) == Remove(workers=(2,), replaced=False, reason="its slot was taken away")
    both = tuple(replace(w, leaving=w.worker != 0) for w in s.workers)
    assert plan(replace(s, workers=both, target=2, asked=99.0)) == Nothing()


def test_a_grow_and_a_move_at_once() -> None:
    s = situation(on("a", "b"), "a", "c", "d", vacate_s=30.0)
    assert plan(s) == Remove(workers=(1,), replaced=True, reason="its slot was taken away")
    leaving = tuple(replace(w, leaving=w.worker == 1) for w in s.workers)
    assert plan(replace(s, workers=leaving)) == Resize(workers=3)


def test_whoever_has_the_state_alone_waits_for_others_even_in_haste() -> None:
    assert plan(situation(on("a"), "b")) == Remove(workers=(0,), replaced=True, reason="its slot was taken away")
    swapped = situation(on("a", "b"), "c", "d")
    assert plan(swapped) == Remove(workers=(0, 1), replaced=True, reason="its slots were taken away")


def test_all_move_to_fewer() -> None:
    s = situation(on("a", "b", "c"), "d")
    assert plan(s) == Remove(workers=(0,), replaced=True, reason="its slot was taken away")
    leaving = tuple(replace(w, leaving=w.worker == 0) for w in s.workers)
    assert plan(replace(s, workers=leaving)) == Remove(
        workers=(1, 2), replaced=False, reason="its slots were taken away"
    )


def test_who_is_alone_with_newcomers_on_their_way_is_never_just_removed() -> None:
    workers = (*on("a"), newcomer(1, "b"), newcomer(2, "c"), newcomer(3, "d"))
    s = situation(workers, "b", "c", "d", target=4, changes=True)
    assert plan(s) == Remove(workers=(0,), replaced=True, reason="its slot was taken away")


def test_a_checkpoint_is_asked_for_before_all_who_have_the_state_are_killed() -> None:
    late = situation(on("a", "b", leaving=True), "c", "d", taken_at=98.9, waits=True)
    assert isinstance(plan(late), Interrupt)
    assert plan(replace(late, now=99.5)) == Nothing()


def test_a_newcomer_on_a_good_slot_does_not_make_up_for_the_state() -> None:
    workers = (*on("a", leaving=True), newcomer(1, "b"))
    assert isinstance(plan(situation(workers, "b", taken_at=98.9, target=1)), Interrupt)


def test_a_slot_that_is_not_free_in_time_is_freed_by_force() -> None:
    workers = on("a", "b", "c", leaving=True)
    s = situation(workers, "a", taken_at=97.9, target=1, waits=True)
    assert plan(s) == Kill(workers=(1, 2), reason="its slot was taken away and not free 2 s later")
    killed = tuple(replace(w, killed=w.worker == 1) for w in workers)
    assert plan(replace(s, workers=killed)) == Kill(
        workers=(2,), reason="its slot was taken away and not free 2 s later"
    )
    assert plan(replace(s, now=99.0)) == Nothing()
    assert plan(replace(s, vacate_s=30.0)) == Nothing()


def test_a_slot_without_a_process_yet_waits_for_one_to_kill() -> None:
    workers = (*on("a"), newcomer(1, "b", started=False))
    assert plan(situation(workers, "a", taken_at=90.0, target=1, changes=True)) == Nothing()


def test_slots_taken_while_newcomers_start() -> None:
    workers = (*on("a"), newcomer(1, "b"), newcomer(2, "c"))
    s = situation(workers, "a", "b", target=3, changes=True)
    assert plan(s) == Resize(workers=2)
    assert plan(replace(s, target=2)) == Kill(workers=(2,), reason="its slot was taken away before it could join")
    assert plan(replace(s, target=2, waits=True)) == Nothing()


def test_other_slots_for_newcomers_that_have_not_joined() -> None:
    workers = (*on("a"), newcomer(1, "b"))
    s = situation(workers, "a", "c", target=2, changes=True)
    assert plan(s) == Kill(workers=(1,), reason="its slot was taken away before it could join")


def test_more_start_together_than_have_a_place_by_now() -> None:
    s = situation(on("a", "b"), "a", "b", members=4, unseated=(2, 3), target=4)
    assert plan(s) == Resize(workers=2)
    assert plan(replace(s, target=2)) == Refuse(workers=(2, 3))


def test_who_starts_waits_for_a_slot_that_will_be_free() -> None:
    s = situation(
        (on("a")[0], newcomer(7, "b", leaving=True)), "a", "b", members=2, unseated=(8,), target=2, asked=99.0
    )
    assert plan(s) == Nothing()


def test_one_question_at_a_time() -> None:
    assert plan(situation(on("a"), "a", "b", waits=True)) == Nothing()


def test_what_has_not_come_about_is_asked_for_again() -> None:
    s = situation(on("a"), "a", "b", target=2, asked=100.0 - AGAIN_S)
    assert plan(s) == Resize(workers=2)
    assert plan(replace(s, asked=99.0)) == Nothing()
    assert plan(replace(s, changes=True)) == Nothing()


def test_a_worker_that_the_others_went_on_without_may_not_stay_for_ever() -> None:
    workers = (*on("a"), newcomer(1, "b", leaving=True, left=100.0 - LINGER_S))
    assert plan(situation(workers, "a", "b", target=2, asked=99.0)) == Kill(
        workers=(1,), reason="the job went on without it 30 s ago"
    )


def test_no_slots_means_suspend() -> None:
    s = situation(on("a", "b"))
    assert plan(s) == Interrupt(reason="it has no slots any more")
    asked = replace(s, interrupted=100.0, now=101.0)
    assert plan(asked) == Nothing()
    assert plan(replace(asked, now=102.0)) == Kill(workers=(0, 1), reason="it was asked to stop and has not")
    assert plan(replace(asked, now=102.0, vacate_s=10.0)) == Nothing()


def test_a_keeper_that_is_asked_to_end_has_time_while_nobody_waits_for_its_slots() -> None:
    s = situation(on("a", "b"), "a", "b", asked_to_end=100.0)
    assert plan(s) == Interrupt(reason="asked to suspend")
    asked = replace(s, interrupted=100.0)
    assert plan(replace(asked, now=99.0 + SUSPEND_S)) == Nothing()
    assert isinstance(plan(replace(asked, now=100.0 + SUSPEND_S)), Kill)
    taken = replace(asked, slots=("a",), taken={"b": 105.0}, now=107.0)
    assert isinstance(plan(taken), Kill)


def test_slots_that_come_back_while_it_stops_do_not_stop_the_stopping() -> None:
    assert plan(situation(on("a"), "a", "b", interrupted=99.0)) == Nothing()


def test_an_ended_job_is_stopped() -> None:
    assert plan(situation(on("a"), "a", ended=True)) == Stop()


def test_a_job_that_made_its_last_step_is_left_to_end() -> None:
    assert plan(situation(on("a"), "a", "b", finishes=True)) == Nothing()


# -- the book --------------------------------------------------------------------------------------------------------


def step(number: int, at: float, **values: float) -> dict[str, Any]:
    return {"event": "step", "worker": 0, "step": number, "epoch": 0, "at": at, "log": values}


def started(generation: int, *members: int) -> dict[str, Any]:
    return {"event": "generation_started", "generation": generation, "members": list(members), "step": 0}


def train(book: JobBook, first: int, count: int, gap: float) -> None:
    for n in range(first, first + count):
        book.note(step(n, 1000.0 + n * gap))


def test_speed_is_that_of_usual_steps_after_a_warm_up() -> None:
    book = JobBook()
    book.note(started(0, 0, 1))
    train(book, 1, WARM_UP + FEWEST, 9.0)  # one gap too few
    assert book.meter.speeds == {}
    train(book, WARM_UP + FEWEST + 1, 40, 0.5)
    assert book.meter.speeds == {2: 2.0}
    book.note(step(200, 5000.0))  # steps are missing in between
    train(book, 201, 3, 0.5)
    assert book.meter.speeds == {2: 2.0}


def test_steps_that_nobody_heard_of_make_no_speed() -> None:
    book = JobBook()
    book.note(started(0, 0))
    for n in range(1, 40, 2):
        book.note(step(n, 1000.0 + n))
    assert book.meter.speeds == {}


def test_speed_is_not_measured_during_a_change_and_counts_for_those_who_made_it() -> None:
    book = JobBook(speeds={1: 1.0, 4: 7.0})
    book.note(started(0, 0))
    train(book, 1, 20, 0.5)
    book.note({"event": "change_begun", "generation": 1, "joiners": [1], "leavers": []})
    train(book, 21, 20, 5.0)
    assert book.meter.speeds == {1: 2.0, 4: 7.0}
    book.note(started(1, 0, 1))
    train(book, 41, 20, 0.25)
    assert book.meter.speeds == {1: 2.0, 2: 4.0, 4: 7.0}


def test_the_story_of_a_long_job_stays_short() -> None:
    written = [step for step in range(1, 2_000_001) if not step % step_stride(step)]
    assert written[: 2 * EACH_STEP] == list(range(1, 2 * EACH_STEP + 1))
    assert len(written) < 10 * EACH_STEP
    assert all(not step % stride for stride in (64, 256) for step in written if step_stride(step) == stride)


def planned(epochs: int, batches: int) -> dict[str, Any]:
    return {"event": "planned", "worker": 0, "epochs": epochs, "batches": batches, "step": 0}


def epoch(number: int, at_step: int, epochs: int = 10, worker: int = 0) -> dict[str, Any]:
    return {"event": "epoch", "worker": worker, "epoch": number, "epochs": epochs, "step": at_step}


def test_the_whole_work_is_what_the_script_plans_or_the_bound() -> None:
    book = JobBook()
    assert book.total_steps == 0
    book.note(planned(10, 22))
    assert book.total_steps == 220
    assert JobBook(steps=50).total_steps == 50
    bounded = JobBook(steps=50)
    bounded.note(planned(10, 22))
    assert bounded.total_steps == 50


def test_a_script_that_accumulates_makes_fewer_steps_than_batches() -> None:
    book = JobBook()
    book.note(started(0, 0, 1))
    book.note(planned(10, 20))
    book.note(epoch(0, 0))
    book.note(epoch(1, 5))
    assert book.total_steps == 50


def test_an_epoch_that_was_resumed_in_its_middle_says_nothing_of_the_work() -> None:
    book = JobBook()
    book.note(started(0, 0, 1))
    book.note(planned(10, 20))
    book.note(epoch(3, 70))
    book.note(epoch(4, 80))
    assert book.total_steps == 200
    book.note(epoch(5, 100, worker=1))  # not the main worker
    book.note(epoch(5, 90))
    assert book.total_steps == 100


def test_the_speed_of_short_steps_is_taken_over_a_while() -> None:
    """On busy cores, steps of milliseconds come in bursts: there is no usual one."""
    meter, at = SpeedMeter({}), 0.0
    for number in range(1, 2000):
        at += 0.050 if number % 25 == 0 else 0.002
        meter.stepped(number, at, 1)
    assert meter.speeds[1] == pytest.approx(25 / (24 * 0.002 + 0.050), rel=0.1)


def test_a_few_short_steps_make_a_speed_where_there_is_none() -> None:
    meter = SpeedMeter({2: 5.0})
    for number in range(1, 12):
        meter.stepped(number, number * 0.002, 1)
    assert meter.speeds == {2: 5.0, 1: pytest.approx(500.0)}
    meter.disturbed()
    for number in range(12, 24):
        meter.stepped(number, number * 0.002, 2)
    assert meter.speeds[2] == 5.0, "what was measured before holds until there is as good a measurement"


def test_what_was_measured_on_other_devices_is_forgotten() -> None:
    meter = SpeedMeter({2: 5.0})
    for number in range(1, 12):
        meter.stepped(number, number * 0.5, 1)
    assert meter.speeds == {1: 2.0, 2: 5.0}
    meter.forget()
    meter.stepped(12, 6.0, 1)
    assert meter.speeds == {}


def test_values_that_are_no_numbers_are_not_shown() -> None:
    book = JobBook()
    book.note(step(1, 1.0, loss=float("nan"), accuracy=0.5))
    assert book.values == {"accuracy": 0.5}


def test_what_a_script_says_of_itself_can_be_reckoned_with_and_shown() -> None:
    book = JobBook()
    book.note(planned(10**400, 7))
    assert known_work(0, book.total_steps) == 1e15
    book.note({**step(1, 1.0), "log": {"loss\x1b[2J\n": 1.0}})
    assert book.values == {"loss [2J": 1.0}


def test_a_job_is_not_begun_on_a_full_disk_and_is_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = JobState(id="j", slots=("n/0",), order=3)
    task = Task(request=JobRequest(id="j", name="j", user="u", script="/s"), state=state, before=None, backend="local")
    with (tmp_path / "events.jsonl").open("a") as sink:
        office = Office("memory:", tmp_path, task, 1, sink, lock=-1)
        free = [0, 0, 1 << 30]
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free.pop(0)))
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        office._wait_for_room()
        assert (len(slept), free) == (2, [])
        told = office._link._wanted
        assert told is not None
        assert (told.heard, told.slots) == (3, ())
        assert "is full" in told.error
        free[:] = [0]
        office._link.state = replace(state, slots=(), order=4)
        office._wait_for_room()
        assert free == [0], "nothing is to be begun"


def test_nothing_is_made_on_a_full_disk_before_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be, and the attempt would count as one that failed."""
    state = JobState(id="j", slots=("n/0",), order=3)
    task = Task(request=JobRequest(id="j", name="j", user="u", script="/s"), state=state, before=None, backend="local")
    with (tmp_path / "events.jsonl").open("a") as sink:
        office = Office("memory:", tmp_path, task, 1, sink, lock=-1)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))

        def take_its_slots(seconds: float) -> None:
            office._link.state = replace(state, slots=(), order=4)

        monkeypatch.setattr(time, "sleep", take_its_slots)
        assert office._keep() == Ending(outcome=Outcome.SUSPENDED)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]


def test_a_keeper_whose_job_has_not_begun_says_where_it_will_go_on(tmp_path: Path) -> None:
    before = JobSeen(
        id="j",
        attempt=1,
        order=5,
        activity=Activity.SUSPENDED,
        step=9010,
        epoch=3,
        epochs=4,
        total_steps=12000,
        checkpoint_step=9000,
        values={"loss": 0.5},
        speeds={2: 8.0},
        device_type="cpu",
    )
    request = JobRequest(id="j", name="j", user="u", script="/s")
    task = Task(request=request, state=JobState(id="j"), before=before, backend="local")
    with (tmp_path / "events.jsonl").open("a") as sink:
        office = Office("memory:", tmp_path, task, 2, sink, lock=-1)
        office._link.flush = lambda limit_s: True  # type: ignore[method-assign]
        office._leave(Ending(outcome=Outcome.SUSPENDED))
    said = office._link._wanted
    assert said == replace(before, attempt=2, order=0, step=9000, exit=0, at_s=said.at_s)  # type: ignore[union-attr]


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_keeper_that_can_not_even_complain_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk: its log is there, too."""
    task = Task(
        request=JobRequest(id="j", name="j", user="u", script="/s"),
        state=JobState(id="j"),
        before=None,
        backend="local",
    )
    monkeypatch.setattr("sys.stderr", Full())
    Office("memory:", tmp_path, task, 1, Full(), lock=-1)._tell({"event": "anything"})


# -- the line to the store -------------------------------------------------------------------------------------------


class Shared:
    """A store in memory that survives the closing of connections and may be away."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.away = False

    def open(self) -> Store:
        if self.away:
            raise StoreUnavailable("away")
        return _Connection(self)  # type: ignore[return-value]

    def seen(self) -> JobSeen | None:
        found = self.store.get(keys.SEEN + "j")
        return None if found is None else load(JobSeen, found.value)


class _Connection:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if self._shared.away:
            raise StoreUnavailable("away")
        return getattr(self._shared.store, name)


def eventually(what: Any, limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def shared() -> Shared:
    shared = Shared()
    shared.store.put(keys.STATES + "j", dump(JobState(id="j", order=1, attempt=2, slots=("n/0",))))
    return shared


@pytest.fixture
def link(shared: Shared) -> Iterator[StoreLink]:
    link = StoreLink(shared.open, me("j", 2), JobState(id="j", order=1, attempt=2))
    link.start()
    yield link
    shared.away = False
    link.close()


def test_what_is_published_is_written_and_what_is_decided_is_read(shared: Shared, link: StoreLink) -> None:
    link.publish(JobSeen(id="j", attempt=2, step=1))
    assert link.flush(10.0)
    assert shared.seen() == JobSeen(id="j", attempt=2, step=1)
    shared.store.put(keys.STATES + "j", dump(JobState(id="j", order=5, attempt=2, slots=("n/1",))))
    shared.store.put(keys.STATES + "j2", dump(JobState(id="j2", order=7, attempt=9)))
    eventually(lambda: link.state.order == 5)
    eventually(lambda: shared.store.get(keys.KEEPERS + "j"))
    assert load(Keeper, shared.store.get(keys.KEEPERS + "j").value) == link._keeper  # type: ignore[union-attr]


def test_a_store_that_is_away_is_told_later(shared: Shared, link: StoreLink) -> None:
    link.publish(JobSeen(id="j", attempt=2, step=1))
    assert link.flush(10.0)
    shared.away = True
    link.publish(JobSeen(id="j", attempt=2, step=2, activity=Activity.TRAINING))
    assert not link.flush(0.5)
    assert not link.over
    shared.away = False
    assert link.flush(10.0)
    assert shared.seen().step == 2  # type: ignore[union-attr]


def test_the_last_word_ends_the_lease(shared: Shared, link: StoreLink) -> None:
    eventually(lambda: shared.store.get(keys.KEEPERS + "j"))
    link.close()
    assert shared.store.get(keys.KEEPERS + "j") is None


def test_a_lapsed_lease_is_taken_again(shared: Shared, link: StoreLink) -> None:
    eventually(lambda: shared.store.get(keys.KEEPERS + "j"))
    assert link._lease is not None
    shared.store.revoke(link._lease)
    assert shared.store.get(keys.KEEPERS + "j") is None
    eventually(lambda: shared.store.get(keys.KEEPERS + "j"))
    assert not link.over


def test_a_later_attempt_ends_this_one(shared: Shared, link: StoreLink) -> None:
    shared.store.put(keys.STATES + "j", dump(JobState(id="j", order=2, attempt=3)))
    eventually(lambda: link.over)
    assert "attempt 3" in link.over


def test_a_later_keeper_in_office_ends_this_one(shared: Shared) -> None:
    shared.store.put(keys.KEEPERS + "j", dump(me("j", 3)))
    link = StoreLink(shared.open, me("j", 2), JobState(id="j", attempt=2))
    link.start()
    eventually(lambda: link.over)
    link.close()


def test_nothing_is_written_over_a_later_attempts_record(shared: Shared, link: StoreLink) -> None:
    shared.store.put(keys.SEEN + "j", dump(JobSeen(id="j", attempt=3, step=9)))
    link.publish(JobSeen(id="j", attempt=2, step=1))
    eventually(lambda: link.over)
    assert shared.seen().attempt == 3  # type: ignore[union-attr]


def test_an_earlier_attempts_record_is_written_over(shared: Shared, link: StoreLink) -> None:
    shared.store.put(keys.SEEN + "j", dump(JobSeen(id="j", attempt=1, step=9)))
    link.publish(JobSeen(id="j", attempt=2, step=1))
    assert link.flush(10.0)
    assert shared.seen().attempt == 2  # type: ignore[union-attr]


def test_a_line_that_can_not_even_complain_goes_on(
    shared: Shared, link: StoreLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk: without its threads, a job that trains would look dead."""
    monkeypatch.setattr("sys.stderr", Full())
    shared.away = True
    link.publish(JobSeen(id="j", attempt=2, step=1))
    eventually(lambda: link.silent_since is not None)
    shared.away = False
    assert link.flush(10.0)
    assert all(thread.is_alive() for thread in link._threads)


# -- starting --------------------------------------------------------------------------------------------------------


def test_a_pid_that_is_used_again_is_somebody_else() -> None:
    keeper = me("j", 1)
    assert keeper_alive(keeper)
    assert not keeper_alive(replace(keeper, started_ticks=keeper.started_ticks - 1))
    assert keeper_alive(replace(keeper, host="elsewhere", pid=-5))
    assert start_ticks(2**30) is None


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, "j")
    folder.mkdir(parents=True)
    assert not is_held(tmp_path, "j")
    lock = take_lock(folder / "keeper.lock", 0.0)
    assert lock is not None
    assert is_held(tmp_path, "j")
    assert take_lock(folder / "keeper.lock", 0.1) is None
    os.close(lock)
    assert not is_held(tmp_path, "j")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a/"])
def test_a_job_has_a_name_that_a_folder_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needed a name"):
        job_folder(tmp_path, name)


def test_a_keepers_environment_has_no_token_and_is_good_anywhere() -> None:
    env = environment({"CONCERTINA_TOKEN": "secret", "HOME": "/h", "PYTHONPATH": "src:/lib"}, Path("/somewhere"))
    assert env == {"HOME": "/h", "PYTHONPATH": "/somewhere/src:/lib", "PYTHONSAFEPATH": "keeper"}
