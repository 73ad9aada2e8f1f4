"""A newcomer on another host steps along with a member over a real connection, and reads nothing but what it may."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from followed import KINDS, Member, assert_same, prepared_of, settle

from concertina.runtime import remote_memory, segments
from concertina.runtime.catch_up import CatchUp
from concertina.runtime.desk import METAS, Desk
from concertina.runtime.prepared import Prepared
from concertina.runtime.read_frames import (
    MOST_BYTES,
    MOST_STRETCHES,
    NOT_THERE,
    REPLY_BYTES,
    REQUEST_BYTES,
    Request,
    What,
    ask,
    asked,
    asked_stretches,
    replied,
    reply,
)
from concertina.runtime.remote_memory import RemoteMemory
from concertina.runtime.served_memory import LATE, SEND_SECONDS, GradientCopies, ServedMemory, Stretches
from concertina.runtime.shown import Shown
from concertina.runtime.state_map import describe, items, make_room
from concertina.runtime.together import Together
from concertina.runtime.wire import WireThread
from concertina.runtime.wire_frames import WireError


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WireThread]]:
    """Of a member and a newcomer on two hosts, both in this process."""
    monkeypatch.setattr(remote_memory, "REST", 0.0)
    made = [WireThread(f"127.0.0.{2 + number}", "secret", number) for number in range(2)]
    yield made
    segments.connect(None)
    for wire in made:
        wire.close()
    for thread in threading.enumerate():
        if thread.name.startswith("concertina-"):
            thread.join(10)


class Remote(Member):
    """A member that newcomers on other hosts may follow."""

    def __init__(self, wire: WireThread, kind: Any, **options: Any) -> None:
        super().__init__(kind, shares=False, **options)
        self.step()
        segments.connect(wire)
        self.served = ServedMemory(self.desk, [item.tensor for item in items(self.prepared)], 1)
        self.place = segments.serve(self.served)

    def begin(self) -> None:
        super().begin()
        if hasattr(self, "served"):
            self.served.note(self.desk.noted, self.number + 1, list(self.grads.values()))


def described(member: Member) -> dict[str, Any]:
    found = describe(member.prepared)
    assert found is not None
    return found


def follow(wire: WireThread, member: Remote, kind: Any, **options: Any) -> tuple[CatchUp, Prepared]:
    newcomer = prepared_of(kind, 2, **options)
    segments.connect(wire)
    return CatchUp(RemoteMemory(member.place), member.desk, newcomer, described(member)), newcomer


def step_along(member: Remote, *followers: CatchUp | Together) -> None:
    member.begin()
    for follower in followers:
        assert not follower.reaches(member.number + 1)  # it has the gradients, and acts beside the member
    member.end()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_it_follows_over_the_network_and_comes_to_the_same(wires: list[WireThread], kind: Any, options: Any) -> None:
    member = Remote(wires[0], kind, **options)
    catch_up, newcomer = follow(wires[1], member, kind, **options)
    settle(catch_up)
    for _ in range(3):
        step_along(member, catch_up)
    assert catch_up.reaches(member.number)
    assert catch_up.replayed == 3
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)
    catch_up.close()


def test_pieces_are_smaller_than_a_parameter_and_come_to_the_same(
    wires: list[WireThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteMemory, "slice", 16)
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, newcomer = follow(wires[1], member, torch.optim.AdamW)
    assert len(catch_up._pieces) > len(member.params)
    settle(catch_up)
    step_along(member, catch_up)
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)
    catch_up.close()


def test_from_two_members_it_takes_a_share_each(wires: list[WireThread]) -> None:
    first, second = Remote(wires[0], torch.optim.AdamW), Remote(wires[1], torch.optim.AdamW)
    newcomer = prepared_of(torch.optim.AdamW, 2)
    room = [tensor for _, tensor in make_room(newcomer, described(first))]
    shares = []
    for wire, member, share in ((wires[1], first, (0, 1, 2)), (wires[0], second, (1, 2, 2))):
        segments.connect(wire)
        memory = RemoteMemory(member.place)
        shares.append(CatchUp(memory, member.desk, newcomer, described(member), room, share))
    assert [len(share._pieces) for share in shares] == [2, 2]  # of a model with four parameters
    together = Together(shares)
    for step in (2, 3, 4):
        for member in (first, second):
            torch.manual_seed(step)
            member.step()
        while not together.in_step:
            together.work()
    while not together.reaches(4):
        pass
    together.finish(4)
    assert_same(first, newcomer)
    assert_same(second, newcomer)
    assert all(share.copied_bytes > 0 for share in shares)
    together.close()


def test_whoever_follows_too_slowly_begins_again_and_gives_up_in_the_end(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, newcomer = follow(wires[1], member, torch.optim.AdamW)
    for _ in range(RemoteMemory.most_lapses + 1):
        assert not catch_up.gave_up
        settle(catch_up)
        for _ in range(METAS):
            member.step()
        catch_up.follow_note()
    assert "faster than they could be followed" in catch_up.gave_up
    assert catch_up.in_step  # there is no use in waiting for it
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) > 0
    assert_same(member, newcomer)
    catch_up.close()


def test_a_newcomer_whose_host_is_cut_off_is_not_served_for_ever(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, _ = follow(wires[1], member, torch.optim.AdamW)
    (reader,) = member.served._readers
    assert reader.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert reader.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SEND_SECONDS
    catch_up.close()


def test_what_a_script_changes_by_hand_shows_in_the_hashes(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, newcomer = follow(wires[1], member, torch.optim.AdamW)
    while any(piece.version < 0 for piece in catch_up._pieces):
        catch_up._copy(next(piece for piece in catch_up._pieces if piece.version < 0))
    with torch.no_grad():
        member.params[0].mul_(-1.0)
    settle(catch_up)
    assert catch_up.differing == 1
    assert catch_up.finish(member.number) == len(member.params)  # it may have changed others, too
    assert_same(member, newcomer)
    catch_up.close()


def test_nothing_is_read_while_the_optimizers_act(wires: list[WireThread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.runtime.served_memory.WAIT_SECONDS", 0.02)
    member = Remote(wires[0], torch.optim.AdamW)
    segments.connect(wires[1])
    memory = RemoteMemory(member.place)
    member.desk.clock = 3
    room = torch.full((5,), 7.0)
    assert memory.copy(member.desk, [(member.params[1].data_ptr(), room)]) == NOT_THERE
    assert torch.equal(room, torch.full((5,), 7.0))
    assert memory.compare(member.desk, [(member.params[1].data_ptr(), room)]) == (NOT_THERE, False)
    memory.close()


class Scripted:
    """A desk whose clock shows these, one look after the other."""

    def __init__(self, *shows: int) -> None:
        self._shows = iter(shows)

    @property
    def clock(self) -> int:
        return next(self._shows)


def test_what_changes_while_it_is_read_is_read_again() -> None:
    tensor = torch.arange(3.0)
    served = ServedMemory(cast(Any, Scripted(2, 4, 5, 6, 6)), [tensor], 1)
    steps, data = served._read([served._state.find((tensor.data_ptr(), 12))])
    assert steps == 3
    assert data is not None
    assert torch.equal(data.view(torch.float32), tensor)


def test_a_piece_that_is_behind_is_not_compared(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, _ = follow(wires[1], member, torch.optim.AdamW)
    piece = catch_up._pieces[0]
    catch_up._copy(piece)
    member.step()
    catch_up._compare(piece)
    assert not piece.compared
    assert piece.exact
    catch_up.close()


def test_state_of_another_step_is_not_taken_at_the_switch(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    segments.connect(wires[1])
    memory = RemoteMemory(member.place)
    with pytest.raises(OSError, match="does not stand at step 7"):
        memory.copy_settled(7, [(member.params[0].data_ptr(), torch.empty(35))])
    memory.close()


def test_a_member_that_ends_is_noticed_at_once(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    catch_up, _ = follow(wires[1], member, torch.optim.AdamW)
    wires[0].close()
    with pytest.raises(OSError):  # noqa: PT011  # a reset, or an end
        settle(catch_up)
    catch_up.close()


# -- the copies of gradients ----------------------------------------------------------------------------------------


def test_gradients_that_are_overwritten_while_they_are_copied_are_not_kept_and_training_copies_them_itself() -> None:
    desk = Desk.create(1, 100)
    copies = GradientCopies(desk, 3)
    copies.begin()
    desk.overwritten = 100  # the next step's have come already
    grads = [torch.ones(4)]
    for number in range(1, LATE + 2):  # the first time, memory is new and slow, which says nothing
        copies.note(number, 1, grads)
        with copies.read(number, [(grads[0].data_ptr(), 16)]) as found:
            assert found is None
        with copies._changed:
            assert copies._changed.wait_for(lambda number=number: copies._newest == number, 10)  # type: ignore[misc]
    desk.overwritten = 2
    copies.note(LATE + 2, 2, grads)
    grads[0].zero_()
    with copies.read(LATE + 2, [(grads[0].data_ptr() + 4, 8)]) as found:
        assert found is not None
        assert found[0] == 2
        assert found[1][0].view(torch.float32).tolist() == [1.0, 1.0]
    copies.stop()


def test_copies_that_are_being_read_are_not_written_over() -> None:
    copies = GradientCopies(Desk.create(1, 100), 2)
    copies.begin()
    grad = torch.zeros(1)
    stretch = [(grad.data_ptr(), 4)]

    def noted(number: int) -> Any:
        copies.note(number, number, [grad.fill_(number)])
        return copies.read(number, stretch)

    with noted(1) as first, noted(2) as second:
        with noted(3) as third:
            assert third is None
        assert [found[1][0].view(torch.float32).item() for found in (first, second)] == [1.0, 2.0]
    with noted(4) as fourth, copies.read(1, stretch) as gone:
        assert fourth is not None
        assert gone is None
    copies.stop()


def test_nothing_is_copied_before_somebody_follows() -> None:
    copies = GradientCopies(Desk.create(1, 100), 3)
    copies.note(1, 1, [torch.ones(4)])
    with copies.read(1, [(0, 4)]) as found:
        assert found is None
    assert copies._thread is None


# -- who serves, and whom -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "serves"), [("7/fd/1", False), ("7/fd/1@127.0.0.3:1/7/1", True)])
def test_only_for_newcomers_on_other_hosts_is_anything_served(
    wires: list[WireThread], place: str, serves: bool
) -> None:
    segments.connect(wires[0])
    engine = SimpleNamespace(reducer=object(), on_update=None, before_results=None, on_spoiled=None)
    wanted = SimpleNamespace(joiners=(7,), generation=3, members=(0, 7), desks=("0/fd/1@127.0.0.2:1/0/1", place))
    membership = SimpleNamespace(wanted=wanted, in_background=lambda work: work())
    shown = Shown(cast(Any, engine), cast(Any, membership), Desk.create(1, 100))
    shown.prepared = prepared_of(torch.optim.AdamW, 1)
    shown.show()
    assert (shown._served is not None) == serves
    assert bool(wires[0]._served) == serves
    kept = shown.stop()
    assert shown._served is None
    assert any(isinstance(thing, ServedMemory) for thing in kept) == serves  # until newcomers have come


def test_memory_that_nobody_serves_any_more_cannot_be_read(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    place = member.place
    del member
    segments.connect(wires[1])
    with pytest.raises(OSError, match="nothing is served"):
        RemoteMemory(place)
    with pytest.raises(OSError, match="to nobody"):
        RemoteMemory("")


def test_who_does_not_know_the_key_reads_nothing(wires: list[WireThread]) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    stranger = WireThread("127.0.0.9", "guess", 9)
    try:
        segments.connect(stranger)
        with pytest.raises(ConnectionError):
            RemoteMemory(member.place)
    finally:
        stranger.close()


def test_only_what_was_told_of_is_found() -> None:
    tensor = torch.arange(4.0)
    at = tensor.data_ptr()
    known = Stretches([tensor])
    assert known.find((at + 4, 12)).view(torch.float32).tolist() == [1.0, 2.0, 3.0]
    for stretch in ((at - 4, 8), (at + 4, 16), (at + 16, 1), (0, 1)):
        with pytest.raises(WireError, match="where nothing is that we have told of"):
            known.find(stretch)


@pytest.mark.parametrize("offset", [-4, 4])
def test_memory_that_was_not_told_of_is_not_read(wires: list[WireThread], offset: int) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    segments.connect(wires[1])
    memory = RemoteMemory(member.place)
    weight = member.params[0]
    with pytest.raises(OSError):  # noqa: PT011  # a reset, or an end
        memory.copy(member.desk, [(weight.data_ptr() + offset, torch.empty_like(weight))])
    memory.close()


@pytest.mark.parametrize(
    "rubbish",
    [bytes(REQUEST_BYTES), b"\xff" * 100, ask(What.STATE, [(1, 1)])[:-1]],
    ids=["zeros", "ones", "half a request"],
)
def test_rubbish_is_hung_up_on(wires: list[WireThread], rubbish: bytes) -> None:
    member = Remote(wires[0], torch.optim.AdamW)
    segments.connect(wires[1])
    memory = RemoteMemory(member.place)
    memory._sock.sendall(rubbish)
    with contextlib.suppress(OSError):  # hung up on already
        memory._sock.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError):  # noqa: PT011  # a reset, or an end
        memory._receive(memoryview(bytearray(1)))
    memory.close()
    catch_up, _ = follow(wires[1], member, torch.optim.AdamW)  # others are served as before
    settle(catch_up)
    catch_up.close()


# -- as bytes -------------------------------------------------------------------------------------------------------


def test_requests_and_replies_come_back_as_they_were() -> None:
    data = ask(What.GRADIENTS, [(1 << 46, 5), (3, 1 << 33)], 77)
    assert asked(data[:REQUEST_BYTES]) == Request(What.GRADIENTS, 2, 77)
    assert asked_stretches(data[REQUEST_BYTES:]) == [(1 << 46, 5), (3, 1 << 33)]
    assert replied(reply(12, 40), 40) == 12
    assert replied(reply(NOT_THERE, 0), 40) == NOT_THERE
    assert len(reply(1, 1)) == REPLY_BYTES


@pytest.mark.parametrize("stretches", [0, MOST_STRETCHES + 1])
def test_a_request_for_too_much_is_refused_before_anything_is_set_aside(stretches: int) -> None:
    head = bytearray(ask(What.STATE, [(1, 1)])[:REQUEST_BYTES])
    head[4:8] = stretches.to_bytes(4, "little")
    with pytest.raises(WireError, match="stretches"):
        asked(bytes(head))
    with pytest.raises(WireError, match="at most"):
        asked_stretches(ask(What.STATE, [(1, MOST_BYTES), (1, 1)])[REQUEST_BYTES:])


@pytest.mark.parametrize("said", [reply(3, 39), reply(NOT_THERE, 40)])
def test_an_answer_of_another_size_is_not_taken(said: bytes) -> None:
    with pytest.raises(WireError, match="in answer to"):
        replied(said, 40)
