"""One connection between workers of different hosts: bytes that wait to be sent, and that nobody waits for.

Changes are sent by the thread that makes them, as far as the connection takes them at once; the rest is the wire's
thread's. What is said over it, and by whom, is nothing to a link.
"""

import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from concertina.runtime.wire_frames import Parser

if TYPE_CHECKING:
    from concertina.runtime.wire import WireThread

MOST_WAITING = 1 << 33  # bytes that wait for one reader before it is given up


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
