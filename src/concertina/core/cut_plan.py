"""How one virtual worker's samples of an epoch are cut into batches whose size may change on the way.

Pure. All virtual workers have equally many samples and the same plan, so a batch's number says for all of them, on
every worker, which positions it is made of. A change of size never moves a batch that was trained on before it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from concertina.core.errors import UsageError

Cut = tuple[int, int, int]
"""From batch number ... which begins at position ... batches have ... samples."""


@dataclass(frozen=True, slots=True)
class CutPlan:
    samples: int  # of one virtual worker in an epoch
    drop_last: bool  # whether a last batch that is not full is left out
    cuts: tuple[Cut, ...]  # in order of batch numbers, the first from (0, 0)

    def __post_init__(self) -> None:
        if not self.cuts or self.cuts[0][:2] != (0, 0) or any(size < 1 for _, _, size in self.cuts):
            raise UsageError(f"the cuts {list(self.cuts)} of an epoch, needed sizes of 1 or more from batch 0 on")

    @classmethod
    def even(cls, samples: int, drop_last: bool, size: int) -> "CutPlan":
        return cls(samples, drop_last, ((0, 0, size),))

    @classmethod
    def load(cls, samples: int, drop_last: bool, cuts: Sequence[Sequence[int]]) -> "CutPlan":
        return cls(samples, drop_last, tuple((int(batch), int(position), int(size)) for batch, position, size in cuts))

    @property
    def size(self) -> int:
        """Samples of the batches at the end of the epoch."""
        return self.cuts[-1][2]

    @property
    def batches(self) -> int:
        first, begin, size = self.cuts[-1]
        left = self.samples - begin
        return first + (left // size if self.drop_last else -(-left // size))

    def position(self, batch: int) -> int:
        """Where a batch begins; the batch after the last one begins where the last one ends."""
        return position_of(batch, self.samples, self.cuts)

    def bounds(self) -> list[tuple[int, int]]:
        """First position and end of every batch."""
        at = [self.position(batch) for batch in range(self.batches + 1)]
        return list(pairwise(at))

    def from_batch(self, batch: int, size: int) -> "CutPlan":
        """From `batch` on with another size; what an abandoned future had planned after it is forgotten."""
        kept = tuple(cut for cut in self.cuts if cut[0] <= batch)
        if kept[-1][2] == size:
            return CutPlan(self.samples, self.drop_last, kept)
        if kept[-1][0] == batch and len(kept) > 1:
            return CutPlan(self.samples, self.drop_last, kept[:-1]).from_batch(batch, size)
        if batch == 0:
            return CutPlan.even(self.samples, self.drop_last, size)
        return CutPlan(self.samples, self.drop_last, (*kept, (batch, self.position(batch), size)))


def position_of(batch: int, samples: int, cuts: Sequence[Sequence[int]]) -> int:
    first, begin, size = cuts[max(0, bisect_right([cut[0] for cut in cuts], batch) - 1)]
    return min(samples, begin + (batch - first) * size)
