"""The workers of one generation, connected by gloo.

A group is built directly, without torch's global process group, so that a script's own use of `torch.distributed`
and our generations never meet. Only tensors and raw bytes travel; nothing received is unpickled.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from concertina.runtime.torch_internals import gloo_group

TIMEOUT = timedelta(minutes=30)  # as long as DDP: one worker may evaluate for long while the others wait
THREADS = 2  # of gloo, per group


class Group:
    """One worker's end of the group."""

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self.pg = process_group
        self.rank = rank
        self.size = size

    @classmethod
    def build(cls, rendezvous: Path, rank: int, size: int, timeout: timedelta = TIMEOUT) -> "Group":
        """Meets the others through a file; gloo itself listens on the loopback interface only."""
        return cls(gloo_group(str(rendezvous), rank, size, timeout, THREADS), rank, size)

    def max_async(self, values: Tensor) -> Any:
        """Starts an element-wise maximum over the workers, in place; wait() on what it returns."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        return self.pg.allreduce([values], options)

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> None:
        self.pg.allreduce([values]).wait()

    def sum_async(self, values: Tensor) -> Any:
        return self.pg.allreduce([values])

    def broadcast_async(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.pg.broadcast([tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self.broadcast_async(tensor, root).wait()

    def broadcast_tensors(self, tensors: Sequence[Tensor], root: int) -> None:
        """Overwrites `tensors` with those of `root`, through host memory and in dense order."""
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            self.broadcast(host, root)
            if self.rank != root:
                tensor.copy_(host)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, by worker."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.sum(lengths)
        room = int(lengths.max())
        mine = torch.zeros(room, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        all_of_them = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.size)]
        self.pg.allgather([all_of_them], [mine]).wait()
        return [bytes(t[: int(n)].numpy()) for t, n in zip(all_of_them, lengths, strict=True)]
