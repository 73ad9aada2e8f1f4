"""The thread that keeps mirrors of other hosts' memory up to date, and sends our changes to who mirrors ours.

One per worker, and only in a job that spans hosts. A worker listens at its host's address; whoever wants to read its
memory connects there (`wire_frames.py`). Changes are sent by the thread that makes them, as far as the connection takes
them at once; the rest, and everything that arrives, is this thread's. So nobody ever waits for a slow or dead reader.

A connection that breaks is made again and brings the contents anew, until the owner is *sealed*: known to be lost. From
then on its mirrors stay as they are.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque

from concertina.runtime.keepalive import mind_silence
from concertina.runtime.reach import Reach
from concertina.runtime.segments import Segment, Served, Unreachable
from concertina.runtime.wire_frames import (
    ANSWER_BYTES,
    HELLO_BYTES,
    LARGEST,
    LONGEST,
    NONCE_BYTES,
    WELCOME_BYTES,
    Frame,
    Kind,
    Parser,
    WireError,
    answer,
    check_answer,
    check_welcome,
    hello,
    pack,
    welcome,
)

CONNECT_SECONDS = 5.0
UNANSWERED_SECONDS = 4.0  # a connection that the other host answers nothing on for so long is made anew
OPEN_SECONDS = 600.0  # that the contents of a segment may take; a state of many gigabytes over a slow network
AGAIN_SECONDS = 0.5  # between two tries to reach an owner whose connection broke
GREET_SECONDS = 10.0  # for a stranger to prove that it is none
CLOSE_SECONDS = 2.0
RECEIVE_BYTES = 1 << 20
MOST_WAITING = 1 << 33  # bytes that wait for one reader before it is given up
MOST_CONNECTIONS = 1024
COPIED_BYTES = 1 << 26  # contents of a segment up to which they are copied before they are sent


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


class Link(ABC):
    """One connection: bytes that wait to be sent, and what to do with those that come."""

    def __init__(self, wire: "WireThread", sock: socket.socket) -> None:
        self.wire = wire
        self.sock = sock
        self.parser = Parser()
        self.closed = False
        self._lock = threading.RLock()
        self._waiting: deque[memoryview] = deque()
        self._bytes_waiting = 0

    def send(self, *parts: bytes | memoryview) -> None:
        """From any thread; returns at once."""
        with self._lock:
            if self.closed:
                return
            idle = not self._waiting
            for part in parts:
                self._waiting.append(memoryview(part))
                self._bytes_waiting += len(part)
            if self._bytes_waiting > MOST_WAITING:
                self.close()
                return
            if idle:
                self.flush()
            if self._waiting:
                self.wire.wake()

    def flush(self) -> None:
        """As much as the connection takes."""
        with self._lock:
            while self._waiting and not self.closed:
                first = self._waiting[0]
                try:
                    sent = self.sock.send(first)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    self.close()
                    return
                self._bytes_waiting -= sent
                if sent == len(first):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = first[sent:]

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting) and not self.closed

    def close(self) -> None:
        """The thread notices and takes it off its list."""
        with self._lock:
            self.closed = True
            self._waiting.clear()
            self._bytes_waiting = 0
        self.wire.wake()

    @abstractmethod
    def on_data(self, data: bytes) -> None:
        """What has arrived."""

    def on_end(self) -> None:  # noqa: B027  # whoever is not interested says nothing
        """The connection is no more."""


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
            if self._link is not None:
                self._link.send(pack(Kind.OPEN, number))
            until = time.monotonic() + OPEN_SECONDS
            while number not in self._whole:
                if self.sealed or number in self._gone or time.monotonic() > until:
                    raise ConnectionError(f"worker {self.number} at {self.host} is gone, or has let go of its memory")
                if self._link is None:
                    raise Unreachable(f"the connection to worker {self.number} at {self.host} broke")
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


class WireThread:
    """This worker's end of all connections."""

    def __init__(self, host: str, key: str, number: int) -> None:
        self.host, self.key, self.number = host, key, number
        self.sealed: set[int] = set()
        self.reach = Reach(time.monotonic)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._served: weakref.WeakValueDictionary[int, Served] = weakref.WeakValueDictionary()
        self._next = 1
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, int, int], Owner] = {}
        self._links: set[Link] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="concertina-wire", daemon=True)
        self._thread.start()

    # -- for the others' threads -------------------------------------------------------------------------------------

    def offer(self, segment: Segment) -> str:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._segments[number] = segment
        return f"{self.host}:{self.port}/{self.number}/{number}"

    def offered(self, number: int) -> Segment | None:
        with self._lock:
            return self._segments.get(number)

    def serve(self, memory: Served) -> str:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._served[number] = memory
        return f"{self.host}:{self.port}/{self.number}/{number}"

    def served(self, number: int) -> Served | None:
        with self._lock:
            return self._served.get(number)

    def call(self, place: str) -> socket.socket:
        """The number of what is served there is for the caller to say."""
        endpoint, worker, _ = place.split("/")
        host, _, port = endpoint.rpartition(":")
        if int(worker) in self.sealed:
            raise ConnectionError(f"worker {worker} has been given up")
        return Owner(self, host, int(port), int(worker)).greet()

    def is_here(self, place: str) -> bool:
        return place.partition("/")[0].rpartition(":")[0] == self.host

    def mirror(self, place: str) -> Segment:
        endpoint, worker, number = place.split("/")
        host, _, port = endpoint.rpartition(":")
        key = host, int(port), int(worker)
        with self._lock:
            owner = self._owners.get(key)
            if owner is None:
                owner = self._owners[key] = Owner(self, *key)
                if owner.number in self.sealed:
                    owner.sealed = True
        return owner.mirror(int(number))

    def seal(self, workers: tuple[int, ...]) -> None:
        """These are lost: what we have of them stays as it is, and they get nothing more from us."""
        with self._lock:
            self.sealed.update(workers)
            owners = [owner for owner in self._owners.values() if owner.number in workers]
            links = [x for x in self._links if isinstance(x, ReaderLink) and x.number in workers]
        for owner in owners:
            owner.seal()
        for link in links:
            link.close()

    def add(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b".")

    def close(self) -> None:
        """Everything that was changed is sent before the connections go, within bounds."""
        until = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < until and any(link.has_waiting for link in list(self._links)):
            time.sleep(0.002)
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)  # unread bytes at close() would take back what was sent
        while time.monotonic() < until and self._links:
            time.sleep(0.002)
        for served in list(self._served.values()):
            served.close()
        self._ends = True
        self.wake()
        self._thread.join(timeout=5.0)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        known: set[Link] = set()
        while not self._ends:
            self._watch(known)
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    key.data.flush()
                    self._read(key.data)
            self._reach_again()
        for link in known:
            link.sock.close()
        self._selector.close()
        self._listener.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def _watch(self, known: set[Link]) -> None:
        """Waits for what every connection can do next; forgets those that are closed."""
        with self._lock:
            links = set(self._links)
        now = time.monotonic()
        for link in links:
            if isinstance(link, ReaderLink) and link.number is None and now - link.began > GREET_SECONDS:
                link.close()
            if link.closed:
                self._drop(link, known)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_waiting else 0)
            if link not in known:
                known.add(link)
                self._selector.register(link.sock, events, link)
            elif self._selector.get_key(link.sock).events != events:
                self._selector.modify(link.sock, events, link)

    def _drop(self, link: Link, known: set[Link]) -> None:
        if link in known:
            known.discard(link)
            self._selector.unregister(link.sock)
        with self._lock:
            self._links.discard(link)
        link.sock.close()
        link.on_end()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._links) >= MOST_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.add(ReaderLink(self, sock))

    def _read(self, link: Link) -> None:
        try:
            data = link.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            link.close()
            return
        try:
            link.on_data(data)
        except WireError:
            link.close()
        except Exception:  # without this thread, all mirrors would stand still, and nobody would know why
            traceback.print_exc()
            link.close()

    def _reach_again(self) -> None:
        with self._lock:
            waiting = [owner for owner in self._owners.values() if owner.wants_connection]
        for owner in waiting:
            owner.tries = True
            threading.Thread(target=_try_to_connect, args=(owner,), name="concertina-reach", daemon=True).start()


def _try_to_connect(owner: Owner) -> None:
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
