"""Workers made of plain data, for trying the master's machine: they arrive, build, meet, change over, stop and die.

They follow `runtime/membership.py`, `elastic.py` and `fabric.py` in what they say and wait for, and never give up
waiting: a wait that nobody ends is a deadlock that the test sees. One call of `act` is one small step of one worker.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from concertina.core.formation import Formation
from concertina.core.messages import EXIT_LEFT, EXIT_OK
from concertina.master import machine_types as t


@dataclass
class Page:
    """A post: what others can read of a worker in one generation, also after its end."""

    count: int = 0
    votes: dict[int, int] = field(default_factory=dict)
    stopped: bool = False


@dataclass
class Memory:
    """What workers share."""

    pages: dict[tuple[int, int], Page] = field(default_factory=dict)  # (generation, worker)
    builds: dict[int, set[int]] = field(default_factory=dict)  # generation -> who has come to build it
    left: dict[int, set[int]] = field(default_factory=dict)  # generation -> who has given up building it
    announced: dict[tuple[int, int], int] = field(default_factory=dict)  # (worker, generation) -> step
    final: dict[int, int] = field(default_factory=dict)  # worker -> newest step whose contexts are as they stay
    dead: set[int] = field(default_factory=set)  # whose pages can no longer be opened
    committed: dict[int, int] = field(default_factory=dict)  # step -> the generation it was made in
    cut: set[frozenset[int]] = field(default_factory=set)  # pairs of workers that cannot reach each other

    def page(self, generation: int, worker: int) -> Page:
        return self.pages.setdefault((generation, worker), Page())


class ModelWorker:
    """One process."""

    def __init__(self, memory: Memory, start: t.StartWorker, steps: int, minimum: int) -> None:
        self.memory, self.number, self.steps, self.minimum = memory, start.worker, steps, minimum
        self.inbox: deque[t.Command] = deque()  # from the master
        self.outbox: deque[t.Event] = deque()  # to the master
        self.exit: int | None = None
        self.reported = False
        self.first = bool(start.members)
        self.hold_at = start.hold_at
        self.released = -1
        self.step = 0
        self.posts = 0
        self.doing = "arrive"
        self.now: Formation | None = None  # trains in
        self.before: Formation | None = None  # trained in, while contexts are fetched
        self.at_once: Formation | None = None
        self.wanted: Formation | None = None
        self.built = 0
        self.queue: list[Formation] = []  # of the builder
        self.building: Formation | None = None
        self.armed = 0
        self.lost: set[int] = set()
        self.dropped: list[int] = []
        self.abandoned: set[int] = set()
        self.synced = 0
        self.dismissed = False
        self.count = 0
        self.seen: dict[tuple[int, int], Page] = {}  # of those that are cut off from here: how it was before

    def reaches(self, others: Iterable[int]) -> bool:
        """All of these but the lost, whose pages change no more and are taken from whoever has them."""
        return not any(frozenset((self.number, n)) in self.memory.cut for n in others if n not in self.lost)

    def view(self, generation: int, worker: int) -> Page:
        """Its page, as it is seen from here."""
        page, key = self.memory.page(generation, worker), (generation, worker)
        if self.reaches((worker,)):
            self.seen.pop(key, None)
            return page
        return self.seen.setdefault(key, replace(page, votes=dict(page.votes)))

    # -- words of the master -----------------------------------------------------------------------------------------

    def hear(self, command: Any) -> None:
        if isinstance(command, t.Form):
            self._on_form(command)
        elif isinstance(command, t.Arm):
            self.armed = max(self.armed, command.generation)
        elif isinstance(command, t.Abandon):
            self.abandoned.add(command.generation)
            if self.wanted is not None and self.wanted.generation == command.generation:
                self._forget()
        elif isinstance(command, t.TellLost):
            self.lost |= set(command.lost)
            if self.wanted is not None and set(command.lost) & set(self.wanted.members):
                self.dropped.append(self.wanted.generation)
        elif isinstance(command, t.Release):
            self.hold_at, self.released = command.next_hold, command.generation
        elif isinstance(command, t.Dismiss):
            self.dismissed = True

    def _on_form(self, command: t.Form) -> None:
        formation = command.formation
        if self.number in formation.members:
            self._offer()
        if command.at_once:
            self.at_once = formation
            self._forget()
            return
        self.wanted, self.built = formation, 0
        if self.number in formation.members:
            self.queue.append(formation)

    def _forget(self) -> None:
        if self.wanted is not None:
            self.abandoned.add(self.wanted.generation)
        self.wanted, self.built = None, 0

    def _offer(self) -> None:
        self.posts += 1
        self.outbox.append(t.PostOffered(self.number, f"{self.number}/{self.posts}"))

    # -- what it can do now ------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """One small step of the training thread; False if it has to wait."""
        return bool(getattr(self, f"_{self.doing}")())

    def build(self) -> bool:
        """One small step of the builder thread."""
        if self.building is None:
            if not self.queue:
                return False
            formation = self.queue.pop(0)
            if self.memory.dead & set(formation.members):
                self.memory.left.setdefault(formation.generation, set()).add(self.number)
                return True
            if not self.reaches(formation.members) and formation.generation not in self.abandoned:
                self.queue.insert(0, formation)  # again and again
                return False
            self.building = formation
            self.memory.builds.setdefault(formation.generation, set()).add(self.number)
            return True
        formation = self.building
        came = self.memory.builds[formation.generation]
        gone = self.lost | self.memory.left.get(formation.generation, set())
        if formation.generation in self.abandoned or (gone & set(formation.members)) - came:
            self.memory.left.setdefault(formation.generation, set()).add(self.number)
            self.building = None
            return True
        if not came >= set(formation.members):
            return False
        self.building = None
        if self.wanted is not None and self.wanted.generation == formation.generation:
            self.built = formation.generation
            self.outbox.append(t.Built(self.number, formation.generation))
        return True

    def _end(self, code: int) -> bool:
        self.exit = code
        return True

    def _arrive(self) -> bool:
        self.outbox.append(t.WorkerArrived(self.number, f"{self.number}/0", f"desk {self.number}"))
        if not self.first:
            self.outbox.append(t.NewcomerReady(self.number))
        self.doing = "form" if self.first else "follow"
        return True

    def _form(self) -> bool:
        """Waits for a generation that is to be formed at once, and for all its members."""
        found = self.at_once
        if self.dismissed:
            return self._end(EXIT_LEFT)
        newest = self.now.generation if self.now is not None else -1
        if found is None or found.generation <= newest:
            return False
        if self.now is not None and self.memory.dead & set(found.members):
            self._fail_to_form(found)  # maybe before the master knows
            return True
        if not self.reaches(found.members):
            return False
        self.memory.builds.setdefault(found.generation, set()).add(self.number)
        self.doing = "forming"
        return True

    def _forming(self) -> bool:
        found = self.at_once
        assert found is not None
        came = self.memory.builds.setdefault(found.generation, set())
        if self.number not in came:  # told of a newer one in between
            came.add(self.number)
            return True
        if came >= set(found.members):
            self.at_once = None
            self.outbox.append(t.Built(self.number, found.generation))
            self._enter(found)
            return True
        if not (self.lost | self.memory.left.get(found.generation, set())) & set(found.members) - came:
            return False
        self._fail_to_form(found)
        return True

    def _fail_to_form(self, formation: Formation) -> None:
        self.at_once = None
        self.memory.left.setdefault(formation.generation, set()).add(self.number)
        if self.now is None:
            self.doing = "form"
        else:
            self._say_stopped()

    def _enter(self, formation: Formation) -> None:
        self.now = formation
        self.count = 0
        if formation.generation > self.released:
            self.hold_at = formation.next_hold
        self.doing = "post"

    def _say_stopped(self) -> None:
        assert self.now is not None
        self.memory.page(self.now.generation, self.number).stopped = True
        self.outbox.append(t.Stopped(self.number, self.now.generation, self.step))
        self.doing = "form"

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def vote(self) -> int:
        wanted = self.wanted
        if wanted is None or self.armed < wanted.generation or set(wanted.members) & self.lost:
            return 0
        if self.number in wanted.members and self.built != wanted.generation:
            return 0
        return wanted.generation if self.step + 1 >= wanted.hold_at else 0

    def _post(self) -> bool:
        """Comes to the meeting that makes the next step count, unless a planned change has to be waited for."""
        now = self.now
        assert now is not None
        if now.parked and self.dropped:
            self._confirm_dropped()
            return True
        planned = 1 if now.parked else self.hold_at
        hold_at = planned if self.wanted is None else self.wanted.hold_at
        doomed = self.wanted is not None and set(self.wanted.members) & self.lost
        holds = hold_at and self.step + 1 >= hold_at and not doomed and self.at_once is None
        if holds and not self.vote and not self.lost & set(now.members):
            return False
        page = self.memory.page(now.generation, self.number)
        self.count += 1
        page.votes[self.count] = self.vote
        page.count = self.count
        self.doing = "meet"
        return True

    def _meet(self) -> bool:
        now = self.now
        assert now is not None
        pages = {n: self.view(now.generation, n) for n in now.members}
        missing = {n for n, page in pages.items() if page.count < self.count}
        sealed = bool(missing & self.lost) and self.reaches(
            now.members
        )  # all others have said what they saw of the lost
        if sealed or any(pages[n].stopped for n in missing - self.lost):
            self._say_stopped()
            return True
        if missing:
            return False
        votes = {page.votes[self.count] for page in pages.values()}
        self.changes_to = next(iter(votes)) if len(votes) == 1 else 0
        self.step += 1
        made_in = self.memory.committed.setdefault(self.step, now.generation)
        assert made_in == now.generation, f"step {self.step} was made in generations {made_in} and {now.generation}"
        if len(now.members) < self.minimum:
            assert votes != {0}, "a step counted with too few workers, and nobody was about to change over"
        self.doing = "act_on"
        return True

    def _act_on(self) -> bool:
        """The step counts; its contexts are as they stay from here on."""
        self.memory.final[self.number] = self.step
        self.outbox.append(t.Progressed(self.number, self.step, 0.1))
        if self.step >= self.steps:
            return self._end(EXIT_OK)
        if self.changes_to:
            self.doing = "change_over"
            return True
        self._confirm_dropped()
        self.doing = "post"
        return True

    def _confirm_dropped(self) -> None:
        for generation in self.dropped:
            self.outbox.append(t.Dropped(self.number, generation))
        if self.wanted is not None and self.wanted.generation in self.dropped:
            self._forget()
        self.dropped = []

    def _change_over(self) -> bool:
        wanted = self.wanted
        assert wanted is not None
        assert wanted.generation == self.changes_to
        self.memory.announced[self.number, wanted.generation] = self.step
        self.dropped = [g for g in self.dropped if g != wanted.generation]
        if self.number not in wanted.members:
            self.outbox.append(t.Switched(self.number, wanted.generation, self.step))
            self.doing = "leave"
            return True
        self.before = self.now
        self._forget()
        self._enter(wanted)
        self.doing = "fetch"
        return True

    def _leave(self) -> bool:
        return self._end(EXIT_LEFT) if self.dismissed else False

    def _fetch(self) -> bool:
        """Contexts of virtual workers that come here, from those who had them. Then nobody else is needed."""
        now, before = self.now, self.before
        assert now is not None
        assert before is not None
        for v in now.placement.workers[now.members.index(self.number)]:
            owner = before.members[before.placement.host(v)]
            if not self.reaches((owner,)):
                return False
            if self.memory.final.get(owner, 0) < self.step:
                if owner not in self.lost:
                    return False
                self._say_stopped()
                return True
        self.outbox.append(t.Switched(self.number, now.generation, self.step))
        self.doing = "post"
        return True

    # -- a newcomer --------------------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        wanted = self.wanted
        if self.dismissed:
            return self._end(EXIT_LEFT)
        if wanted is None or self.number not in wanted.joiners:
            return False
        if self.synced != wanted.generation:
            self.synced = wanted.generation
            self.outbox.append(t.Synced(self.number, wanted.generation))
            return True
        main = wanted.sources[0][0]
        if not self.reaches((main,)):
            return False
        if (main, wanted.generation) not in self.memory.announced:
            return False
        self.source, self.coming = main, wanted
        self.doing = "come_in"
        return True

    def _come_in(self) -> bool:
        """Copies the rest of the state, which its source may not live to hand over."""
        formation = self.coming
        if self.dismissed or formation.generation in self.abandoned:
            return self._end(EXIT_LEFT)
        if self.source in self.lost:
            return self._end(1)
        if not self.reaches((self.source,)):
            return False
        if self.built != formation.generation:
            return False
        self.step = self.memory.announced[self.source, formation.generation]
        self.wanted = None
        self.built = 0
        self.dropped = []
        self._enter(formation)
        self.outbox.append(t.Switched(self.number, formation.generation, self.step))
        return True
