"""Where the workers of one generation meet: small words exchanged through shared memory.

Every worker has a *post*: a page it writes and the others read. To meet, a worker counts its own post up and waits
until all posts have reached that count. Posts outlive their writers, which makes the end of a worker easy to reason
about: a meeting takes place if and only if every member, dead or alive, has posted it. So all survivors of a crash have
passed exactly the same meetings, without asking anybody.

Members on other hosts see a mirror of a post, and may have seen less of a lost worker than others have. There the
survivors first make sure that they all know the same of it (`seals.py`), then judge in the same way.
"""

import contextlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence

from concertina.core.errors import ConcertinaError
from concertina.runtime import segments
from concertina.runtime.seals import judge
from concertina.runtime.segments import Segment

LIMIT_SECONDS = 1800.0  # as long as DDP: one worker may evaluate for long while the others wait
WORDS = 4096  # of one exchange
MAIL = 1 << 16  # bytes of one message

MEMBERS = 256  # of one generation, at most
KEPT = 2  # segments of a member that outlive it for the others: its post and its desk

_COUNT, _STOPPED, _HEAD = 0, 1, 8  # words of a post: meetings reached, comes to no more, first word of the exchange
_SEALS = _HEAD + 2 * WORDS  # by rank: sealed, meetings seen, and where to find our copies of what is kept of it
_SEAL_WORDS = 2 + KEPT
_MAIL_AT = 8 * (_SEALS + _SEAL_WORDS * MEMBERS)
POST_BYTES = _MAIL_AT + 2 * MAIL


class PeersLost(ConcertinaError):
    """A worker of this generation is gone and the meeting it was needed for will never take place.

    Without a name: this generation cannot go on, and nobody has said why.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        super().__init__(f"worker {', '.join(map(str, workers))} is gone" if workers else "the workers must begin anew")
        self.workers = tuple(workers)


Opener = Callable[[int, str], Segment]  # a member's memory, by its address; PeersLost if there will be none


def open_now(member: int, address: str) -> Segment:
    try:
        return Segment.open(address)
    except OSError:
        raise PeersLost([member]) from None


class Post:
    """One worker's page for one generation."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = memoryview(segment.memory).cast("q")

    @classmethod
    def create(cls) -> "Post":
        return cls(Segment.create(POST_BYTES))


class Fabric:
    """One worker's end of the meetings of one generation."""

    def __init__(self, generation: int, members: Sequence[int], own: int, posts: Sequence[Post]) -> None:
        if len(members) > MEMBERS:
            raise ConcertinaError(f"{len(members)} workers in one generation, at most {MEMBERS} can meet")
        self.generation = generation
        self.members = tuple(members)  # worker numbers, by rank
        self.rank = self.members.index(own)
        self.size = len(self.members)
        self._posts = tuple(posts)
        self._own = posts[self.rank]
        self._others = [(rank, post.words) for rank, post in enumerate(posts) if rank != self.rank]
        self._count = 0
        self._lost: frozenset[int] = frozenset()  # ranks
        self._given_up = False
        self.spans_hosts = any(not segments.is_here(post.segment.address) for post in posts)
        self._kept = [[post.segment] for post in posts]
        self._sealing = threading.Lock()
        self.on_loss: list[Callable[[], None]] = []  # what wakes a thread that waits outside of meetings
        self.waited = 0.0  # seconds spent waiting for others
        self.waits_since = 0.0  # when this worker began to wait for others; 0: it does not

    @classmethod
    def form(
        cls,
        generation: int,
        members: Sequence[int],
        own: int,
        post: Post,
        addresses: Sequence[str],
        opener: Opener = open_now,
    ) -> "Fabric":
        """Maps the others' posts; PeersLost if one of them is already gone."""
        posts = [
            post if member == own else Post(opener(member, address))
            for member, address in zip(members, addresses, strict=True)
        ]
        return cls(generation, members, own, posts)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Whatever happens in here needs the others."""
        before, self.waits_since = self.waits_since, self.waits_since or time.monotonic()
        try:
            yield
        finally:
            self.waits_since = before

    def lose(self, workers: Sequence[int]) -> None:
        """Called by another thread: these workers have ended and will post nothing more."""
        gone = {rank for rank, member in enumerate(self.members) if member in workers}
        with self._sealing:
            new = gone - self._lost
            self._lost = self._lost | gone
        if self.spans_hosts:
            self._seal(new)
        if gone:
            for notify in self.on_loss:
                notify()

    def keep(self, member: int, segment: Segment) -> None:
        """What the others need of this member should it be lost: no survivor shall have less of it than another."""
        self._kept[self.members.index(member)].append(segment)

    def stop(self) -> None:
        """This worker has noticed a loss and comes to no further meeting of this generation."""
        self._own.words[_STOPPED] = 1
        self._own.segment.push(8 * _STOPPED, 8)

    def give_up(self) -> None:
        """Called by another thread: this generation will never be."""
        self._given_up = True

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(self.members[rank] for rank in sorted(self._lost))

    @property
    def others_stopped(self) -> bool:
        """Whether one of the others comes to no further meeting of this generation."""
        return any(words[_STOPPED] for _, words in self._others)

    @property
    def met(self) -> int:
        """Meetings that this worker has come to."""
        return self._count

    def meet(self) -> None:
        """Returns when every member has called it as often as this one."""
        self._count += 1
        self._own.words[_COUNT] = self._count
        self._own.segment.push(8 * _COUNT, 8)
        self._wait()

    def _wait(self) -> None:
        for _, words in self._others:
            for _ in range(64):
                if words[_COUNT] >= self._count:
                    break
                os.sched_yield()
            else:
                self._wait_long()
                return

    def _wait_long(self) -> None:
        count, began = self._count, time.monotonic()
        try:
            with self.waiting():
                for rank, words in self._others:
                    while words[_COUNT] < count:
                        self._check_lost(count)
                        waited = time.monotonic() - began
                        if waited > LIMIT_SECONDS:
                            raise ConcertinaError(
                                f"worker {self.members[rank]} did not come to meeting {count} "
                                f"within {LIMIT_SECONDS:.0f} s"
                            )
                        time.sleep(min(max(2e-5, waited / 8), 2e-4))
        finally:
            self.waited += time.monotonic() - began

    def _check_lost(self, count: int) -> None:
        """Whoever is gone and has not posted this meeting never will; the others must not wait for each other then.

        Asked of the lost alone: their posts stand still, so that all survivors come to the same answer.
        """
        if self.spans_hosts:
            self._judge(count)
            return
        lost = self._lost
        missing = [self.members[rank] for rank in lost if self._posts[rank].words[_COUNT] < count]
        missing += [self.members[rank] for rank, words in self._others if words[_STOPPED] and words[_COUNT] < count]
        if missing or self._given_up:
            raise PeersLost(missing)

    # -- losses where members are on several hosts -------------------------------------------------------------------

    def _seal(self, ranks: Collection[int]) -> None:
        """Takes nothing more from these, and tells the others how much of them is here and where."""
        own = self._own
        for rank in sorted(ranks):
            for segment in self._kept[rank]:
                segment.seal()
            places = [segment.offer() for segment in self._kept[rank][:KEPT]]
            with self._sealing:
                at = _SEALS + _SEAL_WORDS * rank
                for k, number in enumerate(places):
                    own.words[at + 2 + k] = number
                own.words[at + 1] = self._posts[rank].words[_COUNT]
                own.words[at] = 1
            own.segment.push(8 * at, 8 * _SEAL_WORDS)

    def _judge(self, count: int) -> None:
        words = [post.words for post in self._posts]
        seals = [
            {x: w[at + 1] for x in self._lost if w[at := _SEALS + _SEAL_WORDS * x]}  # what each has said
            for w in words
        ]
        counts = [w[_COUNT] for w in words]
        stopped = {rank for rank, w in enumerate(words) if w[_STOPPED] and rank != self.rank}
        verdict = judge(count, self._lost, counts, stopped, seals)
        if verdict.missing or self._given_up:
            raise PeersLost([self.members[rank] for rank in verdict.missing])
        if verdict.fetch is not None:
            self._take_over(*verdict.fetch)

    def _take_over(self, lost: int, holder: int) -> None:
        """What `holder` has seen of a lost worker and we have not."""
        at = _SEALS + _SEAL_WORDS * lost
        numbers = [self._posts[holder].words[at + 2 + k] for k in range(KEPT)]
        try:
            found = [self._posts[holder].segment.another(number) for number in numbers if number]
        except OSError:
            time.sleep(0.05)  # it is gone, too; the master will say so
            return
        with self._sealing:
            if holder in self._lost:
                return  # others may have judged without it already
            for segment, theirs in zip(self._kept[lost], found, strict=False):
                segment.take_over(theirs)
            self._own.words[at + 1] = self._posts[lost].words[_COUNT]
        self._own.segment.push(8 * at, 8 * _SEAL_WORDS)

    # -- words -------------------------------------------------------------------------------------------------------

    def wait_for(self, member: int, there: Callable[[], bool]) -> None:
        """Waits for something that `member` does outside of meetings."""
        with self.waiting():
            self._wait_for(member, there)

    def _wait_for(self, member: int, there: Callable[[], bool]) -> None:
        rank, began = self.members.index(member), time.monotonic()
        while not there():
            if rank in self._lost or self._posts[rank].words[_STOPPED] or self._given_up:
                if there():
                    return
                raise PeersLost([member])
            if time.monotonic() - began > LIMIT_SECONDS:
                raise ConcertinaError(f"worker {member} stood still for {LIMIT_SECONDS:.0f} s")
            time.sleep(2e-5)

    def exchange(self, words: Sequence[int]) -> list[list[int]]:
        """Everybody's words, by rank; all must bring equally many."""
        n = len(words)
        if n > WORDS:
            raise ValueError(f"{n} words in one exchange, at most {WORDS} fit")
        at = _HEAD + WORDS * ((self._count + 1) % 2)  # two places in turn: nobody is two meetings ahead
        self._own.words[at : at + n] = array("q", words)
        self._own.segment.push(8 * at, 8 * n)
        self.meet()
        return [post.words[at : at + n].tolist() for post in self._posts]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, by rank, in as many meetings as the longest needs."""
        lengths = [length for (length,) in self.exchange([len(payload)])]
        parts = [bytearray() for _ in lengths]
        for at in range(0, max(lengths), MAIL):
            place = _MAIL_AT + MAIL * ((self._count + 1) % 2)
            piece = payload[at : at + MAIL]
            self._own.segment.memory[place : place + len(piece)] = piece
            self._own.segment.push(place, len(piece))
            self.meet()
            for part, post, length in zip(parts, self._posts, lengths, strict=True):
                part += post.segment.memory[place : place + max(0, min(MAIL, length - at))]
        return [bytes(part) for part in parts]

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._own.segment.hide()
