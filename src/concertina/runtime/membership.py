"""A worker's place among the others: the generation it trains in, and the one that is being built.

Three threads meet here. The link's thread hears the master; a builder thread builds what is to come while training
goes on; the training thread takes up what is ready, at a step that all members agree on. What is over is taken down by
a fourth, which has time.
"""

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from concertina.core.env import WorkerEnv
from concertina.core.errors import ConcertinaError
from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement
from concertina.master.link import MasterLink
from concertina.runtime.desk import Desk
from concertina.runtime.fabric import LIMIT_SECONDS, Fabric, PeersLost, Post
from concertina.runtime.interrupts import Left
from concertina.runtime.rendezvous import meet_in
from concertina.runtime.segments import Segment, Unreachable
from concertina.runtime.turn_clock import TurnClock
from concertina.runtime.unhurried import Unhurried
from concertina.runtime.wire import WireThread

LEAVE_SECONDS = 60.0  # a leaver stays this long for those who may still read from it
HOLD_SECONDS = LIMIT_SECONDS / 10  # that a planned change may keep everybody waiting until it is armed
AGAIN_SECONDS = 0.2  # between two tries to reach a member of a generation that is being built

T = TypeVar("T")


@dataclass(slots=True)
class Generation:
    """Everything that one generation's work needs, ready to be used."""

    formation: Formation
    fabric: Fabric
    desks: dict[int, Desk]  # by worker number
    reducer: Any = None
    buckets: Any = None  # the bucket layout that the reducer was made for
    introductions: list[bytes] = field(default_factory=list)  # by rank: what each said about itself
    kept: list[Any] = field(default_factory=list)  # what must go with it, and not before

    @property
    def placement(self) -> VirtualPlacement:
        return self.formation.placement

    @property
    def rank(self) -> int:
        return self.fabric.rank


# Builds a reducer for a generation; called by all its members, maybe beside training.
Furnish = Callable[[Generation], Any]


class Membership:
    """One worker's view of who it works with."""

    def __init__(self, env: WorkerEnv, desk: Desk, wire: WireThread | None = None) -> None:
        self.number = env.worker
        self._env = env
        self._desk = desk
        self._wire = wire  # where the job spans several hosts
        first = Post.create()
        self._posts = {first.segment.address: first}  # offered to the master, each for one generation
        self._changed = threading.Condition()
        self._at_once: Formation | None = None
        self._wanted: Formation | None = None  # being built in the background
        self.pending: Generation | None = None  # built and waiting for the vote
        self._armed = 0
        self._lost: set[int] = set()
        self._waits_since = 0.0  # when this worker began to wait for a generation to be formed at once; 0: it does not
        self._watched: list[Fabric] = []  # every fabric that a loss must be told to
        self._abandoned: set[int] = set()  # generations that will never be
        self._released = -1  # up to this generation, plans are as the master said last
        self._formed = -1  # the newest generation that was formed at once
        self._parked = False  # too few are left; nobody trains on before others have come
        self._dropped: list[int] = []  # generations that newcomers' ends have made impossible, not yet confirmed
        self._current: Generation | None = None  # in force
        self._asked_to_save = False
        self.dismissed = False
        self._next_hold = env.hold_at
        self._held = 0.0, 0.0  # the plan that is, or was last, waited for: its step, and until when
        self.step = 0  # for signs of life
        self._clock = TurnClock()
        self._held_at: tuple[int, ...] = ()  # the place in the data of the newest meeting
        self.introduce: Callable[[], bytes] = lambda: b""
        self.furnish: Furnish = lambda generation: None
        self._unhurried = Unhurried()
        self._to_build: queue.SimpleQueue[Formation | None] = queue.SimpleQueue()
        self._builder = threading.Thread(target=self._build_what_is_wanted, name="concertina-builder", daemon=True)
        self._builder.start()
        self.link: MasterLink | None = None
        if env.launched and env.store:
            name = f"worker-{self.number}"
            orphan_s = env.orphan_s if env.host else 0.0
            self.link = MasterLink(env.store, env.job, env.key, name, self._on_message, self._sign_of_life, orphan_s)
            self.say(op="arrived", post=first.segment.address, desk=desk.segment.address)
            self.link.start()

    def say(self, **body: Any) -> None:
        if self.link is not None:
            self.link.say(**body)

    def _sign_of_life(self) -> Mapping[str, Any]:
        current, clock = self._current, self._clock
        place = self._desk.place
        apart = {} if self._wire is None else {"waits_s": self._waits_s, "cut": self._wire.reach.cut()}
        return {
            **apart,
            "generation": -1 if current is None else current.formation.generation,
            "step": self.step,
            "pace": clock.pace,
            "turn_s": clock.turn_s,
            "turns": clock.turns,
            "met": 0 if current is None else current.fabric.met,
            "in_round": place[1] >= 0 and place != self._held_at,
        }

    @property
    def _waits_s(self) -> float:
        """Seconds for which this worker has waited for others, with whatever thread."""
        begun = [self._waits_since, *(fabric.waits_since for fabric in self._watched)]
        return max((time.monotonic() - since for since in begun if since), default=0.0)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = 0.0

    @property
    def pace(self) -> float:
        """Seconds per step."""
        return self._clock.pace

    @pace.setter
    def pace(self, seconds: float) -> None:
        """A step is complete, begun so long ago."""
        if self._current is not None:
            share = len(self._current.placement.workers[self._current.rank])
            self._clock.step_done(seconds, share, self._current.fabric.waited)

    # -- words of the master (in the link's thread) ------------------------------------------------------------------

    def _on_message(self, body: Mapping[str, Any]) -> None:
        op = body["op"]
        with self._changed:
            if op == "form":
                self._on_form(Formation.from_json(body["formation"]), body["at_once"])
            elif op == "arm":
                self._armed = max(self._armed, body["generation"])
            elif op == "abandon":
                self._on_abandon(body["generation"])
            elif op == "lost":
                self._on_lost(body["lost"])
            elif op == "release":
                self._next_hold, self._released = body["next_hold"], body["generation"]
            elif op == "save":
                self._asked_to_save = True
            elif op == "dismiss":
                self._on_dismiss()
            self._changed.notify_all()

    def take_wish_to_save(self) -> bool:
        """Whether the master has asked for a checkpoint since this was last asked."""
        asked, self._asked_to_save = self._asked_to_save, False
        return asked

    def _on_form(self, formation: Formation, at_once: bool) -> None:
        if self.number in formation.members:
            self._offer_post()
        if at_once:
            if formation.generation > self._formed:  # a worker that starts alone has not waited for these words
                self._at_once = formation
                self._forget_pending()
            return
        self._wanted = formation
        if self.number in formation.members:
            self._to_build.put(formation)

    def _offer_post(self) -> None:
        post = Post.create()
        self._posts[post.segment.address] = post
        self.say(op="offered", post=post.segment.address)

    def _on_abandon(self, generation: int) -> None:
        self._never(generation)
        if self._wanted is not None and self._wanted.generation == generation:
            self._forget_pending()

    def _on_lost(self, lost: list[int]) -> None:
        self._lost.update(lost)
        if self._wire is not None:
            self._wire.seal(tuple(lost))
        for fabric in self._watched:
            fabric.lose(lost)
        wanted = self._wanted
        if wanted is not None and set(lost) & set(wanted.members):
            self._dropped.append(wanted.generation)

    def _on_dismiss(self) -> None:
        """The others do without this worker. If it did not know that, it waits for them somewhere, and in vain."""
        self.dismissed = True
        for fabric in self._watched:
            fabric.lose([member for member in fabric.members if member != self.number])

    def _never(self, generation: int) -> None:
        """Nobody must wait for others to build this."""
        self._abandoned.add(generation)
        for fabric in self._watched:
            if fabric.generation == generation:
                fabric.give_up()

    def _forget_pending(self) -> None:
        if self._wanted is not None:
            self._never(self._wanted.generation)
        if self.pending is not None:
            self.take_down(self.pending)
        self.pending = None
        self._wanted = None

    # -- building ----------------------------------------------------------------------------------------------------

    def build(self, formation: Formation) -> Generation:
        """Together with all other members; raises PeersLost if one of them is gone."""
        post = self._posts.pop(formation.posts[formation.members.index(self.number)])
        try:
            fabric = Fabric.form(
                formation.generation,
                formation.members,
                self.number,
                post,
                formation.posts,
                lambda member, address: self._open(formation, member, lambda: Segment.open(address)),
            )
        except PeersLost:
            Fabric(formation.generation, (self.number,), self.number, [post]).stop()  # the others need not wait
            raise
        with self._changed:
            self._watched.append(fabric)
            fabric.lose(tuple(self._lost))
            if formation.generation in self._abandoned:
                fabric.give_up()
        try:
            return self._furnish(formation, fabric, post)
        except BaseException:
            fabric.stop()
            self._unwatch(fabric)
            raise
        finally:
            post.segment.hide()

    def _furnish(self, formation: Formation, fabric: Fabric, post: Post) -> Generation:
        desks = {}
        for member, address in zip(formation.members, formation.desks, strict=True):
            own = member == self.number
            desks[member] = self._desk if own else self._open(formation, member, self._desk_at(address))
            fabric.keep(member, desks[member].segment)
        generation = Generation(formation, fabric, desks)
        fabric.meet()  # everybody has mapped everything
        generation.introductions = fabric.gather_bytes(self.introduce())
        generation.reducer = self.furnish(generation)
        fabric.meet()
        return generation

    def _desk_at(self, address: str) -> Callable[[], Desk]:
        return lambda: Desk.open(address, self._env.virtual)

    def _open(self, formation: Formation, member: int, there: Callable[[], T]) -> T:
        """A member's memory. While its host does not answer, again and again: the master hears of it, and says whom
        the others do without."""
        until = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                return there()
            except Unreachable:
                if self._is_off(formation, member):
                    raise PeersLost([member]) from None
                if time.monotonic() > until:
                    raise PeersLost([]) from None  # nobody is gone: the master has to be told of this
            except OSError:
                raise PeersLost([member]) from None
            with self._changed:
                self._changed.wait(AGAIN_SECONDS)

    def _is_off(self, formation: Formation, member: int) -> bool:
        """Whether this generation will not be, or not with that member."""
        newer = self._at_once is not None and self._at_once.generation > formation.generation
        gone = self.dismissed or member in self._lost
        return gone or newer or formation.generation in self._abandoned

    def _unwatch(self, fabric: Fabric) -> None:
        with self._changed:
            self._watched = [other for other in self._watched if other is not fabric]

    def _build_what_is_wanted(self) -> None:
        while (formation := self._to_build.get()) is not None:
            try:
                self._build_pending(formation)
            except Exception:  # whoever needs this thread next would wait for it in vain
                traceback.print_exc()

    def set_aside(self, memory: Callable[[], None]) -> None:
        """Takes the time that training leaves, unless everybody waits for this generation."""
        if threading.current_thread() is self._builder:
            self._unhurried.do(memory)
        else:
            memory()

    def _take_down(self, things: list[Any]) -> None:
        """Freeing large memory takes time; here nobody waits for it."""
        for thing in things:
            if isinstance(thing, Generation):
                self._unwatch(thing.fabric)
                thing = thing.reducer
            close = getattr(thing, "close", None)
            if close is not None:
                close()
        things.clear()

    def _build_pending(self, formation: Formation) -> None:
        try:
            built = self.build(formation)
        except PeersLost as loss:
            if not loss.workers:
                self.say(op="build_failed", generation=formation.generation, error="its connections broke")
            return  # of a worker that is gone, the master knows
        except ConcertinaError as error:
            self.say(op="build_failed", generation=formation.generation, error=str(error))
            return
        except Exception as error:
            self.say(op="build_failed", generation=formation.generation, error=f"{type(error).__name__}: {error}")
            return
        with self._changed:
            if self._wanted is None or self._wanted.generation != formation.generation:
                self.take_down(built)
                return
            self.pending = built
            self._changed.notify_all()
        self.say(op="built", generation=formation.generation)

    # -- for the training thread -------------------------------------------------------------------------------------

    def first(self) -> Generation:
        """The generation that this worker starts with; alone, nobody has to be waited for."""
        with self._waiting():
            return self._first()

    def _first(self) -> Generation:
        env = self._env
        if len(env.members) <= 1:
            formation = Formation(
                generation=env.generation,
                members=(self.number,),
                placement=VirtualPlacement.blocks(env.virtual, 1),
                posts=(next(iter(self._posts)),),
                desks=(self._desk.segment.address,),
                next_hold=env.hold_at,
            )
        elif self.link is None:
            post, desk = next(iter(self._posts)), self._desk.segment.address
            formation = meet_in(Path(env.run_dir), env.generation, self.number, env.members, env.virtual, post, desk)
        else:
            formation = self._wait_for_at_once()
        try:
            return self._form(formation)
        except PeersLost as loss:
            if not loss.workers:
                raise ConcertinaError("the workers could not connect to each other before training began") from None
            self._wait_for_at_once(newer_than=formation.generation)  # the master starts all anew, and ends this one
            raise

    def regroup(self, after: Generation, step: int) -> Generation:
        """After a loss: tells the master that this worker has stopped, and forms what the master says."""
        self.say(op="stopped", generation=after.formation.generation, step=step)
        with self._waiting():
            while True:
                formation = self._wait_for_at_once(newer_than=after.formation.generation)
                try:
                    return self._form(formation)
                except PeersLost:
                    self.say(op="stopped", generation=after.formation.generation, step=step)

    def _form(self, formation: Formation) -> Generation:
        with self._changed:
            self._formed = formation.generation
            if self._at_once is not None and self._at_once.generation == formation.generation:
                self._at_once = None
        generation = self.build(formation)
        self.say(op="built", generation=formation.generation)
        return generation

    def _wait_for_at_once(self, newer_than: int = -1) -> Formation:
        until = time.monotonic() + LIMIT_SECONDS
        with self._changed:
            while True:
                found = self._at_once
                if found is not None and found.generation > newer_than:
                    return found
                if self.dismissed:
                    raise Left()
                left = until - time.monotonic()
                if left <= 0:
                    raise ConcertinaError(f"the master formed no generation within {LIMIT_SECONDS:.0f} s")
                self._changed.wait(left)

    @property
    def vote(self) -> int:
        """The generation that this worker is ready to change over to; 0 if none."""
        wanted = self._wanted
        if wanted is None or self._armed < wanted.generation or set(wanted.members) & self._lost:
            return 0
        if self.number in wanted.members and self.pending is None:
            return 0
        return wanted.generation

    @property
    def lost(self) -> frozenset[int]:
        """Workers that the master has said to be gone."""
        return frozenset(self._lost)

    @property
    def wanted(self) -> Formation | None:
        return self._wanted

    def hold(self, step: int, meanwhile: Callable[[], None]) -> None:
        """Waits at the step that a planned change is due at, until it can take place or is given up.

        That wait has one limit, whatever step it is at by then; after it, the change takes place when it can. Parked
        workers wait at any step, as long as there is a master. Meetings between steps are not waited at: changes take
        place after steps only.
        """
        self._held_at = self._desk.place
        if self._current is not None:
            self._clock.turns_done(self._current.fabric.waited)
        if step <= self.step or step < self._hold_at():
            return
        until = self._hold_until(self._hold_at())
        with self._changed:
            while not self.vote and (self._parked or time.monotonic() < until):
                wanted = self._wanted
                if self._parked:
                    self._need_master()
                    self.confirm_dropped()  # this worker has not voted, and for that it never will
                    wanted = self._wanted
                doomed = wanted is not None and set(wanted.members) & self._lost
                if step < self._hold_at() or doomed or self._at_once is not None or self._broken():
                    return
                meanwhile()
                self._changed.wait(0.05)

    def _hold_until(self, at: float) -> float:
        """One moment for the plan of that step: otherwise a newcomer that never comes would be waited for at each."""
        if self._held[0] != at:
            self._held = at, time.monotonic() + HOLD_SECONDS
        return self._held[1]

    def _need_master(self) -> None:
        silent = 0.0 if self.link is None else self.link.silence_s
        if silent > LIMIT_SECONDS:
            raise ConcertinaError(
                f"too few workers are left to train on, and no master that could start others has been heard for "
                f"{silent:.0f} s: start the job again with --resume"
            )

    def _hold_at(self) -> float:
        wanted = self._wanted
        if self._parked and wanted is None:
            return 0
        at = self._next_hold if wanted is None else wanted.hold_at
        return at or float("inf")

    def _broken(self) -> bool:
        """Whether somebody is missing in the generation in force."""
        return self._current is not None and bool(self._current.fabric.lost)

    def enter(self, generation: Generation) -> None:
        """This generation is in force now."""
        if generation.formation.generation > self._released:
            self._next_hold = generation.formation.next_hold
        self._parked = generation.formation.parked
        self._current = generation
        self._clock = TurnClock(self._clock.pace)

    def confirm_dropped(self) -> None:
        """After a step without a change: what can no longer happen will not."""
        if not self._dropped:
            return
        with self._changed:
            dropped, self._dropped = self._dropped, []
            if self._wanted is not None and self._wanted.generation in dropped:
                self._forget_pending()
        for generation in dropped:
            self.say(op="dropped", generation=generation)

    def take_pending(self, generation: int) -> Generation:
        with self._changed:
            taken = self.pending
            assert taken is not None
            assert taken.formation.generation == generation
            self.pending = None
            if self._wanted is not None and self._wanted.generation == generation:
                self._wanted = None
            self._dropped = [g for g in self._dropped if g != generation]
        return taken

    def wait_for_wanted(self) -> Formation:
        """A newcomer waits for the change that it is to be part of."""
        until = time.monotonic() + LIMIT_SECONDS
        with self._changed:
            while self._wanted is None:
                if self.dismissed:
                    raise Left()
                if time.monotonic() > until:
                    raise ConcertinaError("the master did not let this newcomer in")
                self._changed.wait(0.5)
            return self._wanted

    def wait_for_pending(self, generation: int) -> Generation:
        """A newcomer whose generation is already in force."""
        until = time.monotonic() + LIMIT_SECONDS
        with self._changed:
            while self.pending is None or self.pending.formation.generation != generation:
                if self.dismissed or generation in self._abandoned or time.monotonic() > until:
                    raise Left()
                self._changed.wait(0.5)
        return self.take_pending(generation)

    def wait_for_dismissal(self) -> None:
        """A leaver stays until nobody reads from it any more."""
        until = time.monotonic() + LEAVE_SECONDS
        with self._changed:
            while not self.dismissed and time.monotonic() < until:
                self._changed.wait(0.5)

    def in_background(self, work: Callable[[], None]) -> None:
        self._unhurried.later(work)

    def take_down(self, *things: Any) -> None:
        self._unhurried.later(partial(self._take_down, list(things)))

    def close(self) -> None:
        self._to_build.put(None)
        self._unhurried.close()
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.close(limit_s=2.0)
        if self._wire is not None:
            self._wire.close()
