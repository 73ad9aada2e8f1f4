"""A newcomer's view of the memory of the member that it follows.

Host memory is read out of the member's process. What lies in a segment, or on a GPU, is mapped and can be used where it
is. Addresses are always those that the member uses itself.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import KIND, DeviceMapping, finish_work
from concertina.runtime.digest import bit_pattern
from concertina.runtime.segments import Segment
from concertina.runtime.state_map import read_memory
from concertina.runtime.sums import TOKEN_BYTES, Shared

REST = 1.0  # as long as reading took: whoever reads takes at most half of what the memory can carry

Where = Sequence[tuple[int, Tensor]]  # address there, memory here


class MemberMemory:
    """Memory of one process, of which some stretches can be mapped."""

    slice = 1 << 20  # elements of a piece; a multiple of every vector width, so that slices give the bits of the whole
    most_lapses = 30  # steps that may go by unseen before everything is left to the switch
    most_misses = 1 << 60

    def __init__(self, pid: int, shared: Sequence[Shared] = ()) -> None:
        self._pid = pid
        self._shared = shared  # where the state lies
        self._segments: dict[str, Segment | None] = {}  # by token, each mapped once
        self._devices: dict[str, DeviceMapping] = {}  # by place
        self._scratch: dict[torch.device, Tensor] = {}
        self._rest_until = 0.0

    def rests(self) -> bool:
        """Whether the members should have the machine's memory to themselves for a moment."""
        return time.monotonic() < self._rest_until

    def _rest(self, began: float) -> None:
        now = time.monotonic()
        self._rest_until = now + REST * (now - began)

    def copy(self, desk: Desk, where: Where) -> int:
        """Copies what lies there between two steps; how many steps that has seen, or -1 if it changed meanwhile."""
        clock, began = desk.clock, time.monotonic()
        if clock % 2:
            return -1
        self.copy_settled(clock // 2, where)
        self._rest(began)
        return clock // 2 if desk.clock == clock else -1

    def copy_settled(self, steps: int, where: Where) -> None:
        """The same where nobody can change it: the member waits, and has made so many steps."""
        for address, target in where:
            self.read(address, target)
        finish_work(target for _, target in where)

    def compare(self, desk: Desk, where: Where) -> tuple[int, bool]:
        """Whether the same is there and here; with how many steps that has seen there, or -1."""
        clock, began = desk.clock, time.monotonic()
        if clock % 2:
            return -1, False
        equal = True
        for address, here in where:
            theirs = self._room(here)
            self.read(address, theirs)
            equal = equal and torch.equal(bit_pattern(theirs), bit_pattern(here))
        self._rest(began)
        return (clock // 2 if desk.clock == clock else -1), equal

    def _room(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        room = self._scratch.get(like.device)
        if room is None or room.numel() < size:
            room = self._scratch[like.device] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return room[:size].view(like.dtype)

    def read(self, address: int, target: Tensor) -> None:
        """Copies what lies there into `target`; OSError if that cannot be done. On a GPU it may take place later."""
        if not target.is_cuda:
            read_memory(self._pid, address, target)
            return
        there = self.find(self._shared, address, target)
        if there is None:
            raise OSError(f"no memory of process {self._pid} is known at {address:#x}")
        target.copy_(there)

    def find(self, shared: Sequence[Shared], address: int, like: Tensor) -> Tensor | None:
        """What lies at `address`, in the form of `like`, without a copy; None if none of these stretches holds it."""
        size = like.numel() * like.element_size()
        for base, length, place, token in shared:
            if base <= address and address + size <= base + length:
                if place.startswith(KIND):
                    return self._on_device(place, length, address - base, like)
                segment = self._map(place, token)
                if segment is not None:
                    flat = torch.frombuffer(segment.memory, dtype=like.dtype, count=like.numel(), offset=address - base)
                    return flat.as_strided(like.size(), like.stride())
        return None

    def get_ready(self, shared: Sequence[Shared]) -> None:
        """Maps what can be mapped of these stretches, so that nobody waits for that when it is needed."""
        for _, _, place, token in shared:
            if not place.startswith(KIND):
                self._map(place, token)

    def _on_device(self, place: str, length: int, offset: int, like: Tensor) -> Tensor:
        if place not in self._devices:
            self._devices[place] = DeviceMapping(place, length, like.device)
        stretch = self._devices[place].bytes[offset : offset + like.numel() * like.element_size()]
        return stretch.view(like.dtype).as_strided(
            like.size(), like.stride(), stretch.storage_offset() // like.element_size()
        )

    def _map(self, place: str, token: str) -> Segment | None:
        if token not in self._segments:
            try:
                segment = Segment.open(place)
            except OSError:
                return None
            # The place is a number that another segment may have by now.
            fits = segment.memory[:TOKEN_BYTES].hex() == token
            if fits:
                segment.look()
            self._segments[token] = segment if fits else None
        return self._segments[token]

    def close(self) -> None:
        """The member may give its memory back."""
        for mapping in self._devices.values():
            mapping.close()
        self._devices.clear()
