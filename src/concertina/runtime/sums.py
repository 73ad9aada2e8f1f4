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
TOKEN_BYTES = 8  # at the beginning; no other segment begins with the same

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


def flats_apart(layout: BucketLayout) -> list[Tensor] | None:
    """One tensor per bucket where gradients on a GPU stay whole during the next step; None if memory is short."""
    try:
        return [layout.new_flat(b) for b in range(len(layout.buckets))]
    except torch.OutOfMemoryError:
        return None  # newcomers then have less time for a step; training must not fail for them


class SharedSums:
    """One tensor per bucket, in a segment that others can open as long as this object lives."""

    def __init__(self, layout: BucketLayout) -> None:
        kinds = [layout.params[bucket[0]].dtype for bucket in layout.buckets]
        like = [torch.empty(layout.elements(b), dtype=kind, device="meta") for b, kind in enumerate(kinds)]
        sizes = [aligned(flat.numel() * flat.element_size()) for flat in like]
        self._segment = Segment.create(ALIGNMENT + sum(sizes))
        self._segment.touch()
        token = os.urandom(TOKEN_BYTES)
        self._segment.memory[:TOKEN_BYTES] = token
        self.flats = carve(self._segment.memory, like, sizes, ALIGNMENT)
        base = self.flats[0].data_ptr() - ALIGNMENT
        self.where: Shared = (base, self._segment.size, self._segment.address, token.hex())
