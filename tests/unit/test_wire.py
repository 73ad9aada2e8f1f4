"""Mirrors of another host's memory: all changes in their order, nothing from strangers, nothing after the end."""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from concertina.runtime import mirrors, segments
from concertina.runtime.desk import Desk
from concertina.runtime.fabric import Fabric, PeersLost, Post
from concertina.runtime.mirrors import UNANSWERED_SECONDS, Owner
from concertina.runtime.segments import Segment, Unreachable
from concertina.runtime.wire import SILENT_SECONDS, WireThread
from concertina.runtime.wire_frames import (
    HELLO_BYTES,
    LONGEST,
    NONCE_BYTES,
    Frame,
    Kind,
    Parser,
    WireError,
    answer,
    pack,
)
from concertina.runtime.wire_readers import ReaderLink

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.fixture
def wires() -> Iterator[list[WireThread]]:
    """Of three workers on three hosts, all in this process."""
    made = [WireThread(host, "secret", number) for number, host in enumerate(HOSTS)]
    yield made
    segments.connect(None)
    for wire in made:
        wire.close()


def make(wire: WireThread, size: int) -> Segment:
    segments.connect(wire)
    return Segment.create(size)


def read(wire: WireThread, address: str) -> Segment:
    segments.connect(wire)
    return Segment.open(address)


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.002)
    return true()


def test_a_mirror_has_the_contents_and_follows_every_change(wires: list[WireThread]) -> None:
    source = make(wires[0], 1 << 16)
    source.memory[5000:5005] = b"hello"
    mirror = read(wires[1], source.address)
    assert mirror.size == source.size
    assert mirror.memory[:] == source.memory[:]
    source.memory[10:13] = b"new"
    source.push(10, 3)
    assert eventually(lambda: mirror.memory[10:13] == b"new")


def test_changes_arrive_in_the_order_in_which_they_were_made(wires: list[WireThread]) -> None:
    source = make(wires[0], 1 << 16)
    mirror = read(wires[1], source.address)
    there, seen = memoryview(mirror.memory).cast("q"), memoryview(source.memory).cast("q")
    torn: list[tuple[int, int]] = []

    def watch() -> None:
        while there[0] < 3000:
            first = there[0]
            second = there[4000]
            if second < first:
                torn.append((first, second))
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 3001):
        seen[4000] = number
        source.push(8 * 4000, 8)
        seen[0] = number
        source.push(0, 8)
    watcher.join(30)
    assert not watcher.is_alive()
    assert torn == []


def test_memory_that_was_never_written_is_neither_sent_nor_set_aside(wires: list[WireThread]) -> None:
    source = make(wires[0], 1 << 33)
    source.memory[(1 << 32) : (1 << 32) + 3] = b"far"
    mirror = read(wires[1], source.address)
    assert mirror.memory[(1 << 32) : (1 << 32) + 3] == b"far"
    assert sum(size for _, size in mirror.used()) < 1 << 22


def test_what_is_larger_than_a_frame_arrives_whole(wires: list[WireThread]) -> None:
    data = os.urandom(3 * LONGEST + 17)
    source = make(wires[0], len(data))
    source.memory[: len(data)] = data
    mirror = read(wires[1], source.address)
    assert mirror.memory[: len(data)] == data
    changed = data[::-1]
    source.memory[: len(data)] = changed
    source.push(0, len(data))
    assert eventually(lambda: mirror.memory[: len(data)] == changed)


def test_on_the_same_host_memory_is_shared_and_not_mirrored(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    same = read(wires[0], source.address)
    source.memory[7:8] = b"x"  # and nobody says so
    assert same.memory[7:8] == b"x"
    assert source.readers == ()


def test_memory_that_nobody_keeps_is_gone(wires: list[WireThread]) -> None:
    address = make(wires[0], 4096).address
    gc.collect()
    with pytest.raises(OSError, match="let go"):
        read(wires[1], address)


def test_a_worker_that_is_gone_cannot_be_opened(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    wires[0].close()
    with pytest.raises(Unreachable, match="cannot be reached"):
        read(wires[1], source.address)
    assert [n for n, _ in wires[1].reach.cut()] == [0]


def test_what_was_said_before_the_end_arrives(wires: list[WireThread]) -> None:
    source = make(wires[0], 1 << 20)
    mirror = read(wires[1], source.address)
    for number in range(200):
        source.memory[:8] = number.to_bytes(8, "little")
        source.memory[4096:90000] = bytes([number]) * (90000 - 4096)
        source.push(4096, 90000 - 4096)
        source.push(0, 8)
    wires[0].close()
    assert eventually(lambda: mirror.memory[:8] == (199).to_bytes(8, "little"))


def test_after_sealing_nothing_changes_any_more(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror, other = read(wires[1], source.address), read(wires[2], source.address)
    wires[1].seal((0,))
    source.memory[:4] = b"late"
    source.push(0, 4)
    assert eventually(lambda: other.memory[:4] == b"late")
    (owner,) = (owner for owner in wires[1]._owners.values() if owner.number == 0)
    owner.take(Frame(Kind.BYTES, int(source.address.rpartition("/")[2]), 0, b"late"))  # it was on its way
    assert mirror.memory[:4] == bytes(4)
    with pytest.raises(OSError, match="given up"):
        read(wires[1], make(wires[0], 4096).address)


def test_a_worker_that_was_given_up_gets_nothing_more(wires: list[WireThread]) -> None:
    wires[0].seal((1,))
    with pytest.raises(ConnectionError):
        read(wires[1], make(wires[0], 4096).address)


def test_a_broken_connection_is_made_again_and_brings_what_was_missed(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    for link in list(wires[0]._links):
        link.close()
    assert eventually(lambda: not source.readers)
    source.memory[:6] = b"missed"
    source.push(0, 6)
    assert eventually(lambda: mirror.memory[:6] == b"missed")


def test_a_worker_that_answers_no_more_is_said_to_be_so_until_it_does_again(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    assert wires[1].reach.cut() == []
    place = HOSTS[0], wires[0].port
    wires[0].close()
    assert eventually(lambda: [n for n, _ in wires[1].reach.cut()] == [0])
    assert wires[2].reach.cut() == []  # it has nothing of its
    with socket.create_server(place) as again:
        assert eventually(lambda: wires[1].reach.cut() == [])
        again.accept()[0].close()  # it answers, if only to hang up
    assert mirror.size == source.size


def test_a_defect_in_taking_one_change_costs_the_connection_and_not_all_mirrors(
    wires: list[WireThread], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    take, hurt = Owner.take, threading.Event()

    def fail_once(owner: Owner, frame: Frame) -> None:
        if not hurt.is_set():
            hurt.set()
            raise ValueError("a defect")
        take(owner, frame)

    monkeypatch.setattr(Owner, "take", fail_once)
    source.memory[:4] = b"lost"
    source.push(0, 4)
    assert hurt.wait(10)
    assert eventually(lambda: mirror.memory[:4] == b"lost")  # it came again with the contents
    assert "a defect" in capfd.readouterr().err


def test_the_time_counts_from_the_break_and_not_from_the_first_try_in_vain(
    wires: list[WireThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner, "wants_connection", False)
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    wires[0].close()
    assert eventually(lambda: [n for n, _ in wires[1].reach.cut()] == [0])
    assert mirror.size == source.size


def test_who_was_given_up_is_not_complained_of(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    wires[1].seal((0,))
    wires[0].close()
    assert eventually(lambda: not wires[1]._links)
    assert wires[1].reach.cut() == []
    assert mirror.size == source.size


def test_the_kernel_gives_a_connection_up_that_the_other_host_does_not_answer_on(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    (link,) = wires[1]._links
    assert link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * UNANSWERED_SECONDS
    assert mirror.size == source.size


def test_and_so_does_the_owners_for_readers_whose_host_is_gone(wires: list[WireThread]) -> None:
    source = make(wires[0], 4096)
    mirror = read(wires[1], source.address)
    ((reader, _),) = source.readers
    assert isinstance(reader, ReaderLink)
    assert reader.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert reader.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENT_SECONDS
    assert mirror.size == source.size


def test_contents_that_do_not_come_in_time_may_come_later(
    wires: list[WireThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "OPEN_SECONDS", 0.0)
    plain, questions = ReaderLink._open, [True]  # the first has no answer
    monkeypatch.setattr(ReaderLink, "_open", lambda self, n: None if questions and questions.pop() else plain(self, n))
    source = make(wires[0], 4096)
    with pytest.raises(Unreachable, match="in time"):
        read(wires[1], source.address)
    monkeypatch.undo()
    assert read(wires[1], source.address).size == source.size


def test_who_waits_for_contents_is_told_when_another_connection_takes_the_place_of_the_one_asked(
    wires: list[WireThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, failed = threading.Event(), threading.Event()
    monkeypatch.setattr(ReaderLink, "_open", lambda self, number: asked.set())  # a question without an answer
    source = make(wires[0], 4096)
    segments.connect(wires[1])

    def ask() -> None:
        with contextlib.suppress(Unreachable):
            Segment.open(source.address)
        failed.set()

    threading.Thread(target=ask, daemon=True).start()
    assert asked.wait(10)
    (owner,) = wires[1]._owners.values()
    with owner._changed:  # so that whoever waits sees nothing of what happens in between
        broken = owner._link
        assert broken is not None
        owner.lost_connection(broken)
        owner.connect()
    broken.close()
    assert failed.wait(10)


# -- strangers -------------------------------------------------------------------------------------------------------


def test_who_does_not_know_the_key_gets_nothing(wires: list[WireThread]) -> None:
    stranger = WireThread("127.0.0.9", "guess", 9)
    try:
        with pytest.raises(ConnectionError):
            read(stranger, make(wires[0], 4096).address)
    finally:
        stranger.close()


def test_a_reader_with_another_key_is_hung_up_on_without_a_word(wires: list[WireThread]) -> None:
    segment = make(wires[0], 4096)
    with socket.create_connection((HOSTS[0], wires[0].port), 10) as sock:
        greeting = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
        sock.sendall(answer("guess", greeting, bytes(NONCE_BYTES), 5) + pack(Kind.OPEN, 1))
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(4096) == b""
    assert segment.readers == ()


def test_another_worker_at_the_same_place_is_not_taken_for_the_one_that_was_there(wires: list[WireThread]) -> None:
    address = make(wires[0], 4096).address
    head, _, number = address.rpartition("/0/")
    with pytest.raises(OSError, match="there is worker 0 now where worker 7 was"):
        read(wires[1], f"{head}/7/{number}")


@pytest.mark.parametrize("rubbish", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(500), os.urandom(4000)])
def test_rubbish_is_hung_up_on_and_harms_nobody(wires: list[WireThread], rubbish: bytes) -> None:
    with socket.create_connection((HOSTS[0], wires[0].port), 10) as sock:
        sock.sendall(rubbish)
        assert _ends(sock)
    assert read(wires[1], make(wires[0], 4096).address).size == 4096


@pytest.mark.parametrize(
    "frame", [pack(Kind.BYTES, 1, 0, b"x"), pack(Kind.OPEN, 1, 0, size=LONGEST + 1), b"\xff" * 64, pack(Kind.GONE, 1)]
)
def test_a_reader_that_knows_the_key_may_only_ask(wires: list[WireThread], frame: bytes) -> None:
    with socket.create_connection((HOSTS[0], wires[0].port), 10) as sock:
        greeting = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
        sock.sendall(answer("secret", greeting, bytes(NONCE_BYTES), 5) + frame)
        assert _ends(sock)


def _ends(sock: socket.socket) -> bool:
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_frames_are_found_again_however_the_stream_is_cut() -> None:
    frames = [pack(Kind.OPEN, 3), pack(Kind.BYTES, 1, 77, b"abc" * 100), pack(Kind.WHOLE, 9)]
    for size in (1, 7, 1000):
        parser, stream = Parser(), b"".join(frames)
        found = [f for at in range(0, len(stream), size) for f in parser.feed(stream[at : at + size])]
        assert [(f.kind, f.segment, f.at, f.data) for f in found] == [
            (Kind.OPEN, 3, 0, b""),
            (Kind.BYTES, 1, 77, b"abc" * 100),
            (Kind.WHOLE, 9, 0, b""),
        ]


def test_a_frame_that_is_too_long_is_refused_before_anything_is_set_aside() -> None:
    with pytest.raises(WireError, match="at most"):
        list(Parser().feed(pack(Kind.BYTES, 1, 0, size=LONGEST + 1)))


# -- meetings across hosts -------------------------------------------------------------------------------------------


def fabrics(wires: list[WireThread]) -> list[Fabric]:
    """Three members that see each other's posts and desks as mirrors."""
    posts, desks = [], []
    for wire in wires:
        segments.connect(wire)
        posts.append(Post.create())
        desks.append(Desk.create(2, 1000))
    made = []
    for number, wire in enumerate(wires):
        segments.connect(wire)
        fabric = Fabric.form(1, (0, 1, 2), number, posts[number], [post.segment.address for post in posts])
        for other, desk in enumerate(desks):
            own = other == number
            fabric.keep(other, desk.segment if own else Desk.open(desk.segment.address, 2).segment)
        assert fabric.spans_hosts
        made.append(fabric)
    return made


def in_threads(work: Callable[[Fabric], object], members: list[Fabric]) -> list[object]:
    found: list[object] = [None] * len(members)

    def run(k: int) -> None:
        try:
            found[k] = work(members[k])
        except PeersLost as error:
            found[k] = error.workers

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_everybody_hears_everybody_across_hosts(wires: list[WireThread]) -> None:
    def work(fabric: Fabric) -> list[list[list[int]]]:
        return [fabric.exchange([fabric.rank, turn]) for turn in range(30)]

    wanted = [[[rank, turn] for rank in range(3)] for turn in range(30)]
    assert in_threads(work, fabrics(wires)) == [wanted] * 3


def test_payloads_cross_hosts_whole(wires: list[WireThread]) -> None:
    payloads = [b"", os.urandom(200_000), b"x"]
    found = in_threads(lambda fabric: fabric.gather_bytes(payloads[fabric.rank]), fabrics(wires))
    assert found == [payloads] * 3


def test_who_has_not_seen_the_last_words_of_the_lost_takes_them_from_who_has(wires: list[WireThread]) -> None:
    """Worker 2 posts and is lost; its words have reached worker 1 and not worker 0."""
    members = fabrics(wires)
    wires[0].seal((2,))
    last = members[2]
    last._own.words[8 + 4096] = 42  # the word of its first exchange, whose place alternates
    last._own.segment.push(8 * (8 + 4096), 8)
    last._own.words[0] = 1
    last._own.segment.push(0, 8)
    assert eventually(lambda: members[1]._posts[2].words[0] == 1)

    def work(fabric: Fabric) -> list[list[int]]:
        fabric.lose((2,))
        return fabric.exchange([fabric.rank])

    assert in_threads(work, members[:2]) == [[[0], [1], [42]]] * 2


def test_what_no_survivor_has_seen_did_not_happen(wires: list[WireThread]) -> None:
    members = fabrics(wires)
    wires[0].seal((2,))
    wires[1].seal((2,))
    members[2]._own.words[0] = 1
    members[2]._own.segment.push(0, 8)

    def work(fabric: Fabric) -> None:
        fabric.lose((2,))
        fabric.meet()

    assert in_threads(work, members[:2]) == [(2,), (2,)]
