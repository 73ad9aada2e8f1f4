"""What others mirror of our memory: who asks for it, its contents, and from then on every change.

A reader has to prove who it is before it is heard, and may only ask. Nothing here knows what becomes of the bytes at
the other end (`mirrors.py`), or what they mean.
"""

import secrets
import socket
import time
from typing import TYPE_CHECKING

from concertina.runtime.segments import Segment
from concertina.runtime.wire_frames import (
    ANSWER_BYTES,
    LONGEST,
    NONCE_BYTES,
    Kind,
    WireError,
    check_answer,
    hello,
    pack,
    welcome,
)
from concertina.runtime.wire_link import Link

if TYPE_CHECKING:
    from concertina.runtime.wire import WireThread

COPIED_BYTES = 1 << 26  # contents of a segment up to which they are copied before they are sent


class ReaderLink(Link):
    """Somebody who mirrors memory of ours."""

    def __init__(self, wire: "WireThread", sock: socket.socket) -> None:
        super().__init__(wire, sock)
        self.began = time.monotonic()
        self.number: int | None = None  # until it has proved who it is
        self._greeting = hello(secrets.token_bytes(NONCE_BYTES))
        self._said = bytearray()
        self._segments: dict[int, Segment] = {}
        self.send(self._greeting)

    def on_data(self, data: bytes) -> None:
        if self.number is None:
            self._said += data
            if len(self._said) < ANSWER_BYTES:
                return
            said, data = bytes(self._said[:ANSWER_BYTES]), bytes(self._said[ANSWER_BYTES:])
            number = check_answer(self.wire.key, self._greeting, said)
            if number in self.wire.sealed:
                raise WireError(f"worker {number} has been given up and does not take part any more")
            self.number = number
            self.send(welcome(self.wire.key, self._greeting, said, self.wire.number))
        for frame in self.parser.feed(data):
            if frame.kind is Kind.FOLLOW:
                self._hand_on(frame.segment)
                return
            if frame.kind is not Kind.OPEN:
                raise WireError(f"a reader sent {frame.kind.name}")
            self._open(frame.segment)

    def _hand_on(self, number: int) -> None:
        """This connection is for who serves memory, in a thread of its own."""
        served = self.wire.served(number)
        if served is None:
            self.send(pack(Kind.GONE, number))
            return
        served.admit(self.sock.dup())
        self.close()

    def _open(self, number: int) -> None:
        segment = self.wire.offered(number)
        if segment is None:
            self.send(pack(Kind.GONE, number))
            return
        with self._lock:  # changes that are made from here on come after the contents
            self._segments[number] = segment
            if (self, number) not in segment.readers:
                segment.readers = (*segment.readers, (self, number))
            self.send(pack(Kind.SIZE, number, segment.size))
            # Read from front to back and sent from back to front: what says that something is there comes last.
            for at, data in reversed(_contents(segment)):
                self.send(pack(Kind.BYTES, number, at, size=len(data)), data)
            self.send(pack(Kind.WHOLE, number))

    def changed(self, number: int, segment: Segment, at: int, size: int) -> None:
        with self._lock:
            for begin in range(at, at + size, LONGEST):
                data = segment.memory[begin : min(begin + LONGEST, at + size)]
                self.send(pack(Kind.BYTES, number, begin, data))

    def on_end(self) -> None:
        for segment in self._segments.values():
            segment.readers = tuple(pair for pair in segment.readers if pair[0] is not self)
        self._segments.clear()


def _contents(segment: Segment) -> list[tuple[int, bytes | memoryview]]:
    """What was ever written, in pieces; a large state is not copied, since nobody changes it any more."""
    used = list(segment.used())
    large = sum(size for _, size in used) > COPIED_BYTES
    source = memoryview(segment.memory) if large else segment.memory
    return [
        (at, source[at : min(at + LONGEST, begin + size)])
        for begin, size in used
        for at in range(begin, begin + size, LONGEST)
    ]
