"""Which jobs that have ended the cluster forgets: their records, and their folders. Pure.

The newest stay, as many as was said; older ones go, a few at a time. `concertina prune` asks for more to go. What
somebody may still need stays: a job whose submission may be sent again with its key, and what a user has received in
all, which quotas count.
"""

from collections.abc import Iterable
from dataclasses import replace

from concertina.cluster.records import JobState, Spent

KEEP = 1000  # jobs that have ended, the newest
AGAIN_SECONDS = 86_400.0  # after its end: so long a submission may come again, and must find its job
AT_ONCE = 3  # in one turn
REMEMBERED = 16  # jobs that were counted last, so that none counts twice after a crash


def forgettable(ended: Iterable[JobState], now: float, *, keep: int = 0, before_s: float = 0.0) -> list[str]:
    """Jobs beyond the newest `keep` (0: no limit), and those that ended before `before_s`; the oldest first."""
    found = sorted((state.ended_s if state.ended_s is not None else now, state.id) for state in ended)
    surplus = max(len(found) - keep, 0) if keep else 0
    return [
        job
        for number, (ended_s, job) in enumerate(found)
        if (number < surplus or ended_s < before_s) and ended_s <= now - AGAIN_SECONDS
    ]


def counted_in(spent: Spent | None, user: str, state: JobState) -> Spent:
    """What a user has received by jobs that are forgotten, with this one."""
    spent = spent or Spent(user=user)
    if state.id in spent.jobs:
        return spent
    jobs = (*spent.jobs, state.id)[-REMEMBERED:]
    return replace(spent, service_s=spent.service_s + state.service_s, jobs=jobs)
