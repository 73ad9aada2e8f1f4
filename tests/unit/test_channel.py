"""Messages arrive once and in order, whatever the connection does to them and whoever is replaced meanwhile."""

import json
import random

import pytest

from concertina.core.channel import RESEND_SECONDS, Channel


def reborn(channel: Channel) -> Channel:
    return Channel.from_json(json.loads(json.dumps(channel.to_json())))


def test_a_message_is_taken_once_and_confirmed_by_whatever_comes_back() -> None:
    here, there = Channel(), Channel()
    frame = here.say({"op": "a"}, now=0.0)
    assert there.take(frame) == {"op": "a"}
    assert there.take(frame) is None
    assert here.take(there.nod()) is None
    assert here.unconfirmed == []


def test_what_comes_too_early_is_not_taken_and_comes_again() -> None:
    here, there = Channel(), Channel()
    first, second = here.say({"n": 1}, 0.0), here.say({"n": 2}, 0.0)
    assert there.take(second) is None
    here.take(there.nod())
    assert here.again(RESEND_SECONDS / 2) == []
    assert [there.take(frame) for frame in here.again(RESEND_SECONDS)] == [{"n": 1}, {"n": 2}]
    assert there.take(first) is None


def test_a_successor_goes_on_where_the_one_before_stopped() -> None:
    here, there = Channel(), Channel()
    there.take(here.say({"n": 1}, 0.0))
    here.say({"n": 2}, 0.0)  # lost
    here, there = reborn(here), reborn(there)
    found = [body for frame in here.again(RESEND_SECONDS) if (body := there.take(frame)) is not None]
    assert found == [{"n": 2}]
    assert there.take(here.say({"n": 3}, 1.0)) == {"n": 3}


@pytest.mark.parametrize("seed", range(40))
def test_loss_repetition_disorder_and_rebirth_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    sides = [Channel(), Channel()]
    said: list[list[dict[str, int]]] = [[], []]
    heard: list[list[object]] = [[], []]
    wires: list[list[dict[str, object]]] = [[], []]  # frames on their way to each side
    now = 0.0
    while now < 60:
        now += 0.1
        side = chance.randrange(2)
        if now < 30 and chance.random() < 0.5:
            said[side].append({"n": len(said[side])})
            wires[1 - side].append(sides[side].say(said[side][-1], now))
        wires[1 - side] += sides[side].again(now)
        if wires[side] and chance.random() < 0.8:
            frame = wires[side].pop(chance.randrange(len(wires[side])))
            if chance.random() < 0.2:
                wires[side].append(frame)  # it will come again
            if chance.random() < 0.7 or now > 50:
                body = sides[side].take(frame)
                if body is not None:
                    heard[side].append(body)
                wires[1 - side].append(sides[side].nod())
        if chance.random() < 0.05:
            sides[side] = reborn(sides[side])
        wires = [wire[-20:] for wire in wires]
    assert len(said[0]) > 20
    assert heard[1][: len(said[0])] == said[0][: len(heard[1])]
    assert heard[0][: len(said[1])] == said[1][: len(heard[0])]
    assert all(len(heard[1 - k]) >= len(said[k]) - len(sides[k].unconfirmed) for k in range(2))


def test_nothing_is_said_again_once_it_is_confirmed() -> None:
    here, there = Channel(), Channel()
    for n in range(3):
        there.take(here.say({"n": n}, 0.0))
    here.take(there.say({"ok": True}, 0.0))  # an answer confirms, too
    assert here.again(10.0) == []
    assert here.to_json()["unconfirmed"] == []
