"""Memory for the sums of a step's gradients, where a newcomer can use it as it is.

While somebody follows, a step's sums lie in a segment. The newcomer maps it and feeds its own optimizer from there,
without a copy, at the same time as the members' optimizers act.
"""

import os
from typing import Any

import torch
from torch import Tensor

from concertina.runtime.buckets import BucketLayout
from concertina.runtime.segments import Segment

ALIGNMENT = 64  # bytes; every bucket starts on a cache line
_TOKEN = 8  # bytes at the beginning that no other segment begins with

Shared = tuple[int, int, str, str]  # where it lies in its maker's memory, its size, how to open it, its token


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def carve(shared: Any, like: list[Tensor], sizes: list[int], offset: int) -> list[Tensor]:
    """One tensor per bucket out of mapped memory."""
    out = []
    for flat, size in zip(like, sizes, strict=True):
        out.append(torch.frombuffer(shared, dtype=flat.dtype, count=flat.numel(), offset=offset))
        offset += size
    return out


class SharedSums:
    """One tensor per bucket, in a segment that others can open as long as this object lives."""

    def __init__(self, layout: BucketLayout) -> None:
        kinds = [layout.params[bucket[0]].dtype for bucket in layout.buckets]
        like = [torch.empty(layout.elements(b), dtype=kind, device="meta") for b, kind in enumerate(kinds)]
        sizes = [aligned(flat.numel() * flat.element_size()) for flat in like]
        self._segment = Segment.create(ALIGNMENT + sum(sizes))
        self._segment.touch()
        token = os.urandom(_TOKEN)
        self._segment.memory[:_TOKEN] = token
        self.flats = carve(self._segment.memory, like, sizes, ALIGNMENT)
        base = self.flats[0].data_ptr() - ALIGNMENT
        self.where: Shared = (base, self._segment.size, self._segment.address, token.hex())


class OthersSums:
    """A newcomer's view of the members' sums: segments that it has mapped, each once."""

    def __init__(self) -> None:
        self._mapped: dict[str, Segment | None] = {}

    def find(self, shared: list[Shared], address: int, like: Tensor) -> Tensor | None:
        """What lies at `address` in the member's memory, in the form of `like`, if it lies in one of these segments."""
        size = like.numel() * like.element_size()
        for base, length, place, token in shared:
            if base <= address and address + size <= base + length:
                segment = self._map(place, token)
                if segment is not None:
                    flat = torch.frombuffer(segment.memory, dtype=like.dtype, count=like.numel(), offset=address - base)
                    return flat.as_strided(like.size(), like.stride())
        return None

    def _map(self, place: str, token: str) -> Segment | None:
        if token not in self._mapped:
            try:
                segment = Segment.open(place)
            except OSError:
                return None
            # The place is a number that another segment may have by now.
            fits = segment.memory[:_TOKEN].hex() == token
            if fits:
                segment.look()
            self._mapped[token] = segment if fits else None
        return self._mapped[token]
