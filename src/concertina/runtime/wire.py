"""The thread that keeps mirrors of other hosts' memory up to date, and sends our changes to who mirrors ours.

One per worker, and only in a job that spans hosts. A worker listens at its host's address; whoever wants to read its
memory connects there (`wire_readers.py`), and for what we read of others we connect to them (`mirrors.py`). Everything
that arrives is this thread's, and what a connection does not take at once (`wire_link.py`). So nobody ever waits for a
slow or dead reader. Nothing here looks into what is said.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
import traceback
import weakref

from concertina.runtime.keepalive import mind_silence
from concertina.runtime.mirrors import Owner, try_to_connect
from concertina.runtime.reach import Reach
from concertina.runtime.segments import Segment, Served
from concertina.runtime.wire_frames import WireError
from concertina.runtime.wire_link import Link
from concertina.runtime.wire_readers import ReaderLink

GREET_SECONDS = 10.0  # for a stranger to prove that it is none
SILENT_SECONDS = 20.0  # a reader whose host has taken nothing for so long is let go, with all that waits for it
CLOSE_SECONDS = 2.0
RECEIVE_BYTES = 1 << 20
MOST_CONNECTIONS = 1024


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
        mind_silence(sock, SILENT_SECONDS)
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
            threading.Thread(target=try_to_connect, args=(owner,), name="concertina-reach", daemon=True).start()
