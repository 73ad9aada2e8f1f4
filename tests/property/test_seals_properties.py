"""Whatever is lost and however late words arrive: all survivors have passed the same meetings, and none waits for ever.

A model of members that post, see each other's posts late, and are told of losses one by one. Workers that are taken for
lost may live on for a while, as behind a cut link. What each member concludes is the real code's.
"""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.runtime.seals import judge

MEETINGS = 6


@dataclass
class Page:
    """A post as somebody sees it."""

    count: int = 0
    stopped: bool = False
    seals: dict[int, int] = field(default_factory=dict)


@dataclass
class Member:
    rank: int
    pages: list[Page]
    read: list[int]  # of every other's changes, how many have arrived
    changes: list[tuple[str, int, int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    passed: int = 0
    over: bool = False  # has given up, or come to its end
    fetched: tuple[int, int, int] | None = None  # lost, holder, count: on its way
    alive: bool = True

    @property
    def own(self) -> Page:
        return self.pages[self.rank]

    def change(self, what: str, a: int = 0, b: int = 0) -> None:
        apply(self.own, what, a, b)
        self.changes.append((what, a, b))


def apply(page: Page, what: str, a: int, b: int) -> None:
    if what == "count":
        page.count = a
    elif what == "stop":
        page.stopped = True
    else:
        page.seals[a] = b


class Job:
    def __init__(self, size: int) -> None:
        self.members = [Member(r, [Page() for _ in range(size)], [0] * size) for r in range(size)]
        self.taken_for_lost: list[int] = []

    def deliver(self, reader: int, owner: int) -> None:
        """The next change, unless the reader takes nothing more from its maker."""
        m, o = self.members[reader], self.members[owner]
        if owner in m.lost or reader == owner or m.read[owner] >= len(o.changes):
            return
        apply(m.pages[owner], *o.changes[m.read[owner]])
        m.read[owner] += 1

    def tell(self, reader: int) -> None:
        """The master's news, in the link's thread: at any moment, also while something is being fetched."""
        m = self.members[reader]
        for x in self.taken_for_lost:
            if x not in m.lost:
                m.lost.add(x)
                m.change("seal", x, m.pages[x].count)
                return

    def act(self, rank: int) -> None:
        m = self.members[rank]
        if not m.alive or m.over:
            return
        if m.own.count == m.passed:
            if m.passed == MEETINGS:
                m.over = True
                return
            m.change("count", m.passed + 1)
            return
        if m.fetched is not None:
            self._complete(m, *m.fetched)
            m.fetched = None
            return
        if all(page.count >= m.own.count for page in m.pages):
            m.passed = m.own.count
            return
        counts = [page.count for page in m.pages]
        stopped = {r for r, page in enumerate(m.pages) if page.stopped and r != rank}
        verdict = judge(m.own.count, m.lost, counts, stopped, [page.seals for page in m.pages])
        if verdict.missing:
            m.over = True
            m.change("stop")
        elif verdict.fetch is not None:
            lost, holder = verdict.fetch
            if self.members[holder].alive:
                m.fetched = (lost, holder, self.members[holder].pages[lost].count)

    def _complete(self, m: Member, lost: int, holder: int, count: int) -> None:
        if holder not in m.lost and count > m.pages[lost].count:
            m.pages[lost].count = count
            m.change("seal", lost, count)

    def survivors(self) -> list[Member]:
        return [m for m in self.members if m.rank not in self.taken_for_lost]

    def settle(self) -> None:
        """Everything arrives, everybody hears everything, until nothing happens any more."""
        for _ in range(200):
            for m in self.survivors():
                for owner in range(len(self.members)):
                    while owner not in m.lost and owner != m.rank and m.read[owner] < len(self.members[owner].changes):
                        self.deliver(m.rank, owner)
                self.tell(m.rank)
                self.act(m.rank)
            if all(m.over for m in self.survivors()):
                return


@settings(max_examples=400, deadline=None)
@given(size=st.integers(2, 5), seed=st.integers(0, 2**32), losses=st.integers(0, 3), hurry=st.integers(1, 6))
def test_survivors_have_passed_the_same_meetings(size: int, seed: int, losses: int, hurry: int) -> None:
    rng, job = Random(seed), Job(size)
    left = min(losses, size - 1)
    for _ in range(rng.randrange(40, 200)):
        what = rng.random()
        if what < 0.03 and left:
            left -= 1
            victim = rng.choice([m.rank for m in job.survivors()])
            job.members[victim].alive = rng.random() < 0.4  # behind a cut link, say
            job.taken_for_lost.append(victim)
        elif what < 0.10:
            job.tell(rng.randrange(size))
        elif what < 0.10 + 0.1 * hurry:
            job.deliver(rng.randrange(size), rng.randrange(size))
        else:
            job.act(rng.randrange(size))
    job.settle()
    survivors = job.survivors()
    assert len({m.passed for m in survivors}) == 1, [(m.rank, m.passed) for m in survivors]
    assert all(m.over for m in survivors), "somebody waits for ever"


def test_what_is_fetched_from_a_worker_that_is_lost_meanwhile_is_not_used() -> None:
    """Others may have judged without that worker already."""
    a, b, c, x = 0, 1, 2, 3
    job = Job(4)
    for rank in range(4):
        job.act(rank)
    for reader, owner in ((a, b), (a, c), (b, a), (b, c), (c, x)):
        job.deliver(reader, owner)
    job.taken_for_lost = [x]
    for rank in (a, b, c):
        job.tell(rank)
    for reader, owner in ((b, a), (b, c)):
        job.deliver(reader, owner)
    job.act(b)
    assert job.members[b].fetched == (x, c, 1)
    job.taken_for_lost = [x, c]
    for rank in (a, b):
        job.tell(rank)
    job.settle()
    assert [m.passed for m in job.survivors()] == [0, 0]
