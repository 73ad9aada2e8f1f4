"""Large allocation problems, job by job: a price for a node in each step takes the place of the capacity.

Given prices, every job chooses for itself: it takes the course (a choice for each step) whose progress less
its cost is largest. Whatever the prices, what the jobs gain plus the price of all nodes is at least the best
objective (weak duality): that is the proven bound. Good prices are those that make the bound small. They are
found on a sample of the jobs, with the choice smoothed (courses by softmax) so that Newton's method applies;
the sharper the choice, the closer. Then all jobs choose once more exactly, which gives the bound, and what
they choose is made to fit: nodes taken back where a step is overfull, free ones handed out.

The gap closes as jobs grow many, since only about as many jobs as there are steps have a choice that
the prices do not settle. Same problem, same answer: nothing is random, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from concertina.policies.allocation_model import (
    AllocationProblem,
    Columns,
    Solution,
    fill,
    shed,
    simple_bound,
)
from concertina.policies.table import Bools, Floats, Ints

MOST_COURSES = 300_000
"""Of one job. Beyond, take fewer steps or sizes."""
SAMPLE = 200
"""Jobs on which prices are sought."""
SHARPNESS = (20.0, 80.0, 320.0, 1280.0)
"""How much the smoothed choice prefers what is better, round by round of the search."""
SPREADS = (0.02, 0.1)
"""By how much of themselves the prices that jobs see are varied from job to job, so that equal jobs need not
choose alike."""
_SETTLED = 1e-4
"""A sharper choice that lowers the bound by less than this part of it ends the search."""
_CLOSE = 1e-3
"""A gap that is not worth another try, relative."""
_BLOCK = 2_000_000
"""Numbers held at once when courses are listed."""


def price(problem: AllocationProblem) -> Solution:
    """A good allocation with a proven bound, for many jobs."""
    columns = Columns(problem)
    if not len(columns) or problem.nodes == 0:
        return columns.solution(columns.least(), simple_bound(columns), "prices")
    prices = find_prices(columns)
    wanted, bound = choose(columns, prices, np.ones(len(columns)))
    bound = min(bound, simple_bound(columns))
    best, most = columns.least(), -1.0
    for start in _starts(columns, prices, wanted):
        fitted = fill(columns, shed(columns, start))
        worth = float(columns.worth(fitted).sum())
        if worth > most:
            best, most = fitted, worth
        if bound - most < _CLOSE * bound:
            break
    return columns.solution(best, bound, "prices")


def _starts(columns: Columns, prices: Floats, wanted: Ints) -> Iterator[Ints]:
    """What to make an allocation from: what all want, what they want at varied prices, nothing."""
    yield wanted
    for spread in SPREADS:
        yield choose(columns, prices, _varied(len(columns), spread))[0]
    yield columns.least()


def _varied(count: int, spread: float) -> Floats:
    """Factors around 1, spread evenly along any stretch of jobs."""
    golden = np.arange(count, dtype=np.float64) * 0.6180339887498949
    return 1.0 + spread * (golden % 1.0 - 0.5)


# -- exact choice ------------------------------------------------------------------------------------------


def choose(columns: Columns, prices: Floats, factor: Floats) -> tuple[Ints, float]:
    """What every job takes when job i pays `factor[i]` times the prices; the bound, if all factors are 1."""
    chosen = columns.least()
    gained = 0.0
    for sizes, rows in columns.alike:
        options = _options(columns, sizes, rows)
        net, course = options.alone(prices, factor[rows])
        (capped,) = np.nonzero(np.take_along_axis(options.gain, course, axis=1).sum(axis=1) > 1.0)
        for at in options.blocks(capped):
            some = options.some(at)
            every = some.courses(prices, factor[rows[at]])
            found = every.argmax(axis=1)
            net[at] = np.take_along_axis(every, found[:, None], axis=1)[:, 0]
            course[at] = some.decode(found)
        chosen[rows] = course + columns.first
        gained += float(net.sum())
    return chosen, gained + columns.nodes * float(prices.sum())


def _options(columns: Columns, sizes: tuple[int, ...], rows: Ints) -> _Options:
    """What is open to these jobs, all of the same sizes."""
    open_to = slice(columns.first, len(sizes) + 1)
    size = np.asarray((0, *sizes), dtype=np.float64)[open_to]
    if len(size) ** columns.steps > MOST_COURSES:
        raise ValueError(f"{len(size)} choices in each of {columns.steps} steps are more than {MOST_COURSES} courses")
    return _Options(columns.steps, size, columns.gain[rows, open_to])


@dataclass(frozen=True, slots=True)
class _Options:
    """The courses open to jobs with the same sizes."""

    steps: int
    size: Floats
    """Nodes of each choice."""
    gain: Floats
    """One row for each job: the share of its work that a step on each choice does."""

    def some(self, at: Ints) -> _Options:
        """The same for some of the jobs."""
        return replace(self, gain=self.gain[at])

    def blocks(self, rows: Ints) -> Iterator[Ints]:
        """So few at a time that all their courses can be listed."""
        most = max(1, _BLOCK // len(self.size) ** self.steps)
        for start in range(0, len(rows), most):
            yield rows[start : start + most]

    def by_step(self, prices: Floats, factor: Floats) -> Floats:
        """Progress less cost of each choice in each step for jobs that are not done within the horizon."""
        weight = np.arange(self.steps, 0, -1, dtype=np.float64)
        net: Floats = weight[None, :, None] * self.gain[:, None, :]
        net -= factor[:, None, None] * (prices[:, None] * self.size)
        return net

    def alone(self, prices: Floats, factor: Floats) -> tuple[Floats, Ints]:
        """The best course, step by step, as if progress did not stop at the end of the work."""
        net = self.by_step(prices, factor)
        course: Ints = net.argmax(axis=2)
        return np.take_along_axis(net, course[:, :, None], axis=2).sum(axis=(1, 2)), course

    def courses(self, prices: Floats, factor: Floats) -> Floats:
        """Progress less cost of every course: one row for each job, in the order of `decode`."""
        count = len(self.gain)
        done = np.zeros((count, 1))
        net = np.zeros((count, 1))
        for price_of_step in prices.tolist():
            done = (done[:, :, None] + self.gain[:, None, :]).reshape(count, -1)
            np.minimum(done, 1.0, out=done)
            cost = factor[:, None] * (price_of_step * self.size)
            net = (net[:, :, None] - cost[:, None, :]).reshape(count, -1)
            net += done
        return net

    def decode(self, course: Ints) -> Ints:
        """The choice in each step of these courses."""
        digits = [course // len(self.size) ** (self.steps - 1 - t) % len(self.size) for t in range(self.steps)]
        return np.stack(digits, axis=1)


# -- prices --------------------------------------------------------------------------------------------------


def find_prices(columns: Columns) -> Floats:
    """Prices for which a sample of the jobs wants about its part of the nodes."""
    sample = _Sample(columns)
    prices = sample.first_prices()
    best, least = prices, sample.bound(prices)
    for sharpness in SHARPNESS:
        prices = _descend(sample, prices, sharpness / sample.scale(best))
        bound, before = sample.bound(prices), least
        if bound < least:
            best, least = prices, bound
        if bound > before * (1 - _SETTLED):
            break
    return best


def _descend(sample: _Sample, prices: Floats, sharpness: float, most: int = 15) -> Floats:
    """Newton's method on the smoothed bound.

    No price is below 0, nor above the number of steps: a node more in one step brings no job more
    progress than that, and huge prices would lose the bound in rounding.
    """
    most_price = float(sample.steps)
    value, slope, bend = sample.smoothed(prices, sharpness)
    for _ in range(most):
        move: Bools = ((prices > 0) | (slope < 0)) & ((prices < most_price) | (slope > 0))
        if not move.any():
            break
        inner = bend[np.ix_(move, move)]
        inner = inner + np.eye(len(inner)) * (1e-9 * np.trace(inner) + 1e-300)
        step = np.zeros_like(prices)
        step[move] = -np.linalg.solve(inner, slope[move])
        if -float(slope @ step) < 1e-6 * abs(value):
            break
        length = 1.0
        while length > 1e-3:
            tried = np.clip(prices + length * step, 0.0, most_price)
            found = sample.smoothed(tried, sharpness)
            if found[0] < value:
                break
            length /= 4
        else:
            break
        prices, (value, slope, bend) = tried, found
    return prices


class _Sample:
    """Jobs that stand for all, and the bound as a smooth function of the prices."""

    def __init__(self, columns: Columns) -> None:
        self.steps = columns.steps
        self.parts: list[tuple[_Options, Bools]] = []
        """Jobs with the same sizes, and which of them are not done within the horizon whatever they take."""
        every = max(1.0, len(columns) / SAMPLE)
        # counted over all kinds, so that a rare kind is sometimes taken and never all of them are missed
        places: Ints = np.unique((np.arange(0.5, len(columns) / every) * every).astype(np.int64))
        self.count = begin = 0
        for sizes, rows in columns.alike:
            rank = rows[np.argsort(columns.gain[rows, 1], kind="stable")]
            take = places[(places >= begin) & (places < begin + len(rows))] - begin
            begin += len(rows)
            if not len(take):
                continue
            options = _options(columns, sizes, rank[take])
            self.parts.append((options, options.gain.max(axis=1) * self.steps <= 1.0))
            self.count += len(take)
        self.nodes = columns.nodes * self.count / len(columns)

    def scale(self, prices: Floats) -> float:
        """What the nodes of one job cost on average."""
        return max(float(prices.sum()) * self.nodes / self.count, 1e-9)

    def first_prices(self) -> Floats:
        """Prices that fall evenly over the horizon, at the level at which not too many nodes are wanted."""
        shape = np.arange(self.steps, 0, -1, dtype=np.float64)
        gains = [part.gain / np.maximum(part.size, 1e-9) for part, _ in self.parts]
        low, high = 0.0, max(float(gain.max()) for gain in gains)
        for _ in range(30):
            middle = (low + high) / 2
            if self._wanted(middle * shape) > self.nodes * self.steps:
                low = middle
            else:
                high = middle
        return np.minimum(high * shape, float(self.steps))

    def _wanted(self, prices: Floats) -> float:
        """Nodes over all steps that the jobs want, as if progress did not stop."""
        total = 0.0
        for part, _ in self.parts:
            _, course = part.alone(prices, np.ones(len(part.gain)))
            total += float(part.size[course].sum())
        return total

    def bound(self, prices: Floats) -> float:
        """The exact bound for the sample."""
        total = self.nodes * float(prices.sum())
        for part, long in self.parts:
            ones = np.ones(len(part.gain))
            total += float(part.some(np.flatnonzero(long)).alone(prices, ones[long])[0].sum())
            for at in part.blocks(np.flatnonzero(~long)):
                total += float(part.some(at).courses(prices, ones[at]).max(axis=1).sum())
        return total

    def smoothed(self, prices: Floats, sharpness: float) -> tuple[float, Floats, Floats]:
        """Value, gradient and curvature of the smoothed bound."""
        value = self.nodes * float(prices.sum())
        slope = np.full(self.steps, self.nodes)
        bend = np.zeros((self.steps, self.steps))
        for part, long in self.parts:
            sums = [_soften_steps(part.some(np.flatnonzero(long)), prices, sharpness)] if long.any() else []
            sums += [_soften_courses(part.some(at), prices, sharpness) for at in part.blocks(np.flatnonzero(~long))]
            for gained, used, spread in sums:
                value += gained
                slope -= used
                bend += sharpness * spread
        return value, slope, bend


def _soft_choice(gains: Floats, sharpness: float) -> tuple[Floats, float]:
    """How much of each choice along the last axis is taken, the better the more, and what all of it gains."""
    net = sharpness * gains
    top = net.max(axis=-1, keepdims=True)
    weight = np.exp(net - top)
    total = weight.sum(axis=-1, keepdims=True)
    gained = float((top + np.log(total)).sum()) / sharpness
    weight /= total
    return weight, gained


def _soften_steps(part: _Options, prices: Floats, sharpness: float) -> tuple[float, Floats, Floats]:
    """Gain, nodes used in each step and their covariance for jobs whose steps do not depend on each other."""
    weight, gained = _soft_choice(part.by_step(prices, np.ones(len(part.gain))), sharpness)
    used = weight @ part.size
    spread = (weight @ part.size**2 - used**2).sum(axis=0)
    return gained, used.sum(axis=0), np.diag(spread)


def _soften_courses(part: _Options, prices: Floats, sharpness: float) -> tuple[float, Floats, Floats]:
    """The same for jobs whose work may end within the horizon."""
    weight, gained = _soft_choice(part.courses(prices, np.ones(len(part.gain))), sharpness)
    size = part.size[part.decode(np.arange(weight.shape[1]))]
    used = weight @ size
    spread = size.T @ (weight.sum(axis=0)[:, None] * size) - used.T @ used
    return gained, used.sum(axis=0), spread
