"""DDP's bucket layout: which parameter's gradient lies where in which flat bucket.

The position of an element in its bucket decides its ring chunk and with it the order of additions, so the layout is
part of the result. DDP starts with one bucket per dtype and device, then rebuilds once, in the order in which rank
0's gradients became ready; `static_graph` rebuilds a step later, `find_unused_parameters` never.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from concertina.runtime.torch_internals import FIRST_BUCKET_BYTES, assign_buckets

DEFAULT_CAP_MB = 25.0
MOST_REST_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """The keyword arguments of DistributedDataParallel that change what is computed."""

    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={self.bucket_cap_mb}: needs a positive number of megabytes")

    @property
    def tracks_usage(self) -> bool:
        """Whether parameters may go without a gradient."""
        return self.find_unused_parameters or self.static_graph

    @property
    def cap_bytes(self) -> int:
        return int((DEFAULT_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * (1 << 20))

    @property
    def first_cap_bytes(self) -> int:
        return FIRST_BUCKET_BYTES if self.bucket_cap_mb is None else self.cap_bytes


@dataclass(slots=True)
class BucketLayout:
    """The layout in force and how far DDP's life cycle of it has come. Part of every checkpoint."""

    options: DdpOptions
    params: Sequence[Tensor]
    buckets: list[list[int]] = field(default_factory=list)  # parameter indices by bucket, in memory order
    rebuilt: bool = False
    synced_steps: int = 0

    @classmethod
    def initial(cls, params: Sequence[Tensor], options: DdpOptions) -> "BucketLayout":
        if options.static_graph or not options.find_unused_parameters:
            limits = [sys.maxsize]
        elif options.bucket_cap_mb is None:
            limits = [options.first_cap_bytes, options.cap_bytes]
        else:
            limits = [options.cap_bytes]
        return cls(options, params, list(reversed(assign_buckets(params, limits))))

    def copy(self) -> "BucketLayout":
        return BucketLayout(self.options, self.params, [list(b) for b in self.buckets], self.rebuilt, self.synced_steps)

    @property
    def wants_ready_order(self) -> bool:
        """True if the coming synchronised backward of virtual worker 0 decides the next layout."""
        if self.rebuilt or (self.options.find_unused_parameters and not self.options.static_graph):
            return False
        return self.synced_steps == (1 if self.options.static_graph else 0)

    def rebuild(self, ready_order: Sequence[int]) -> None:
        ordered = [self.params[i] for i in ready_order]
        limits = [self.options.first_cap_bytes, self.options.cap_bytes]
        self.buckets = assign_buckets(ordered, limits, ready_order)
        self.rebuilt = True

    def elements(self, bucket: int) -> int:
        return sum(self.params[i].numel() for i in self.buckets[bucket])

    def new_flat(self, bucket: int, pinned: bool = False) -> Tensor:
        """Uninitialised memory for one bucket, on the parameters' device or in pinned host memory."""
        like = self.params[self.buckets[bucket][0]]
        if pinned:
            return pinned_flat(self.elements(bucket), like.dtype)
        return torch.empty(self.elements(bucket), dtype=like.dtype, device=like.device)

    def views(self, bucket: int, flat: Tensor) -> list[Tensor]:
        """`flat` seen as one tensor per parameter of `bucket`, each in its parameter's own memory order."""
        out, offset = [], 0
        for i in self.buckets[bucket]:
            param = self.params[i]
            stride = param.stride() if is_dense(param) else param.contiguous().stride()
            out.append(flat.as_strided(param.size(), stride, offset))
            offset += param.numel()
        return out

    def state(self) -> dict[str, object]:
        return {"buckets": self.buckets, "rebuilt": self.rebuilt, "synced_steps": self.synced_steps}

    def load(self, state: dict[str, object]) -> None:
        self.buckets = [list(b) for b in state["buckets"]]  # type: ignore[attr-defined]
        self.rebuilt = bool(state["rebuilt"])
        self.synced_steps = int(state["synced_steps"])  # type: ignore[call-overload]


def pinned_flat(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory of the host that a GPU can reach.

    While it is being pinned, whatever else this process asks of the GPU has to wait. So it takes as long a rest: the
    next generation's memory is got while the present one trains.
    """
    began = time.monotonic()
    flat = torch.empty(elements, dtype=dtype, pin_memory=True)
    time.sleep(min(MOST_REST_SECONDS, time.monotonic() - began))
    return flat


def is_dense(tensor: Tensor) -> bool:
    """Non-overlapping and without holes in some order of its dimensions: DDP then keeps the tensor's own strides."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
