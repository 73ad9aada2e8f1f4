"""A newcomer's view of the memory of a member on another host, which reads it for us (`served_memory.py`).

Over a connection of its own, so that meetings are not held up by what is read. What is asked for at once comes without
a pause in between; between two pieces of the state we rest as long as the last one took, since the members train over
the same network.
"""

import contextlib
import socket
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from concertina.runtime import segments
from concertina.runtime.desk import Desk
from concertina.runtime.member_memory import Where
from concertina.runtime.read_frames import DIGEST_BYTES, NOT_THERE, REPLY_BYTES, What, ask, replied
from concertina.runtime.served_memory import digest
from concertina.runtime.state_map import as_buffer, as_bytes
from concertina.runtime.wire_frames import Kind, Parser, WireError, pack

ANSWER_SECONDS = 20.0  # without a byte
REQUEST_BYTES = 1 << 24  # of the state, so that the member need not set much aside for it
REST = 1.0  # of the time that a piece of the state took


class RemoteMemory:
    """Memory of one process on another host."""

    slice = 1 << 18  # elements of a piece: it comes in one go, and steps go by meanwhile
    most_lapses = 6  # times that all is copied again: more only takes the network from the members
    most_misses = 40  # tries to read a piece between two steps

    def __init__(self, place: str) -> None:
        """OSError if nobody serves it there."""
        if not place:
            raise OSError("the member serves its memory to nobody on another host")
        self._sock = segments.call(place)
        self._rest_until = 0.0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            self._sock.settimeout(ANSWER_SECONDS)
            self._sock.sendall(pack(Kind.FOLLOW, int(place.rpartition("/")[2])))
            head = bytearray(len(pack(Kind.WHOLE, 0)))
            self._receive(memoryview(head))
            (frame,) = Parser().feed(bytes(head))
            if frame.kind is not Kind.WHOLE:
                raise ConnectionError(f"nothing is served at {place} any more")
        except WireError as error:
            self._sock.close()
            raise ConnectionError(str(error)) from None
        except OSError:
            self._sock.close()
            raise

    def rests(self) -> bool:
        """Whether the members should have the network to themselves for a moment."""
        return time.monotonic() < self._rest_until

    def copy(self, desk: Desk, where: Where) -> int:
        """Copies what lies there; how many steps that has seen, or -1."""
        began = time.monotonic()
        self._sock.sendall(ask(What.STATE, _stretches(where)))
        steps = self._take(where)
        now = time.monotonic()
        self._rest_until = now + REST * (now - began)
        return steps

    def copy_settled(self, steps: int, where: Where) -> None:
        """What nobody can change: the member waits, and has made so many steps. All of it without a rest."""
        groups = list(_groups(where))
        for group in groups:
            self._sock.sendall(ask(What.STATE, _stretches(group)))
        for group in groups:
            if self._take(group) != steps:
                raise ConnectionError(f"the member whose memory was read does not stand at step {steps}")

    def compare(self, desk: Desk, where: Where) -> tuple[int, bool]:
        """Whether the same is there and here; with how many steps that has seen there, or -1. Only hashes travel."""
        self._sock.sendall(ask(What.DIGEST, _stretches(where)))
        theirs = bytearray(DIGEST_BYTES)
        steps = self._reply(DIGEST_BYTES)
        if steps == NOT_THERE:
            return steps, False
        self._receive(memoryview(theirs))
        return steps, digest([as_bytes(tensor).cpu() for _, tensor in where]) == bytes(theirs)

    def ask_for_gradients(self, note: int, where: Where) -> None:
        """`take_gradients` must follow, in the same order."""
        self._sock.sendall(ask(What.GRADIENTS, _stretches(where), note))

    def take_gradients(self, where: Where) -> bool:
        """False if they are not kept any more."""
        return self._take(where) != NOT_THERE

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        self._sock.close()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _take(self, where: Where) -> int:
        steps = self._reply(sum(size for _, size in _stretches(where)))
        if steps != NOT_THERE:
            for _, tensor in where:
                self._fill(tensor)
        return steps

    def _fill(self, tensor: Tensor) -> None:
        data = as_bytes(tensor)
        if not data.is_cuda:
            self._receive(as_buffer(data))
            return
        if self._scratch.numel() < data.numel():
            self._scratch = torch.empty(data.numel(), dtype=torch.uint8)
        room = self._scratch[: data.numel()]
        self._receive(as_buffer(room))
        data.copy_(room)

    def _reply(self, expected: int) -> int:
        head = bytearray(REPLY_BYTES)
        self._receive(memoryview(head))
        try:
            return replied(bytes(head), expected)
        except WireError as error:
            raise ConnectionError(str(error)) from None

    def _receive(self, room: memoryview) -> None:
        while room:
            got = self._sock.recv_into(room)
            if not got:
                raise ConnectionError("the member whose memory was read has ended, or serves it no longer")
            room = room[got:]


def _stretches(where: Where) -> list[tuple[int, int]]:
    return [(address, tensor.numel() * tensor.element_size()) for address, tensor in where]


def _groups(where: Where) -> Iterator[list[tuple[int, Tensor]]]:
    """In requests of a bounded size, but for what is larger by itself."""
    group: list[tuple[int, Tensor]] = []
    total = 0
    for pair, (_, size) in zip(where, _stretches(where), strict=True):
        if group and total + size > REQUEST_BYTES:
            yield group
            group, total = [], 0
        group.append(pair)
        total += size
    if group:
        yield group
