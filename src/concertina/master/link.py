"""A line to the master of a job, whoever that is at the moment.

A thread of its own keeps it: it finds the master through the store, says everything until it is confirmed, gives signs
of life, and looks for a new master when the old one falls silent. Words of a master that has been replaced are ignored.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from concertina.core.channel import Body, Channel
from concertina.core.errors import StoreError
from concertina.core.messages import EXIT_LEFT
from concertina.master.words import FROM_MASTER, FROM_MEMBER, seal, unseal
from concertina.store import open_store
from concertina.store.lease import obeys

BEAT_SECONDS = 0.25
SILENCE_SECONDS = 0.8  # without a word from the master, look whether there is a new one
CUT_SECONDS = 4.0  # on several hosts: a connection over which nothing comes for so long is made anew
FIXED = "tcp://"  # in the place of a store: the address that every master of this job listens at

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
        orphan_s: float = 0.0,
    ) -> None:
        """With `orphan_s`, the process ends when no master has been heard for so many seconds: it is cut off, the
        others have gone on without it, and nobody there can end it."""
        self._store_address = store
        self._job = job
        self._key = key
        self._name = name
        self._on_message = on_message
        self._beat = beat
        self._orphan_s = orphan_s
        self._started = time.monotonic()
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
                self._end_if_orphaned()
                if found:
                    if socket is not None:
                        poller.unregister(socket)
                        socket.close(0)
                    socket = context.socket(zmq.DEALER)
                    socket.setsockopt(zmq.LINGER, 0)
                    if self._orphan_s:  # a cut link is silent
                        socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * BEAT_SECONDS))
                        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * CUT_SECONDS))
                    socket.setsockopt(zmq.IPV6, int("[" in self._address))
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

    def _end_if_orphaned(self) -> None:
        silent = time.monotonic() - max(self._heard, self._started)
        if self._orphan_s and silent > self._orphan_s:
            print(
                f"concertina: no word from any master for {silent:.0f} s: this worker ends", file=sys.stderr, flush=True
            )
            os._exit(EXIT_LEFT)

    def _look_for_master(self) -> bool:
        """True if there is another one than before."""
        now = time.monotonic()
        waits = 0.05 if not self._address else 0.25
        if now - self._heard < SILENCE_SECONDS or now - self._looked_at < waits:
            return False
        self._looked_at = now
        if self._store_address.startswith(FIXED):  # whoever is master is there; the connection is made again by itself
            found, self._address = not self._address, self._store_address
            return found
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
            socket.send(seal({**frame, "from": self._name}, self._key, FROM_MEMBER), zmq.NOBLOCK)

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
            if frame.get("gone"):
                self._on_message({"op": "dismiss"})
                continue
            body = self._channel.take(frame)
            if body is not None:
                self._on_message(body)
                self._send(socket, self._channel.nod())

    def _decode(self, payload: bytes) -> dict[str, Any] | None:
        frame = unseal(payload, self._key, FROM_MASTER)
        try:
            if frame is None or not obeys(self._fence, frame["fence"]):
                return None
        except (KeyError, TypeError):
            return None
        self._fence = frame["fence"]
        return frame
