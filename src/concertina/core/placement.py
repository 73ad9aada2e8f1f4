"""Which worker runs which virtual workers."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class VirtualPlacement:
    """Virtual workers by worker. Every virtual worker has exactly one place.

    Contiguous blocks send the fewest bytes, because neighbours in the ring then share a process.
    """

    workers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        placed = sorted(v for block in self.workers for v in block)
        if placed != list(range(len(placed))) or not all(self.workers):
            raise ValueError(f"not a placement of virtual workers 0..{len(placed) - 1}: {self.workers}")

    @classmethod
    def blocks(cls, virtual: int, workers: int) -> "VirtualPlacement":
        """Contiguous blocks whose sizes differ by at most one."""
        edges = [virtual * k // workers for k in range(workers + 1)]
        return cls(tuple(tuple(range(lo, hi)) for lo, hi in pairwise(edges)))

    @property
    def virtual(self) -> int:
        """P, the number of virtual workers."""
        return sum(len(block) for block in self.workers)

    def host(self, virtual_worker: int) -> int:
        """The worker that runs `virtual_worker`."""
        return next(w for w, block in enumerate(self.workers) if virtual_worker in block)

    @property
    def one_each(self) -> bool:
        """True if worker v runs exactly virtual worker v, as plain DDP does."""
        return self.workers == tuple((v,) for v in range(self.virtual))
