"""A worker among others: what it does while a host does not answer, and while too few are left."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from concertina.core.env import WorkerEnv
from concertina.core.errors import ConcertinaError
from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement
from concertina.runtime import elastic
from concertina.runtime import membership as module
from concertina.runtime.desk import Desk
from concertina.runtime.elastic import Elastic
from concertina.runtime.fabric import LIMIT_SECONDS, PeersLost
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.reach import Reach
from concertina.runtime.segments import Unreachable

PATIENCE = 20.0


class Telling(Membership):
    """Keeps what it would say to the master."""

    def __init__(self) -> None:
        super().__init__(WorkerEnv(virtual=2, worker=0), Desk.create(2, 100))
        self.said: list[dict[str, Any]] = []

    def say(self, **body: Any) -> None:
        self.said.append(body)


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telling]:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.001)
    made = Telling()
    yield made
    made.close()
    made._builder.join(PATIENCE)


def formation(generation: int = 3, **more: Any) -> Formation:
    return Formation(generation=generation, members=(0, 1), placement=VirtualPlacement.blocks(2, 2), **more)


class Answers:
    """Memory of another host: does not answer so often, then is there."""

    def __init__(self, in_vain: int, error: type[OSError] = Unreachable) -> None:
        self.left, self.error, self.asked = in_vain, error, threading.Event()

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "there"
        self.asked.set()
        raise self.error("no answer")


def test_a_member_whose_host_does_not_answer_is_tried_again_until_it_does(membership: Telling) -> None:
    assert membership._open(formation(), 1, Answers(5)) == "there"


@pytest.mark.parametrize(
    "news",
    [
        {"op": "lost", "lost": [1]},
        {"op": "abandon", "generation": 3},
        {"op": "dismiss"},
        {"op": "form", "formation": formation(4).to_json(), "at_once": True},
    ],
    ids=["it is lost", "the change is given up", "this worker is to go", "another generation is formed"],
)
def test_or_until_the_master_says_how_it_goes_on(membership: Telling, news: dict[str, Any]) -> None:
    answers = Answers(1_000_000)
    teller = threading.Thread(target=lambda: (answers.asked.wait(PATIENCE), membership._on_message(news)))
    teller.start()
    with pytest.raises(PeersLost, match="worker 1"):
        membership._open(formation(), 1, answers)
    teller.join(PATIENCE)


def test_news_of_others_change_nothing(membership: Telling) -> None:
    membership._on_message({"op": "lost", "lost": [2]})
    membership._on_message({"op": "abandon", "generation": 2})
    assert membership._open(formation(), 1, Answers(5)) == "there"


def test_a_member_that_cannot_be_read_for_too_long_is_not_said_to_be_gone(
    membership: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(membership, "build", lambda formation: membership._open(formation, 1, Answers(1_000_000)))
    membership._build_pending(formation())
    assert [said["op"] for said in membership.said] == ["build_failed"]  # otherwise the change would never end


def test_memory_that_is_gone_is_not_asked_for_again(membership: Telling) -> None:
    answers = Answers(5, ConnectionError)
    with pytest.raises(PeersLost):
        membership._open(formation(), 1, answers)
    assert answers.left == 4


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (PeersLost([1]), []),
        (PeersLost([]), [{"op": "build_failed", "generation": 3, "error": "its connections broke"}]),
    ],
    ids=["somebody is lost, as the master knows", "nobody is"],
)
def test_a_generation_that_cannot_be_built_though_nobody_is_lost_is_reported(
    membership: Telling, monkeypatch: pytest.MonkeyPatch, loss: PeersLost, said: list[dict[str, Any]]
) -> None:
    def build(formation: Formation) -> Generation:
        raise loss

    monkeypatch.setattr(membership, "build", build)
    membership._build_pending(formation())
    assert membership.said == said


def test_what_goes_wrong_in_the_background_does_not_end_what_comes_after_it(
    membership: Telling, capfd: pytest.CaptureFixture[str]
) -> None:
    class Bad:
        def close(self) -> None:
            raise RuntimeError("it does not close")

    done = threading.Event()
    membership.take_down(Bad())
    membership.in_background(done.set)
    assert done.wait(PATIENCE)
    assert "it does not close" in capfd.readouterr().err


# -- planned changes -------------------------------------------------------------------------------------------------


def test_a_newcomer_that_never_comes_is_waited_for_once_and_not_at_every_step(
    membership: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 1000.0, 0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    def meanwhile() -> None:
        nonlocal now, looks
        now, looks = now + 100.0, looks + 1

    waited = []
    membership._next_hold = 5
    for step in (4, 5, 6, 7, 9):
        if step == 9:
            membership._next_hold = 9  # another plan
        looks = 0
        membership.hold(step, meanwhile)
        waited.append(looks)
    assert waited == [0, 2, 0, 0, 2]


def test_a_plan_that_is_given_up_leaves_the_next_one_its_time(
    membership: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 1000.0, 0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    def meanwhile() -> None:
        nonlocal now, looks
        now, looks = now + 100.0, looks + 1
        membership._next_hold = 9

    membership._next_hold = 5
    membership.hold(5, meanwhile)
    now += 1000.0
    membership.hold(9, meanwhile)
    assert looks == 1 + 2


@pytest.mark.parametrize(("parked", "waited"), [(False, [2, 0]), (True, [2, 2])], ids=["training", "too few"])
def test_newcomers_that_fall_behind_again_and_again_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, parked: bool, waited: list[int]
) -> None:
    now, looks = 1000.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + 100.0, looks + 1

    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    main = SimpleNamespace(
        _membership=SimpleNamespace(wanted=formation(hold_at=5, joiners=(1,)), vote=3),
        generation=SimpleNamespace(formation=formation(2, parked=parked)),
        is_main=True,
        _newcomers_follow=lambda: False,
        _awaited=(0, 0.0),
    )
    found = []
    for step in (5, 6):
        looks = 0
        Elastic._wait_for_newcomers(cast(Elastic, main), step)
        found.append(looks)
    assert found == waited


# -- too few are left ------------------------------------------------------------------------------------------------


class Silent:
    """A link that has heard no master for so long."""

    def __init__(self, seconds: float) -> None:
        self.silence_s = seconds

    def close(self, limit_s: float) -> None:
        """Nothing is open."""


def test_too_few_workers_wait_for_longer_than_any_other_wait_while_there_is_a_master(
    membership: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", 0.0)
    membership._parked, looks = True, 0

    def meanwhile() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            membership._at_once = formation()

    membership.hold(5, meanwhile)
    assert looks == 3


def test_without_any_master_they_do_not_train_on_but_end(membership: Telling) -> None:
    membership._parked, membership.link = True, Silent(LIMIT_SECONDS + 1)  # type: ignore[assignment]
    with pytest.raises(ConcertinaError, match="has been heard for 1801 s"):
        membership.hold(5, lambda: None)


# -- signs of life ---------------------------------------------------------------------------------------------------


class Wire:
    """As much of one as signs of life need."""

    def __init__(self) -> None:
        self.reach = Reach(lambda: 0.0)

    def close(self) -> None:
        """Nothing is open."""


def test_on_several_hosts_a_worker_says_for_how_long_it_has_waited_and_whom_it_cannot_reach(
    membership: Telling,
) -> None:
    assert not {"waits_s", "cut"} & membership._sign_of_life().keys()
    wire = Wire()
    membership._wire = wire  # type: ignore[assignment]
    wire.reach.failed(7)
    assert membership._sign_of_life()["cut"] == [(7, 0.0)]
    assert membership._sign_of_life()["waits_s"] == 0.0
    with membership._waiting():
        assert membership._sign_of_life()["waits_s"] > 0.0
    assert membership._sign_of_life()["waits_s"] == 0.0
