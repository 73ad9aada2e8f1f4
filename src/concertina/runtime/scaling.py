"""The batch that a running job trains with, and the learning rate that goes with it (Elan III, EDL 5.4).

The number of virtual workers never changes; what changes is how many samples each of them takes per step. Two things
may change it: the script (`session.scale_batch`), at a place in the data, whatever the number of workers is; and, with
`--scaling weak` or `hybrid`, every change of the number of workers. Everybody decides for itself and must come to the
same: out of the settings, the step, the number of workers, and times that all members have agreed on.

Algorithm 1 asks which number of workers is best for a batch (line 9). Here the running job answers: a batch that has
not been tried on so many workers is tried, for `PROBE` steps, and only then judged by what was measured.
"""

import functools
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from concertina.core.batch_scaling import BatchRule, Scaling, accumulation
from concertina.core.errors import UsageError
from concertina.core.learning_rate import RateRamp
from concertina.core.step_times import StepTimes
from concertina.runtime.virtual import VirtualEngine

PROBE = 20  # steps with a batch before its time counts as measured


class BatchScale:
    """Size and rate of a job's batches; equal on all workers at every step."""

    def __init__(self, mode: Scaling, virtual: int, workers: int, ramp: int) -> None:
        self.mode = mode
        self.workers = workers
        self.reason = ""  # of the last change
        self._virtual = virtual
        self._from_workers = workers  # how the job began: what every size is counted from
        self._ramp_steps = ramp
        self._by_script = Fraction(1)
        self._by_workers = Fraction(1)
        self._ramp = RateRamp()
        self._measured: dict[tuple[int, int], float] = {}  # (workers, samples of each) -> seconds per step
        self._base: tuple[int, int] | None = None  # batch_size of the loader that trains, and the most it could be
        self._since = 0  # the step from which on times are of the present size
        self._times: list[float] = []
        self._last = 0.0
        self.told = 0.0  # seconds of this step, where the script knows better than our clock

    # -- what it comes to --------------------------------------------------------------------------------------------

    def size(self, batch_size: int, most: int) -> int:
        """Samples of a virtual worker's batch, where the script has asked for `batch_size`; `most` are there."""
        factor = self._by_script * self._by_workers
        return batch_size if factor == 1 else max(1, min(most, _rounded(batch_size * factor)))

    def rate_factor(self, step: int) -> float:
        """What the script's own learning rate is multiplied by in optimizer step `step`, counted from 0."""
        return self._ramp.at(step)

    @property
    def total(self) -> int:
        """Samples of a step, all workers together; 0 before any step was made."""
        return 0 if self._base is None else self._virtual * self.size(*self._base)

    # -- what changes it ---------------------------------------------------------------------------------------------

    def by_script(self, factor: Fraction, step: int, ramp: int | None) -> bool:
        """The script wants `factor` times its batch, counted from its beginning; whether that is new."""
        if factor == self._by_script:
            return False
        self._by_script = factor
        self._by_workers = self._for_workers(self.workers)
        self.reason = f"the script asked for {_times(factor)} its batch"
        self._begin_anew(step, ramp)
        return True

    def by_workers(self, workers: int, step: int) -> bool:
        """There are so many workers from `step` on; whether that changes the batch."""
        same = workers == self.workers
        before, self._by_workers = self._by_workers, self._for_workers(workers)
        if same:
            self._by_workers = max(before, self._by_workers)  # what was found too small for them stays so
        self.workers = workers
        changed = self._by_workers != before
        self._begin_anew(step, None if changed else 0, retarget=changed)
        return changed

    def learn(self, step: int, seconds: float) -> bool:
        """All members have agreed on how long a step takes; whether that changes the batch."""
        self._measured[self.workers, -(-self.total // self.workers)] = seconds
        found = self._for_workers(self.workers)
        if found <= self._by_workers:
            return False
        self._by_workers = found
        self._begin_anew(step, None)
        return True

    def _begin_anew(self, step: int, ramp: int | None, retarget: bool = True) -> None:
        self._since, self._times, self._last = step, [], 0.0
        if retarget:
            target = self._by_script * self._by_workers
            if self._base is not None:
                target = Fraction(self.size(*self._base), self._base[0])  # the batch as it was really cut
            self._ramp = self._ramp.changed(step, target, self._ramp_steps if ramp is None else ramp)

    def _for_workers(self, workers: int) -> Fraction:
        """What the mode makes of this number of workers, besides what the script asked for."""
        if self.mode is Scaling.WEAK:
            self.reason = f"weak scaling, {self._from_workers} -> {workers} workers since the beginning"
            return Fraction(workers, self._from_workers)
        if self.mode is not Scaling.HYBRID or self._base is None:
            return Fraction(1)
        total = max(self._from_workers, self._virtual * _rounded(self._base[0] * self._by_script))
        curve = StepTimes.fit(self._measured) if self._measured else None

        def optimal(tried: int) -> int:
            samples = self._virtual * self._cut(tried)
            most = max((n for n in range(1, workers + 1) if (n, -(-samples // n)) in self._measured), default=0)
            if curve is None or most == 0:
                return workers  # never tried: the coming steps will tell
            best = curve.optimal_workers(samples, self._virtual if most == workers else most)
            return best if best < most or most == workers else workers  # too small for fewer is too small for more

        found = BatchRule(scaling=Scaling.HYBRID, total=total, workers=self._from_workers, optimal_workers=optimal).at(
            workers
        )
        self.reason = found.reason
        return found.factor

    def _cut(self, total: int) -> int:
        """A total batch as samples per virtual worker."""
        assert self._base is not None
        return max(1, min(self._base[1], _rounded(Fraction(total, self._virtual))))

    # -- measuring ---------------------------------------------------------------------------------------------------

    def stepped(self, now: float, batch_size: int, most: int) -> None:
        """A step with a batch of that loader is complete."""
        self._base = (batch_size, most)
        if self.mode is Scaling.HYBRID and self._last and len(self._times) < PROBE:
            self._times.append(self.told or now - self._last)
        self._last, self.told = now, 0.0

    def due(self, step: int) -> bool:
        """Whether this is the step at which all members exchange what they measured: the same one on all of them."""
        return self.mode is Scaling.HYBRID and step == self._since + PROBE

    @property
    def microseconds(self) -> int:
        """A step with the present batch, as this worker sees it; 0 if it has seen none.

        The lower quartile: what else a machine does, newcomers that start for one, only ever makes a step longer.
        """
        return max(1, round(1e6 * sorted(self._times)[len(self._times) // 4])) if self._times else 0

    # -- for newcomers and checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "from_workers": self._from_workers,
            "by_script": list(self._by_script.as_integer_ratio()),
            "by_workers": list(self._by_workers.as_integer_ratio()),
            "ramp": self._ramp.to_json(),
            "measured": [[workers, local, seconds] for (workers, local), seconds in sorted(self._measured.items())],
            "base": None if self._base is None else list(self._base),
            "since": self._since,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.workers, self._from_workers = state["workers"], state["from_workers"]
        self._by_script, self._by_workers = Fraction(*state["by_script"]), Fraction(*state["by_workers"])
        self._ramp = RateRamp.from_json(state["ramp"])
        self._measured = {(workers, local): seconds for workers, local, seconds in state["measured"]}
        self._base = None if state["base"] is None else (state["base"][0], state["base"][1])
        self._since, self._times, self._last = state["since"], [], 0.0


def gate_rate(optimizer: Optimizer, engine: VirtualEngine, factor: Callable[[], float]) -> None:
    """While the optimizer acts, and only then, its rates are the script's times `factor`.

    Schedulers never see it: what they compute with, and what `state_dict` holds, is the script's own rate.
    """
    inner = optimizer.step

    @functools.wraps(getattr(inner, "__func__", inner))
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        by = factor()
        if by == 1.0 or (engine.turn is not None and not engine.turn.is_last):
            return inner(*args, **kwargs)
        own = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for group, rate in own:
            group["lr"] = rate * by
        try:
            return inner(*args, **kwargs)
        finally:
            for group, rate in own:
                group["lr"] = rate

    setattr(optimizer, "step", types.MethodType(step, optimizer))  # noqa: B010


def parts_of(batch: Any, largest: int) -> Iterator[tuple[float, Any, bool]]:
    """A batch in parts of at most `largest` samples: each with its weight, and whether it is the last one."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    sizes = {leaf.shape[0] for leaf in leaves}
    if largest < 1 or (len(sizes) == 1 and max(sizes) <= largest):
        yield 1.0, batch, True
        return
    if len(sizes) != 1:
        raise UsageError(
            f"session.parts() divides tensors along their first dimension, which has the sizes {sorted(sizes)} in this "
            "batch; needed one size for all"
        )
    whole, at = sizes.pop(), 0
    for size in accumulation(whole, largest):
        lo, hi = at, at + size
        at = hi
        part = tree_map(
            lambda leaf, lo=lo, hi=hi: leaf[lo:hi] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
        )
        yield size / whole, part, hi == whole


def script_factor(factor: int | float | Fraction) -> Fraction:
    try:
        found = Fraction(factor)
    except (TypeError, ValueError, OverflowError):
        found = Fraction(0)
    if found <= 0:
        raise UsageError(f"scale_batch({factor!r}): needs a number above 0, 2 for a batch twice that of the loader")
    return found


def _rounded(value: Fraction) -> int:
    """Halves up; one at least."""
    return max(1, (2 * value.numerator + value.denominator) // (2 * value.denominator))


def _times(factor: Fraction) -> str:
    return f"{factor} times" if factor.denominator == 1 else f"{float(factor):g} times"
