"""The learning rate after the batch has changed: progressive linear scaling (Elan III, equations 2 and 3).

What is kept is a factor, 1 at the beginning, by which the rate of the user's own scheduler is multiplied: under a
constant rate that is the paper's rule, and any schedule goes on underneath. The printed condition is `t < T` with T
the length of the adjustment, which would skip the ramp of any change after step T; meant is `t < T0 + T`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from concertina.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRamp:
    """The factor goes from `start` to `target` in equal increments over `length` steps from step `begin` on."""

    begin: int = 0  # T0
    length: int = 0  # T; 0: at once
    start: float = 1.0  # factor at `begin`
    target: Fraction = Fraction(1)  # exact, so that doubled and halved again is one

    def __post_init__(self) -> None:
        if self.begin < 0 or self.length < 0:
            raise UsageError(f"a ramp of {self.length} steps from step {self.begin}, needed numbers from 0 up for both")
        if not 0 < self.start < float("inf") or self.target <= 0:
            raise UsageError(f"a rate factor from {self.start} to {self.target}, needed factors above 0")

    def at(self, step: int) -> float:
        """The factor for optimizer step `step`."""
        if step >= self.begin + self.length:
            return float(self.target)
        done = max(0, step - self.begin) / self.length
        return self.start + done * (float(self.target) - self.start)

    def changed(self, step: int, target: Fraction, length: int) -> "RateRamp":
        """From `step` on towards another factor (relative to the beginning), from wherever this ramp has got to.

        So two changes that overlap end at the second target, and the rate never jumps.
        """
        return RateRamp(begin=step, length=length, start=self.at(step), target=target)

    def to_json(self) -> dict[str, Any]:
        target = [self.target.numerator, self.target.denominator]
        return {"begin": self.begin, "length": self.length, "start": self.start, "target": target}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RateRamp":
        target = Fraction(*value["target"])
        return cls(begin=value["begin"], length=value["length"], start=value["start"], target=target)
