"""Every job as ready-made JSON, made again only when one of its records has changed.

The mirror's thread says which jobs changed; whoever reads makes their JSON. Reading two thousand jobs is then a walk
over a list, and fifty clients that watch the same job share its bytes.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from concertina.cluster import keys
from concertina.cluster.mirror import Job, Mirror
from concertina.cluster.records import JobRequest
from concertina.core.job import JobPhase
from concertina.server.auth import Caller
from concertina.server.discretion import discreet_job
from concertina.server.views import encode, job_json
from concertina.store.protocol import Change

JOB_KEYS = (keys.REQUESTS, keys.STATES, keys.SEEN, keys.KEEPERS)
Place = tuple[float, str]  # when it was submitted, id


@dataclass(slots=True)
class Card:
    """A job and its JSON, made when it is first wanted."""

    job: Job
    requests: Mapping[str, JobRequest]  # of all jobs
    _brief: bytes = b""
    _for_owner: bytes = b""  # the same without the names of others' jobs

    def brief(self, caller: Caller) -> bytes:
        """For an admin, or for its owner."""
        if caller.admin:
            self._brief = self._brief or encode(job_json(self.job, brief=True))
            return self._brief
        if not self._for_owner:
            self._for_owner = encode(discreet_job(job_json(self.job, brief=True), caller, self.requests))
        return self._for_owner

    @property
    def place(self) -> Place:
        return self.job.request.submitted_s, self.job.id


class Board:
    """Follows a mirror that has been started. Readers may come from any thread."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._cards: dict[str, Card] = {}
        self._order: list[Place] = []
        mirror.listen(self._note)
        with self._lock:
            self._dirty |= {job.id for job in mirror.jobs()}

    def _note(self, change: Change) -> None:
        """From the mirror's thread."""
        if change.key.startswith(JOB_KEYS):
            with self._lock:
                self._dirty.add(keys.job_of(change.key))

    def card(self, job_id: str) -> Card | None:
        """As the mirror has it now, also if its thread has not come round to telling of the change."""
        with self._lock:
            self._renew(job_id)
            return self._cards.get(job_id)

    def jobs(self) -> list[Job]:
        """All of them."""
        with self._lock:
            self._renew_all()
            return [card.job for card in self._cards.values()]

    def page(
        self, wanted: Callable[[Job], bool] | None, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[Card], int, str | None]:
        """One page in order of submission, how many there are in all, and where the next page begins.

        `wanted` None: all are. Raises KeyError if there is no job `after`.
        """
        with self._lock:
            self._renew_all()
            places = self._order if wanted is None else self._wanted(wanted)
            begin = None if after is None else self._cards[after].place
            if newest_first:
                end = len(places) if begin is None else bisect_left(places, begin)
                chosen = places[max(0, end - limit - 1) : end][::-1]
            else:
                start = 0 if begin is None else bisect_right(places, begin)
                chosen = places[start : start + limit + 1]
            found = [self._cards[job_id] for _, job_id in chosen]
        more = len(found) > limit  # one beyond the page was taken to see that
        return found[:limit], len(places), found[limit - 1].job.id if more else None

    def _wanted(self, wanted: Callable[[Job], bool]) -> list[Place]:
        return [place for place in self._order if wanted(self._cards[place[1]].job)]

    def count(self) -> dict[JobPhase, int]:
        with self._lock:
            self._renew_all()
            counts = dict.fromkeys(JobPhase, 0)
            for card in self._cards.values():
                counts[card.job.state.phase] += 1
            return counts

    def _renew_all(self) -> None:
        for job_id in list(self._dirty):
            self._renew(job_id)

    def _renew(self, job_id: str) -> None:
        self._dirty.discard(job_id)  # first: a change that comes meanwhile is looked at again
        job, old = self._mirror.job(job_id), self._cards.get(job_id)
        if job is None:
            if old is not None:
                del self._cards[job_id]
                self._order.pop(bisect_left(self._order, old.place))
            return
        if old is not None and _same(old.job, job):
            return
        self._cards[job_id] = card = Card(job, self._mirror.requests)
        if old is None:
            insort(self._order, card.place)


def _same(one: Job, other: Job) -> bool:
    """Of the same records: the mirror makes new ones when something changes."""
    return (
        one.state is other.state
        and one.seen is other.seen
        and one.keeper is other.keeper
        and one.request is other.request
    )
