"""How large the batch is after a change of workers (Elan III, algorithm 1), and in which parts a worker runs its share.

Pure arithmetic over whole numbers. The rate that goes with a batch is in `learning_rate.py`, the measured curve behind
`OptimalWorkers` in `step_times.py`. Nothing here knows torch, devices or the job.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from concertina.core.errors import UsageError

OptimalWorkers = Callable[[int], int]
"""Total batch -> the number of workers that gives the highest throughput while that total is kept."""


class Scaling(StrEnum):
    CONSISTENT = "consistent"  # virtual workers: nothing that the model can see changes
    STRONG = "strong"
    WEAK = "weak"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The batch to train with from a change on."""

    total: int  # samples of one step, all workers together
    workers: int
    factor: Fraction  # total now / total before: what the learning rate is multiplied by
    reason: str

    @property
    def local(self) -> tuple[int, ...]:
        """Samples per worker and step; they differ by at most one, the larger ones first."""
        return split_evenly(self.total, self.workers)


def strong(total: int, before: int, after: int) -> BatchSize:
    """The total batch stays, the local batch shrinks or grows."""
    _check(total, before, after)
    _check_enough(total, after)
    reason = f"strong scaling, {_change(before, after)}: the total batch stays {total}"
    return BatchSize(total=total, workers=after, factor=Fraction(1), reason=reason)


def weak(total: int, before: int, after: int) -> BatchSize:
    """The local batch stays, the total batch grows or shrinks with the workers."""
    _check(total, before, after)
    new = _in_proportion(total, before, after)
    reason = f"weak scaling, {_change(before, after)}: the total batch goes from {total} to {new}"
    return BatchSize(total=new, workers=after, factor=Fraction(new, total), reason=reason)


def hybrid(total: int, before: int, after: int, optimal_workers: OptimalWorkers) -> BatchSize:
    """The smallest of 1, 2, 4, ... times the batch that keeps all workers busy; if none does, as weak scaling.

    Algorithm 1 as printed; comments give its lines. When workers leave, N'/N is below one, no factor is tried and the
    batch shrinks as under weak scaling.
    """
    _check(total, before, after)
    k = 1  # line 6
    while k * before <= after:  # line 7, without rounding N'/N
        tried = k * total  # line 8
        best = optimal_workers(tried)  # line 9
        if best >= after and tried >= after:  # line 10; and every worker has a sample
            return BatchSize(  # line 11
                total=tried,
                workers=after,
                factor=Fraction(k),
                reason=f"hybrid scaling, {_change(before, after)}: {_times(k, total)} keeps up to {best} workers busy",
            )
        k *= 2  # line 13
    new = _in_proportion(total, before, after)  # lines 15, 16
    tries = "no smaller batch keeps them all busy, so" if k > 1 else "with fewer workers"
    reason = f"hybrid scaling, {_change(before, after)}: {tries} the total batch goes from {total} to {new}"
    return BatchSize(total=new, workers=after, factor=Fraction(new, total), reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The batch for any number of workers, always counted from how the job began.

    Algorithm 1 goes from one change to the next, and its way down is not its way up: 4 -> 8 -> 4 workers can end with
    half the batch it began with. Counted from the beginning, a number of workers always has the same batch, whatever
    came between, and a restart needs nothing but the settings. `factor` is then relative to the beginning, too.
    """

    scaling: Scaling
    total: int  # batch at the beginning
    workers: int  # at the beginning
    optimal_workers: OptimalWorkers | None = None  # hybrid only

    def __post_init__(self) -> None:
        _check(self.total, self.workers, self.workers)
        if self.scaling is Scaling.HYBRID and self.optimal_workers is None:
            raise UsageError(
                "hybrid scaling has no throughput curve, needed one to know how many workers a batch keeps busy; "
                "measure it with `concertina profile`, or use --scaling strong or weak"
            )

    def at(self, workers: int) -> BatchSize:
        if self.scaling is Scaling.WEAK:
            return weak(self.total, self.workers, workers)
        if self.scaling is Scaling.HYBRID:
            assert self.optimal_workers is not None
            return hybrid(self.total, self.workers, workers, self.optimal_workers)
        return strong(self.total, self.workers, workers)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most one, the larger ones first."""
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def accumulation(local: int, largest_local_batch: int) -> tuple[int, ...]:
    """The sizes in which a worker runs its local batch one after another, summing gradients (EDL 5.4).

    The fewest parts that fit the device, and those as equal as can be: a small last part would use the device badly.
    A mean over the local batch is the sum of the parts' means times `size / local`, since sizes may differ by one.
    """
    if largest_local_batch < 1:
        raise UsageError(
            f"largest_local_batch is {largest_local_batch}, needed 1 or more: "
            "a device that cannot hold one sample cannot train this model"
        )
    if local < 0:
        raise UsageError(f"a local batch of {local} samples, needed 0 or more")
    return split_evenly(local, -(-local // largest_local_batch)) if local else ()


def _in_proportion(total: int, before: int, after: int) -> int:
    """total x after / before as a whole number of samples (halves up), and one per worker at least."""
    return max(after, (2 * total * after + before) // (2 * before))


def _check(total: int, before: int, after: int) -> None:
    for name, seen in (("the total batch", total), ("workers before", before), ("workers after", after)):
        if seen < 1:
            raise UsageError(f"{name} is {seen}, needed a whole number of 1 or more")


def _check_enough(total: int, workers: int) -> None:
    if total < workers:
        raise UsageError(
            f"a total batch of {total} cannot be divided over {workers} workers, needed one sample for each; "
            f"use at most {total} workers, or --scaling weak or hybrid"
        )


def _change(before: int, after: int) -> str:
    return f"{before} -> {after} workers"


def _times(k: int, total: int) -> str:
    return f"a total batch of {total}" if k == 1 else f"{k} x {total} = {k * total}"
