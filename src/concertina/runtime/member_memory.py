"""A newcomer's view of the memory of the member that it follows.

Host memory is read out of the member's process. What lies in a segment, or on a GPU, is mapped and can be used where it
is. Addresses are always those that the member uses itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from concertina.runtime.device_memory import KIND, DeviceMapping
from concertina.runtime.segments import Segment
from concertina.runtime.state_map import read_memory
from concertina.runtime.sums import TOKEN_BYTES, Shared


class MemberMemory:
    """Memory of one process, of which some stretches can be mapped."""

    def __init__(self, pid: int, shared: Sequence[Shared] = ()) -> None:
        self._pid = pid
        self._shared = shared  # where the state lies
        self._segments: dict[str, Segment | None] = {}  # by token, each mapped once
        self._devices: dict[str, DeviceMapping] = {}  # by place

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
