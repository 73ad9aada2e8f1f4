"""Jobs that may come, drawn from those that came lately: the last day again, begun at a random moment.

The past is replayed in one piece and not job by job, so that bursts, and what goes together with what, stay.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from concertina.core.job import JobSpec

MOST = 20_000
"""Jobs looked at for one run: a past of a moment must not become an endless future."""
FEWEST = 5
"""Jobs that make a past; fewer say nothing about how often one comes."""


def arrivals(
    past: Sequence[JobSpec], now: float, window_s: float, until: float, most: int, draw: random.Random
) -> tuple[JobSpec, ...]:
    """Jobs from `now` to `until`, like those of the `window_s` seconds before `now`.

    Where there are more than `most`, the largest stay: they take most of the devices, whatever their number.
    """
    lately = sorted((job for job in past if now - window_s < job.submit_s <= now), key=lambda job: job.submit_s)
    if len(lately) < FEWEST:
        return ()
    reaches = min(job.submit_s for job in past) <= now - window_s
    length = window_s if reaches else now - lately[0].submit_s
    if length <= 0:
        return ()
    come = list(islice(_again(lately, now, length, until, draw.random() * length), MOST))
    if len(come) > most:
        large = sorted(range(len(come)), key=lambda i: -_size(come[i][0]))[:most]
        come = [come[i] for i in sorted(large)]
    return tuple(_later(job, turn, submit) for job, turn, submit in come)


def _size(job: JobSpec) -> float:
    """Device-seconds, or what comes near."""
    return job.gpus * (job.duration_s if job.duration_s is not None else job.work or 0.0)


def _again(
    lately: list[JobSpec], now: float, length: float, until: float, phase: float
) -> Iterator[tuple[JobSpec, int, float]]:
    """(job, how often it has come again, when)"""
    begin = now - length
    first = next((i for i, job in enumerate(lately) if job.submit_s - begin > phase), len(lately))
    turn, at = 0, first
    while True:
        if at == len(lately):
            turn, at = turn + 1, 0
        job = lately[at]
        submit = now + turn * length + (job.submit_s - begin) - phase
        if submit > until:
            return
        yield job, turn, submit
        at += 1


def _later(job: JobSpec, turn: int, submit: float) -> JobSpec:
    deadline = None if job.deadline_s is None else job.deadline_s + submit - job.submit_s
    return replace(job, id=f"{job.id} again {turn}", submit_s=submit, deadline_s=deadline)
