"""What a worker leaves where others can read it, also when it dies while it writes."""

import pytest

from concertina.runtime.desk import META, METAS, SLOTS, Desk, is_final, newest_context


@pytest.fixture
def desk() -> Desk:
    return Desk.create(virtual=3, capacity=100)


def test_another_reads_what_was_written(desk: Desk) -> None:
    desk.put_context(2, 7, b"seven", final=False)
    other = Desk.open(desk.segment.address, virtual=3)
    assert other.context(2, 7) == (b"seven", False)
    assert other.context(1, 7) is None
    assert other.context(2, 6) is None


def test_the_newest_record_of_a_point_is_the_one_that_counts(desk: Desk) -> None:
    desk.put_context(0, 4, b"before", final=False)
    desk.put_context(0, 4, b"after the optimizer", final=True)
    assert desk.context(0, 4) == (b"after the optimizer", True)


def test_a_torn_record_is_not_taken(desk: Desk) -> None:
    for number in range(1, SLOTS + 1):  # so that the next one is written over an old one
        desk.put_context(0, number, b"whole", final=True)

    class Killed(Exception):
        pass

    class DyingMemory:
        """Dies half way through a record."""

        def __init__(self, memory: object) -> None:
            self._memory = memory

        def __setitem__(self, place: slice, data: bytes) -> None:
            half = len(data) // 2
            self._memory[place.start : place.start + half] = data[:half]  # type: ignore[index]
            raise Killed

    other = Desk.open(desk.segment.address, virtual=3)
    desk.segment.memory = DyingMemory(desk.segment.memory)  # type: ignore[assignment]
    with pytest.raises(Killed):
        desk.put_context(0, SLOTS + 1, b"torn", final=True)
    assert other.context(0, SLOTS + 1) is None
    assert other.context(0, 1) is None
    assert other.context(0, SLOTS) == (b"whole", True)


def test_a_record_of_the_same_point_survives_a_torn_one(desk: Desk) -> None:
    desk.put_context(0, 4, b"provisional", final=False)
    head = desk._head(0, desk._written[0] % SLOTS)
    desk.words[head] = -1  # a second record of the point was begun
    assert desk.context(0, 4) == (b"provisional", False)


def test_the_last_few_points_are_kept_and_no_more(desk: Desk) -> None:
    for number in range(1, SLOTS + 3):
        desk.put_context(1, number, b"%d" % number, final=True)
    assert desk.context(1, 2) is None
    assert [desk.context(1, n) for n in range(3, SLOTS + 3)] == [(b"%d" % n, True) for n in range(3, SLOTS + 3)]


def test_a_final_record_comes_before_a_provisional_one_whoever_has_it() -> None:
    desks = [Desk.create(2, 100) for _ in range(3)]
    desks[0].put_context(1, 4, b"provisional", final=False)
    desks[2].put_context(1, 4, b"final", final=True)
    for order in (desks, desks[::-1]):
        assert newest_context(order, 1, 4) == (b"final", True)
    assert newest_context(desks[:2], 1, 4) == (b"provisional", False)
    assert newest_context(desks, 0, 4) is None


def test_a_record_is_made_final_only_if_it_is_of_that_point(desk: Desk) -> None:
    desk.put_context(0, 4, b"four", final=False)
    assert not is_final(desk, 0, 4)
    assert not desk.make_final(0, 5)
    assert desk.make_final(0, 4)
    assert is_final(desk, 0, 4)


def test_a_record_without_room_is_refused_and_nothing_is_lost(desk: Desk) -> None:
    desk.put_context(0, 4, b"four", final=True)
    assert not desk.put_context(0, 5, b"x" * 1000, final=True)
    assert desk.context(0, 4) == (b"four", True)


def test_a_switch_is_announced_with_its_place(desk: Desk) -> None:
    other = Desk.open(desk.segment.address, virtual=3)
    assert other.switch[0] == 0
    desk.announce_switch(3, 120, "17/fd/9")
    assert other.switch == (3, 120, "17/fd/9")
    desk.place = (1, 0, 2, 30)
    assert other.place == (1, 0, 2, 30)


def test_a_record_that_is_put_again_is_found_under_its_new_point(desk: Desk) -> None:
    other = Desk.open(desk.segment.address, virtual=3)
    for number in range(1, 3 * SLOTS):
        record = b"same" if number % 5 else b"another"
        desk.put_context(0, number, record, final=True)
        assert other.context(0, number) == (record, True)


def test_notes_are_read_in_order_and_never_torn(desk: Desk) -> None:
    other = Desk.open(desk.segment.address, virtual=3)
    for step in range(1, METAS):
        desk.note({"step": step})
    assert other.noted == METAS - 1
    assert [other.read_note(n) for n in range(1, METAS)] == [{"step": n} for n in range(1, METAS)]
    desk.note({"step": METAS})
    assert other.read_note(1) is None  # the next one will be written over it
    assert other.read_note(2) == {"step": 2}


def test_a_note_without_room_says_so(desk: Desk) -> None:
    desk.note({"step": 3, "grads": "x" * META})
    assert desk.read_note(1) == {"step": 3, "too_long": True}


def test_hosts_that_stand_in_the_same_rack_say_the_same_number() -> None:
    one, same, other, silent = (Desk.create(1, 100) for _ in range(4))
    for desk, name in ((one, "row 3, rack 7"), (same, "row 3, rack 7"), (other, "row 3, rack 8"), (silent, "")):
        desk.say_rack(name)
    assert one.rack == same.rack != 0
    assert other.rack not in (0, one.rack)
    assert silent.rack == 0
