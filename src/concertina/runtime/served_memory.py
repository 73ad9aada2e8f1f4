"""A member's memory, read by newcomers on other hosts.

They cannot look into this process, so for each of them a thread of this one reads what it asks for. It reads parameters
and optimizer state under the member's clock, as a newcomer on this host would, so nobody waits for it. The gradients of
the newest few updates are copied as soon as an optimizer is about to take them, since a network may need longer than a
step; where even the copy comes too late, because the next step's gradients follow at once, the member makes it itself.

Nothing of this exists unless a newcomer on another host follows.
"""

import contextlib
import hashlib
import socket
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from concertina.runtime.desk import Desk
from concertina.runtime.keepalive import mind_silence
from concertina.runtime.read_frames import (
    DIGEST_BYTES,
    NOT_THERE,
    REQUEST_BYTES,
    STRETCH_BYTES,
    Request,
    Stretch,
    What,
    asked,
    asked_stretches,
    reply,
)
from concertina.runtime.state_map import as_buffer, as_bytes
from concertina.runtime.wire_frames import Kind, WireError, pack

KEPT = 3  # updates of every optimizer whose gradients are kept: one is read, one is ready, one is made
LATE = 3  # copies in a row that came too late, before training makes them itself
SEND_SECONDS = 20.0  # for a reader to take something
WAIT_SECONDS = 5.0  # for an optimizer to be done, or a copy to be made
CLOCK_SECONDS = 0.0005
TELL_BYTES = 1 << 22  # of gradients that are copied before whoever waits for them is told


class Stretches:
    """Tensors by where they lie: nothing else can be read."""

    def __init__(self, tensors: Sequence[Tensor], addresses: Sequence[int] = ()) -> None:
        rows = sorted(
            zip(addresses or [t.data_ptr() for t in tensors], map(as_bytes, tensors), strict=True),
            key=lambda row: (row[0], row[1].numel()),
        )
        self._rows = {address: data for address, data in rows if data.numel()}
        self._starts = list(self._rows)

    def find(self, stretch: Stretch) -> Tensor:
        """Its bytes, where they are."""
        return self.locate(stretch)[1]

    def locate(self, stretch: Stretch) -> tuple[int, Tensor]:
        """The address of the tensor that they are part of, and the bytes."""
        address, size = stretch
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            start = self._starts[at]
            data, begin = self._rows[start], address - start
            if begin + size <= data.numel():
                return start, data[begin : begin + size]
        raise WireError(f"{size} bytes at {address:#x} were asked for, where nothing is that we have told of")


@dataclass(slots=True, eq=False)
class Copy:
    """The gradients of one update; who reads them need not wait for the last of them."""

    step: int
    rooms: list[Tensor]
    stretches: Stretches
    order: dict[int, int]  # address -> its place among them
    done: int = 0  # so many of them are here
    failed: bool = False
    users: int = 1  # whoever makes it, and readers


class GradientCopies:
    """Of the newest updates, for who follows more slowly than the member's own memory would allow."""

    def __init__(self, desk: Desk, most: int) -> None:
        self._desk = desk
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, int, list[Tensor]]] = deque()
        self._made: dict[int, Copy] = {}  # by number of the note
        self._newest = 0  # the last note that was dealt with
        self._spare: list[list[Tensor]] = []  # memory of copies that are not needed any more
        self._late = 0  # copies in a row that came too late
        self._stopped = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Somebody will ask."""
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="concertina-gradients", daemon=True)
                self._thread.start()

    def note(self, number: int, step: int, grads: list[Tensor]) -> None:
        """An optimizer is about to act with these, as note `number` says; called by the training thread."""
        if self._thread is None or self._late >= LATE:
            if self._thread is not None:
                self._make(number, step, grads)
            with self._changed:
                self._newest = number
                self._changed.notify_all()
            return
        with self._changed:
            self._waiting.append((number, step, grads))
            self._changed.notify_all()

    def stop(self) -> None:
        """No more will come; what is there can still be read."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def read(self, number: int, stretches: Sequence[Stretch]) -> Iterator[tuple[int, list[Tensor]] | None]:
        """The step of a note and these bytes of its gradients, which stay while they are read; None if not kept."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._made or self._past(number), WAIT_SECONDS)
            copy = self._made.get(number)
            if copy is not None:
                copy.users += 1
        if copy is None:
            yield None
            return
        try:
            found = [copy.stretches.locate(stretch) for stretch in stretches]
            last = max(copy.order[start] for start, _ in found)
            with self._changed:
                self._changed.wait_for(lambda: copy.done > last or copy.failed, WAIT_SECONDS)
                there = copy.done > last
            yield (copy.step, [part for _, part in found]) if there else None
        finally:
            with self._changed:
                copy.users -= 1

    def _past(self, number: int) -> bool:
        return self._newest >= number or (self._stopped and not self._waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
                if not self._waiting:
                    return
                number, step, grads = self._waiting[0]
            in_time = self._make(number, step, grads)
            del grads
            with self._changed:
                self._late = 0 if in_time else self._late + 1
                self._waiting.popleft()
                self._newest = number
                self._changed.notify_all()

    def _make(self, number: int, step: int, grads: list[Tensor]) -> bool:
        """False if it came too late."""
        rooms, fresh = self._rooms(grads)
        if rooms is None:
            return True
        addresses = [grad.data_ptr() for grad in grads]
        made = Copy(step, rooms, Stretches(rooms, addresses), {address: k for k, address in enumerate(addresses)})
        with self._changed:
            self._made[number] = made
        told = 0
        for k, (room, grad) in enumerate(zip(rooms, grads, strict=True)):
            room.copy_(as_bytes(grad))
            told += room.numel()
            if told >= TELL_BYTES or k + 1 == len(grads):
                told = 0
                with self._changed:
                    made.failed = self._desk.overwritten > step
                    made.done = made.done if made.failed else k + 1
                    self._changed.notify_all()
            if made.failed:
                break
        with self._changed:
            made.users -= 1
        return fresh or not made.failed  # memory that is used for the first time is slow

    def _rooms(self, grads: list[Tensor]) -> tuple[list[Tensor] | None, bool]:
        """Memory for a copy, if possible that of the oldest one, and whether it is new; None if readers hold all."""
        sizes = [grad.numel() * grad.element_size() for grad in grads]
        with self._changed:
            free = [number for number, copy in self._made.items() if not copy.users]
            useless = [number for number in free if self._made[number].failed]
            if useless or len(self._made) >= self._most:
                if not free:
                    return None, False
                self._spare.append(self._made.pop(min(useless or free)).rooms)
            while self._spare:
                rooms = self._spare.pop()
                if [room.numel() for room in rooms] == sizes:
                    return rooms, False
        return [torch.empty(size, dtype=torch.uint8) for size in sizes], True


class ServedMemory:
    """What newcomers on other hosts may read of this member, and the threads that read it for them."""

    def __init__(self, desk: Desk, tensors: Sequence[Tensor], optimizers: int) -> None:
        self._desk = desk
        self._state = Stretches(tensors)
        self._copies = GradientCopies(desk, KEPT * max(1, optimizers))
        self._readers: set[socket.socket] = set()
        self._lock = threading.Lock()

    def admit(self, sock: socket.socket) -> None:
        """A reader that has proved who it is."""
        mind_silence(sock, SEND_SECONDS)
        with self._lock:
            self._readers.add(sock)
        self._copies.begin()
        threading.Thread(target=self._serve, args=(sock,), name="concertina-serve", daemon=True).start()

    def note(self, number: int, step: int, grads: list[Tensor]) -> None:
        self._copies.note(number, step, grads)

    def stop(self) -> None:
        """The change that the readers came for takes place, or will not: nothing new comes. They may read on."""
        self._copies.stop()

    def close(self) -> None:
        """They may not."""
        self.stop()
        with self._lock:
            readers = list(self._readers)
        for sock in readers:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._copies.stop()  # nobody keeps it, and nobody reads any more

    # -- one thread per reader ---------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(SEND_SECONDS)
            sock.sendall(pack(Kind.WHOLE, 0))
            while True:
                head = _receive(sock, REQUEST_BYTES, patient=True)
                if not head:
                    return
                request = asked(head)
                stretches = asked_stretches(_receive(sock, request.stretches * STRETCH_BYTES))
                if request.what is What.GRADIENTS:
                    self._send_gradients(sock, request, stretches)
                else:
                    self._send_state(sock, request, stretches)
        except (OSError, WireError):
            return  # a reader that is gone, or no reader of ours
        finally:
            with self._lock:
                self._readers.discard(sock)
            sock.close()

    def _send_gradients(self, sock: socket.socket, request: Request, stretches: list[Stretch]) -> None:
        with self._copies.read(request.note, stretches) as found:
            if found is None:
                sock.sendall(reply(NOT_THERE, 0))
                return
            step, parts = found
            sock.sendall(reply(step, sum(part.numel() for part in parts)))
            for part in parts:
                sock.sendall(as_buffer(part))

    def _send_state(self, sock: socket.socket, request: Request, stretches: list[Stretch]) -> None:
        found = [self._state.find(stretch) for stretch in stretches]
        steps, data = self._read(found)
        if data is None:
            sock.sendall(reply(NOT_THERE, 0))
        elif request.what is What.DIGEST:
            sock.sendall(reply(steps, DIGEST_BYTES) + digest([data]))
        else:
            sock.sendall(reply(steps, data.numel()))
            sock.sendall(as_buffer(data))

    def _read(self, parts: list[Tensor]) -> tuple[int, Tensor | None]:
        """A copy of what lies there between two steps, and how many steps that has seen."""
        room = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8)
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            clock = self._desk.clock
            if clock % 2 == 0:
                at = 0
                for part in parts:
                    room[at : at + part.numel()].copy_(part)
                    at += part.numel()
                if self._desk.clock == clock:
                    return clock // 2, room
            time.sleep(CLOCK_SECONDS)  # its optimizers act
        return NOT_THERE, None


def digest(parts: Sequence[Tensor]) -> bytes:
    """Of bytes one after another."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        made.update(as_buffer(part))
    return made.digest()


def _receive(sock: socket.socket, size: int, patient: bool = False) -> bytes:
    """So many bytes; none if the other side has ended before the first of them."""
    data = bytearray()
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except TimeoutError:
            if patient and not data:
                continue
            raise
        if not more:
            if data:
                raise ConnectionError("the reader left in the middle of a request")
            return b""
        data += more
    return bytes(data)
