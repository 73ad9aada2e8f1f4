"""Synthetic traces with the statistics of real clusters, the same for the same seed on every machine.

`synthetic:jobs=500,seed=1,load=0.8` is a trace name like any other. Where the figures come from:

- `like=philly`: Microsoft Philly, 82,247 jobs of 2017 (Jeon et al., ATC 2019, in the list published with
  petuum/adaptdl). Sizes and quantiles of the durations by size were counted there.
- `like=itp`: eight Microsoft ITP clusters, 55,206 jobs (Gu et al., ElasticFlow, ASPLOS 2023, in the list
  published as microsoft/elasticflow-traces). Counted likewise.
- `like=modelarts`: Huawei ModelArts, 447 jobs of 5 minutes or more with a mean of 232.6 minutes (the MILP
  allocator, section 5.1). The paper gives no distribution: it is log-normal here, with sizes that halve in
  number as they double.
- Deadlines: tightness x duration after the submission, the tightness uniform in 0.5-1.5 (ElasticFlow,
  section 6.1).
- `arrivals=diurnal`: 40 % above and below the mean over the day (ITP: busiest hour 1.45, quietest 0.63 times
  the mean), and half as many on Saturdays and Sundays (Philly: 0.60 against 1.16 on working days).

Chance is one `random.Random`, and only its `random()` is used, whose values Python keeps between versions.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from statistics import NormalDist
from typing import TypedDict

from concertina.core.job import JobSpec
from concertina.simulator.readers.problems import TraceError
from concertina.simulator.readers.trace import Trace

PREFIX = "synthetic:"
_DAY = 86_400.0
_ARRIVALS = ("poisson", "diurnal")
_DAILY_SWING = 0.4
_WEEKEND = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Quantiles of the duration in seconds; between them the logarithm is interpolated."""

    shares: tuple[float, ...] = (0.0, 0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
    seconds: tuple[float, ...]

    def at(self, share: float) -> float:
        """The duration that `share` of the jobs do not exceed."""
        i = min(max(bisect_right(self.shares, share), 1), len(self.shares) - 1)
        x0, x1 = self.shares[i - 1], self.shares[i]
        y0, y1 = math.log(self.seconds[i - 1]), math.log(self.seconds[i])
        return math.exp(y0 + (y1 - y0) * (share - x0) / (x1 - x0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Sizes and durations of one cluster's jobs."""

    about: str
    sizes: Mapping[int, float]
    """Devices -> share of the jobs."""
    durations: Callable[[int, float], float]
    """(devices, a number in 0-1) -> seconds."""


def _by_size(classes: Sequence[tuple[int, Durations]]) -> Callable[[int, float], float]:
    """The class of a job is the first whose limit is not below its size."""
    limits = [limit for limit, _ in classes]

    def duration(gpus: int, share: float) -> float:
        return classes[min(bisect_left(limits, gpus), len(limits) - 1)][1].at(share)

    return duration


def _modelarts(_gpus: int, share: float) -> float:
    """Log-normal, cut at 5 minutes below, with a mean of 232.6 minutes."""
    normal = NormalDist(mu=8.628, sigma=1.35)
    floor = normal.cdf(math.log(300))
    return math.exp(normal.inv_cdf(min(floor + share * (1 - floor), 0.9999)))


FAMILIES: dict[str, Family] = {
    "philly": Family(
        about="Microsoft Philly 2017 (ATC 2019)",
        sizes={1: 0.9317, 2: 0.0221, 4: 0.0227, 8: 0.0200, 16: 0.0025, 32: 0.0009, 64: 0.0001},
        durations=_by_size(
            (
                (1, Durations(seconds=(20, 52, 122, 1_117, 2_716, 8_512, 19_137, 135_399, 1_000_000))),
                (4, Durations(seconds=(5, 11, 21, 367, 45_388, 166_120, 233_082, 747_317, 2_000_000))),
                (
                    8,
                    Durations(seconds=(20, 125, 1_876, 23_683, 173_248, 351_982, 525_618, 1_060_498, 1_600_000)),
                ),
                (
                    128,
                    Durations(seconds=(10, 35, 566, 21_137, 104_218, 247_972, 443_240, 922_629, 1_000_000)),
                ),
            )
        ),
    ),
    "itp": Family(
        about="Microsoft ITP (ElasticFlow, ASPLOS 2023)",
        sizes={1: 0.8248, 2: 0.0253, 4: 0.0429, 8: 0.0948, 16: 0.0052, 32: 0.0060, 64: 0.0010},
        durations=_by_size(
            (
                (1, Durations(seconds=(600, 921, 2_896, 7_722, 14_395, 25_405, 34_073, 100_767, 600_000))),
                (4, Durations(seconds=(600, 807, 2_950, 4_540, 17_690, 76_146, 152_016, 654_703, 1_000_000))),
                (
                    8,
                    Durations(seconds=(600, 1_292, 9_451, 21_948, 62_248, 150_793, 251_594, 541_777, 1_200_000)),
                ),
                (
                    64,
                    Durations(seconds=(600, 771, 3_381, 45_402, 111_270, 210_993, 303_926, 541_697, 700_000)),
                ),
            )
        ),
    ),
    "modelarts": Family(
        about="Huawei ModelArts 2021 (MILP allocator)",
        sizes={1: 16 / 31, 2: 8 / 31, 4: 4 / 31, 8: 2 / 31, 16: 1 / 31},
        durations=_modelarts,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to generate. The names are those of the command line."""

    jobs: int = 500
    seed: int = 0
    load: float = 0.8
    """Device-seconds asked for over device-seconds there are, from the first to the last arrival."""
    gpus: int = 128
    """Devices of the cluster that `load` refers to; jobs that are larger are not drawn."""
    like: str = "itp"
    arrivals: str = "diurnal"
    deadlines: float = 0.7
    """Share of the jobs that have a deadline; the rest is best effort."""
    soft: float = 0.0
    """Share of the deadlines that are soft."""
    tight: float = 0.5
    loose: float = 1.5
    """Bounds of the deadline over the duration."""
    users: int = 4
    """Teams; the second submits half as much as the first, the third a third, and so on."""

    def __post_init__(self) -> None:
        for key, needed, right in (
            ("jobs", "1 or more", self.jobs >= 1),
            ("load", "more than 0", self.load > 0),
            ("gpus", "1 or more", self.gpus >= 1),
            ("like", f"one of {', '.join(FAMILIES)}", self.like in FAMILIES),
            ("arrivals", f"one of {', '.join(_ARRIVALS)}", self.arrivals in _ARRIVALS),
            ("deadlines", "0 to 1", 0 <= self.deadlines <= 1),
            ("soft", "0 to 1", 0 <= self.soft <= 1),
            ("tight", "0 or more", self.tight >= 0),
            ("loose", "at least tight", self.loose >= self.tight),
            ("users", "1 or more", self.users >= 1),
        ):
            if not right:
                raise TraceError(source=PREFIX, seen=f"{key}={getattr(self, key)}", needed=needed)


def parse_recipe(name: str) -> Recipe:
    """Read `synthetic:key=value,...`."""
    kinds = {field.name: str(field.type) for field in fields(Recipe)}
    given: dict[str, int | float | str] = {}
    for part in filter(None, name.removeprefix(PREFIX).split(",")):
        key, _, text = (piece.strip() for piece in part.partition("="))
        if key not in kinds:
            raise TraceError(source=name, seen=f"{key!r}", needed=f"key=value with one of {', '.join(kinds)}")
        given[key] = _value(name, key, text, kinds[key])
    return Recipe(**given)  # type: ignore[arg-type]


def _value(name: str, key: str, text: str, kind: str) -> int | float | str:
    if kind == "str":
        return text
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError:
        needed = "a whole number" if kind == "int" else "a number"
        raise TraceError(source=name, seen=f"{key}={text}", needed=needed) from None
    if not math.isfinite(value):
        raise TraceError(source=name, seen=f"{key}={text}", needed="a finite number")
    return value


def generate(recipe: Recipe) -> tuple[JobSpec, ...]:
    """The jobs, in order of arrival."""
    rng = random.Random(recipe.seed)
    family = FAMILIES[recipe.like]
    sizes = {n: share for n, share in family.sizes.items() if n <= recipe.gpus}
    asked = [_draw(sizes, rng.random()) for _ in range(recipe.jobs)]
    lasting = [round(family.durations(gpus, rng.random()), 3) for gpus in asked]
    device_s = math.fsum(gpus * seconds for gpus, seconds in zip(asked, lasting, strict=True))
    span = device_s / (recipe.load * recipe.gpus)
    times = sorted(_arrivals(recipe, span, rng))
    teams = {team: 1.0 / (team + 1) for team in range(recipe.users)}
    return tuple(
        JobSpec(
            id=f"job-{i}",
            submit_s=times[i],
            gpus=asked[i],
            user=f"team-{_draw(teams, rng.random())}",
            duration_s=lasting[i],
            **_deadline(recipe, times[i], lasting[i], rng),
        )
        for i in range(recipe.jobs)
    )


class _Deadline(TypedDict):
    deadline_s: float | None
    soft: bool


def _draw(shares: Mapping[int, float], chance: float) -> int:
    """The key on which `chance` falls when the shares are laid side by side."""
    ends = list(accumulate(shares.values()))
    return list(shares)[min(bisect_right(ends, chance * ends[-1]), len(ends) - 1)]


def _deadline(recipe: Recipe, submit: float, duration: float, rng: random.Random) -> _Deadline:
    has, soft, where = rng.random(), rng.random(), rng.random()
    if has >= recipe.deadlines:
        return {"deadline_s": None, "soft": False}
    tightness = recipe.tight + (recipe.loose - recipe.tight) * where
    return {"deadline_s": round(submit + tightness * duration, 3), "soft": soft < recipe.soft}


def _arrivals(recipe: Recipe, span: float, rng: random.Random) -> Iterator[float]:
    """`jobs` arrivals in `span` seconds from Monday, 0:00.

    Given their number, the arrivals of a Poisson process are independent draws in proportion to its rate;
    so the load comes out as asked, and a rate that changes over the day needs no more than a draw that is
    refused.
    """
    left = recipe.jobs
    while left:
        at = rng.random() * span
        if recipe.arrivals == "diurnal" and rng.random() * (1 + _DAILY_SWING) > _rate(at):
            continue
        left -= 1
        yield round(at, 3)


def _rate(at: float) -> float:
    """Arrivals relative to the mean of a working day; busiest at 14 h."""
    hour_angle = 2 * math.pi * (at % _DAY - 14 / 24 * _DAY) / _DAY
    return (1 + _DAILY_SWING * math.cos(hour_angle)) * (_WEEKEND if at // _DAY % 7 >= 5 else 1.0)


def synthetic_trace(name: str) -> Trace:
    """The trace of a name that begins with `synthetic:`."""
    recipe = parse_recipe(name)
    jobs = generate(recipe)
    slots = 8 if recipe.gpus % 8 == 0 else 1
    return Trace(
        name=name,
        format="synthetic",
        jobs=jobs,
        rows=tuple(range(1, len(jobs) + 1)),
        gpus_column="gpus",
        cluster=f"{recipe.gpus // slots}x{slots}",
    )
