"""gloo between hosts: a connection that breaks makes all members begin anew, and none waits for ever."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from concertina.runtime import group as module
from concertina.runtime import segments
from concertina.runtime.fabric import Fabric, PeersLost, Post
from concertina.runtime.group import UNANSWERED_SECONDS, Group, _each, _may_be_gloos, _what
from concertina.runtime.wire import WireThread

HOSTS = ("127.0.0.2", "127.0.0.3")
PATIENCE = 30.0


@pytest.fixture
def fabrics() -> Iterator[list[Fabric]]:
    """Of two workers on two hosts, all in this process."""
    wires = [WireThread(host, "secret", number) for number, host in enumerate(HOSTS)]
    posts = []
    for wire in wires:
        segments.connect(wire)
        posts.append(Post.create())
    made = []
    for number, wire in enumerate(wires):
        segments.connect(wire)
        made.append(Fabric.form(1, (0, 1), number, posts[number], [post.segment.address for post in posts]))
    yield made
    segments.connect(None)
    for wire in wires:
        wire.close()


def together(*works: Callable[[], object]) -> list[object]:
    found: list[object] = [None] * len(works)

    def run(k: int) -> None:
        try:
            found[k] = works[k]()
        except PeersLost as error:
            found[k] = error.workers

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def groups(fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    # In one process, each would take the other's connections for its own.
    monkeypatch.setattr(module, "_building", _NoLock())
    made = together(*(lambda k=k: Group(Path("unused"), fabrics[k], HOSTS[k]) for k in range(2)))  # type: ignore[misc]
    assert all(isinstance(one, Group) for one in made)
    return made  # type: ignore[return-value]


class _NoLock:
    def __enter__(self) -> None:
        """Both are built at the same time, in this process only."""

    def __exit__(self, *error: object) -> None:
        """As above."""


def wait_for_a_sum(group: Group) -> Callable[[], object]:
    def work() -> object:
        with group.watched():
            return group.sum_async(torch.ones(4)).wait()

    return work


def test_a_broken_connection_without_a_loss_is_found_by_both_and_names_nobody(
    fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "NEWS_SECONDS", 0.05)
    both = groups(fabrics, monkeypatch)
    cutter = threading.Timer(0.2, both[0].cut)
    cutter.start()
    assert together(wait_for_a_sum(both[0])) == [()]  # the other one does not even come
    cuts: list[bool] = []
    monkeypatch.setattr(both[1], "cut", lambda: cuts.append(True))
    assert together(wait_for_a_sum(both[1])) == [()]
    assert cuts == [True]  # a third one would wait for this one
    cutter.join()
    assert "a connection between workers broke" in capfd.readouterr().err
    assert [fabric.waits_since for fabric in fabrics] == [0.0, 0.0]
    for group in both:
        group.close()


def test_whoever_sees_that_another_has_stopped_waits_for_no_news(
    fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NEWS_SECONDS", 1e6)
    both = groups(fabrics, monkeypatch)
    fabrics[0].stop()
    both[0].cut()
    assert together(wait_for_a_sum(both[1])) == [()]
    for group in both:
        group.close()


def test_the_loss_that_broke_a_connection_is_named(fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWS_SECONDS", 1e6)
    both = groups(fabrics, monkeypatch)
    teller = threading.Timer(0.2, lambda: fabrics[0].lose([1]))
    teller.start()
    assert together(wait_for_a_sum(both[0])) == [(1,)]
    teller.join()
    for group in both:
        group.close()


def test_connections_to_other_hosts_end_when_their_kernels_are_silent(
    fabrics: list[Fabric], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = groups(fabrics, monkeypatch)
    limits: list[int] = []

    def look(connection: socket.socket) -> None:
        limits.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    _each(both[0]._connections, look)
    assert 1000 * int(UNANSWERED_SECONDS) in limits
    for group in both:
        group.close()


def test_a_connection_that_has_got_the_number_of_one_of_the_groups_is_left_alone() -> None:
    group = Group.__new__(Group)
    group._before = module._connections()
    ours, peer = socket.socketpair()
    number = ours.fileno()
    group._connections, group._before = module._connections() - group._before, None
    ours.close()
    peer.close()
    theirs, other = socket.socketpair()
    if theirs.fileno() != number:
        os.dup2(theirs.fileno(), number)
    group.cut()
    other.settimeout(PATIENCE)
    theirs.sendall(b"still here")
    assert other.recv(100) == b"still here"
    if theirs.fileno() != number:
        os.close(number)
    theirs.close()
    other.close()


def test_what_a_script_connects_elsewhere_meanwhile_is_none_of_the_groups() -> None:
    def own(connection: socket.socket, spans_hosts: bool = False) -> bool:
        return _may_be_gloos((connection.fileno(), _what(connection.fileno())), spans_hosts)

    local, other = socket.socketpair()
    with local, other, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unbound:
        with socket.create_connection(server.getsockname()) as near:
            assert own(near)
            assert own(server)
        assert not own(local)
        assert not own(unbound), "not on this machine's loopback"
        assert own(unbound, spans_hosts=True)
