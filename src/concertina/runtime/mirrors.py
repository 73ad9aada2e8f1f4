"""What we mirror of others' memory: copies of their segments, and one connection to each owner that keeps them alike.

A connection that breaks is made again and brings the contents anew, until the owner is *sealed*: known to be lost. From
then on its mirrors stay as they are. Who is lost is for others to know, and so is what lies in the memory.
"""

import os
import secrets
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from concertina.runtime.keepalive import mind_silence
from concertina.runtime.segments import Segment, Unreachable
from concertina.runtime.wire_frames import (
    HELLO_BYTES,
    LARGEST,
    NONCE_BYTES,
    WELCOME_BYTES,
    Frame,
    Kind,
    WireError,
    answer,
    check_welcome,
    pack,
)
from concertina.runtime.wire_link import Link

if TYPE_CHECKING:
    from concertina.runtime.wire import WireThread

CONNECT_SECONDS = 5.0
UNANSWERED_SECONDS = 4.0  # a connection that the other host answers nothing on for so long is made anew
OPEN_SECONDS = 600.0  # that the contents of a segment may take; a state of many gigabytes over a slow network
AGAIN_SECONDS = 0.5  # between two tries to reach an owner whose connection broke


class Mirror(Segment):
    """A copy of another host's segment."""

    def __init__(self, owner: "Owner", number: int, place: str, size: int) -> None:
        fd = os.memfd_create("concertina-mirror", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        super().__init__(fd, size, f"0/fd/0@{place}")
        self.hide()  # what it was made with; the memory stays
        self.owner = owner
        self.number = number

    def seal(self) -> None:
        self.owner.seal()

    def apply(self, at: int, data: bytes) -> None:
        if at + len(data) > self.size:
            raise WireError(f"{len(data)} bytes for offset {at} of a segment of {self.size}")
        self.memory[at : at + len(data)] = data


class OwnerLink(Link):
    """Our connection to an owner of memory that we mirror; it has proved who it is."""

    def __init__(self, wire: "WireThread", sock: socket.socket, owner: "Owner") -> None:
        super().__init__(wire, sock)
        self.owner = owner

    def on_data(self, data: bytes) -> None:
        for frame in self.parser.feed(data):
            self.owner.take(frame)

    def on_end(self) -> None:
        self.owner.lost_connection(self)


class Owner:
    """A worker of another host, and our mirrors of its memory."""

    def __init__(self, wire: "WireThread", host: str, port: int, number: int) -> None:
        self._wire = wire
        self.host, self.port, self.number = host, port, number
        self._connecting = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._mirrors: weakref.WeakValueDictionary[int, Mirror] = weakref.WeakValueDictionary()
        self._asked: dict[int, int] = {}  # segment -> how many threads wait for it
        self._kept: dict[int, Mirror] = {}  # for those threads
        self._whole: set[int] = set()
        self._gone: set[int] = set()
        self._anew: dict[int, list[tuple[int, bytes]]] = {}  # contents that come once more after a break, until whole
        self._link: OwnerLink | None = None
        self.sealed = False
        self.tries = False  # somebody is connecting
        self.try_at = 0.0

    def mirror(self, number: int) -> Mirror:
        """Waits until its contents are here."""
        with self._changed:
            known = self._mirrors.get(number)
            if known is not None and number in self._whole:
                return known
            self._whole.discard(number)
            self._gone.discard(number)
            self._asked[number] = self._asked.get(number, 0) + 1
        try:
            self.connect()
            return self._wait_for(number)
        finally:
            with self._changed:
                self._asked[number] -= 1
                if not self._asked[number]:
                    del self._asked[number]
                    self._kept.pop(number, None)

    def _wait_for(self, number: int) -> Mirror:
        with self._changed:
            asked = self._link
            if asked is not None:
                asked.send(pack(Kind.OPEN, number))
            until = time.monotonic() + OPEN_SECONDS
            while number not in self._whole:
                if self.sealed or number in self._gone:
                    raise ConnectionError(f"worker {self.number} at {self.host} is gone, or has let go of its memory")
                if asked is None or self._link is not asked:  # a new one knows nothing of the question
                    raise Unreachable(f"the connection to worker {self.number} at {self.host} broke")
                if time.monotonic() > until:
                    raise Unreachable(f"worker {self.number} at {self.host} did not send all of its memory in time")
                self._changed.wait(0.5)
            return self._kept.get(number) or self._mirrors[number]

    def connect(self) -> None:
        """Proves who we are, makes sure who that is, and asks for all that we mirror."""
        with self._connecting:
            if self.sealed:
                raise ConnectionError(f"worker {self.number} has been given up")
            if self._link is not None and not self._link.closed:
                return
            sock = self.greet()
            link = OwnerLink(self._wire, sock, self)
            with self._changed:
                self._link = link
                self._anew = {number: [] for number in self._whole if number in self._mirrors}
                for number in self._anew:
                    link.send(pack(Kind.OPEN, number))
            self._wire.add(link)

    def greet(self) -> socket.socket:
        wire = self._wire
        sock = self._call()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mind_silence(sock, UNANSWERED_SECONDS)
            greeting = _exactly(sock, HELLO_BYTES)
            said = answer(wire.key, greeting, secrets.token_bytes(NONCE_BYTES), wire.number)
            sock.sendall(said)
            check_welcome(wire.key, greeting, said, _exactly(sock, WELCOME_BYTES), self.number)
            sock.setblocking(False)
        except WireError as error:
            sock.close()
            raise ConnectionError(str(error)) from None
        except OSError as error:
            sock.close()
            raise Unreachable(f"worker {self.number} at {self.host} does not answer ({error})") from None
        return sock

    def _call(self) -> socket.socket:
        wire = self._wire
        try:
            sock = socket.create_connection((self.host, self.port), CONNECT_SECONDS, (wire.host, 0))
        except OSError as error:
            wire.reach.failed(self.number)
            raise Unreachable(f"worker {self.number} at {self.host} cannot be reached ({error})") from None
        wire.reach.answered(self.number)
        return sock

    def take(self, frame: Frame) -> None:
        """In the wire's thread."""
        number = frame.segment
        with self._changed:
            if self.sealed:
                return
            if frame.kind is Kind.SIZE:
                self._make(number, frame.at)
            elif frame.kind is Kind.BYTES:
                self._take_bytes(number, frame.at, frame.data)
            elif frame.kind is Kind.WHOLE:
                for at, data in self._anew.pop(number, ()):
                    self._take_bytes(number, at, data)
                self._whole.add(number)
                self._changed.notify_all()
            elif frame.kind is Kind.GONE:
                self._gone.add(number)
                self._changed.notify_all()
            else:
                raise WireError(f"an owner sent {frame.kind.name}")

    def _take_bytes(self, number: int, at: int, data: bytes) -> None:
        if number in self._anew:  # older than what is here, until all of it has come
            self._anew[number].append((at, data))
            return
        mirror = self._mirrors.get(number)
        if mirror is not None:
            mirror.apply(at, data)

    def _make(self, number: int, size: int) -> None:
        known = self._mirrors.get(number)
        if not 0 < size <= LARGEST or (known is not None and known.size != size):
            raise WireError(f"segment {number} has {size} bytes, which cannot be")
        if known is None and number in self._asked:
            place = f"{self.host}:{self.port}/{self.number}/{number}"
            self._kept[number] = self._mirrors[number] = Mirror(self, number, place, size)

    def seal(self) -> None:
        """Its mirrors change no more."""
        with self._changed:
            self.sealed = True
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            link.close()

    def lost_connection(self, link: OwnerLink) -> None:
        with self._changed:
            if self._link is link:
                self._link = None
                self._wire.reach.failed(self.number)
            self._anew = {}
            self.try_at = time.monotonic() + AGAIN_SECONDS
            self._changed.notify_all()

    @property
    def wants_connection(self) -> bool:
        idle = not self.sealed and self._link is None and not self.tries
        return idle and len(self._mirrors) > 0 and time.monotonic() >= self.try_at


def try_to_connect(owner: Owner) -> None:
    """In a thread of its own: a host that is cut off does not even refuse."""
    try:
        owner.connect()
    except OSError:
        owner.try_at = time.monotonic() + AGAIN_SECONDS
    finally:
        owner.tries = False


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed before it began")
        data += more
    return data
