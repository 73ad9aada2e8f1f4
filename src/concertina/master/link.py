"""A line to the master of a job, whoever that is at the moment.

A thread of its own keeps it: it finds the master through the store, says everything until it is confirmed, gives signs
of life, and looks for a new master when the old one falls silent. Words of a master that has been replaced are ignored.
"""

import contextlib
import hmac
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from concertina.core.channel import Body, Channel
from concertina.core.errors import StoreError
from concertina.store import open_store
from concertina.store.lease import obeys

BEAT_SECONDS = 0.25
SILENCE_SECONDS = 0.8  # without a word from the master, look whether there is a new one

Handler = Callable[[Body], None]


class MasterLink:
    """Says things to the master and hears what it says. `on_message` runs in the link's thread."""

    def __init__(
        self,
        store: str,
        job: str,
        key: str,
        name: str,
        on_message: Handler,
        beat: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._store_address = store
        self._job = job
        self._key = key
        self._name = name
        self._on_message = on_message
        self._beat = beat
        self._channel = Channel()
        self._out: queue.SimpleQueue[Body] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._ends = threading.Event()
        self._fence = 0
        self._address = ""
        self._heard = 0.0
        self._beat_at = 0.0
        self._looked_at = 0.0
        self._confirmed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="concertina-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def say(self, **body: Any) -> None:
        """From any thread; it will arrive once and in order."""
        self._out.put(body)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b".")

    @property
    def silence_s(self) -> float:
        """Since a master was last heard."""
        return time.monotonic() - self._heard

    def flush(self, limit_s: float) -> bool:
        """Waits until all that was said is confirmed."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self._out.empty() and not self._channel.unconfirmed:
                return True
            time.sleep(0.005)
        return False

    def close(self, limit_s: float = 0.0) -> None:
        if limit_s:
            self.flush(limit_s)
        self._ends.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b".")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        socket: zmq.Socket[bytes] | None = None
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._ends.is_set():
                found = self._look_for_master()
                if found:
                    if socket is not None:
                        poller.unregister(socket)
                        socket.close(0)
                    socket = context.socket(zmq.DEALER)
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.connect(self._address)
                    poller.register(socket, zmq.POLLIN)
                    self._channel.said_at = 0.0  # a new listener: say what is not confirmed
                patience = 0 if found else 50 if socket is None else int(1000 * BEAT_SECONDS)
                ready = dict(poller.poll(patience))
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                if socket is not None:
                    if socket in ready:
                        self._hear(socket)
                    self._speak(socket)
        finally:
            if socket is not None:
                socket.close(0)
            context.term()

    def _look_for_master(self) -> bool:
        """True if there is another one than before."""
        now = time.monotonic()
        waits = 0.05 if not self._address else 0.25
        if now - self._heard < SILENCE_SECONDS or now - self._looked_at < waits:
            return False
        self._looked_at = now
        from concertina.master.service import address_key

        try:
            with open_store(self._store_address) as store:
                entry = store.get(address_key(self._job))
        except StoreError:
            return False
        if entry is None:
            return False
        place = json.loads(entry.value)
        if place["address"] == self._address or not obeys(self._fence, place["fence"]):
            return False
        self._address, self._fence = place["address"], place["fence"]
        return True

    def _speak(self, socket: "zmq.Socket[bytes]") -> None:
        now = time.monotonic()
        frames = []
        while True:
            try:
                frames.append(self._channel.say(self._out.get_nowait(), now))
            except queue.Empty:
                break
        frames += self._channel.again(now)
        if self._beat is not None and now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            frames.append({**self._channel.nod(), "beat": self._beat()})
        elif self._beat is None and now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            frames.append(self._channel.nod())
        for frame in frames:
            self._send(socket, frame)

    def _send(self, socket: "zmq.Socket[bytes]", frame: Mapping[str, Any]) -> None:
        with contextlib.suppress(zmq.Again):
            socket.send(json.dumps({**frame, "from": self._name, "key": self._key}).encode(), zmq.NOBLOCK)

    def _hear(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                payload = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frame = self._decode(payload)
            if frame is None:
                continue
            self._heard = time.monotonic()
            body = self._channel.take(frame)
            if body is not None:
                self._on_message(body)
                self._send(socket, self._channel.nod())

    def _decode(self, payload: bytes) -> dict[str, Any] | None:
        try:
            frame: dict[str, Any] = json.loads(payload)
            if not hmac.compare_digest(str(frame["key"]), self._key) or not obeys(self._fence, frame["fence"]):
                return None
        except (ValueError, KeyError, TypeError):
            return None
        self._fence = frame["fence"]
        return frame
