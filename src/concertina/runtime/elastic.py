"""What the workers of a job agree on at every step, and how they change or lose members between two steps.

Once per round all members meet. That meeting commits the step: whoever passed it may let the optimizer act, and by the
rule of the posts (`fabric.py`) either all survivors of a crash have passed it or none has. Wishes, votes and
fingerprints travel with it, so agreeing costs nothing more. A *recovery point* is the state after a round that counted,
or at the beginning of a pass; each worker keeps its virtual workers' contexts of it where the others can read them.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from concertina.core.errors import DivergenceError, StateLost
from concertina.runtime.desk import Desk, is_final, newest_context
from concertina.runtime.digest import ParameterDigest
from concertina.runtime.handover import hand_over
from concertina.runtime.interrupts import Left
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.segments import Segment
from concertina.runtime.shown import Shown
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.wishes import WISHES

if TYPE_CHECKING:
    from concertina.runtime.loader import Pass

COMPARE_FIRST, COMPARE_EVERY = 16, 32  # steps whose parameters are compared between workers
LOOK_FIRST, LOOK_EVERY = 8, 64  # steps at whose end contexts are looked at again
PATIENT_LOOKS = 50  # at newcomers that are not in step yet
IN_STEP_SECONDS = 120.0  # that a planned change may keep everybody waiting until its newcomers are in step


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome of one meeting."""

    wishes: tuple[int, ...]
    change_to: int  # generation that all members voted for; 0: none


NOTHING_ASKED = Agreement((0,) * WISHES, 0)


class Elastic:
    """One worker's side of agreeing, changing over and recovering."""

    def __init__(self, engine: VirtualEngine, membership: Membership, desk: Desk) -> None:
        self._engine = engine
        self._membership = membership
        self._desk = desk
        self._digest = ParameterDigest(engine.layout, engine.frozen)
        self._digests: list[int] = []
        self._digest_step = 0
        self._previous: Generation | None = None  # kept until the first step of the present one counts
        self._handed: Segment | None = None  # to newcomers; maybe all of the state
        self._looked = 0  # at newcomers, in steps since the last change
        self._awaited = (0, 0.0)  # the generation whose newcomers are, or were last, waited for, and until when
        self._packed: dict[int, bytes] = {}
        self._late_draws = False  # the script draws random numbers after backward()
        self._looks_again = True  # at the end of this round
        self._began_pass = False  # the last recovery point is the beginning of a pass
        self.feeds: Callable[[], Sequence[Any]] = lambda: ()
        self.wishes: Callable[[], list[int]] = lambda: [0] * WISHES
        self.rest_of_state: Callable[[], dict[str, Any]] = dict
        self._shown = Shown(engine, membership, desk)
        self.agreement: Agreement | None = None
        self._joining: tuple[int, list[Desk]] = (0, [])  # for a main worker that leaves: generation, newcomers' desks
        self.sources: list[Desk] = []  # a newcomer's: of those who trained before it did
        self.point_batch = 0  # the batch to go on with from the last recovery point
        self.switched_at = 0.0

    @property
    def step(self) -> int:
        """Steps that are complete."""
        return self._shown.step

    @step.setter
    def step(self, value: int) -> None:
        self._shown.step = value

    @property
    def prepared(self) -> Prepared:
        return self._shown.prepared

    @prepared.setter
    def prepared(self, value: Prepared) -> None:
        self._shown.prepared = value

    @property
    def generation(self) -> Generation:
        assert self._engine.generation is not None
        return self._engine.generation

    @property
    def alone(self) -> bool:
        return self.generation.fabric.size == 1

    # -- the meeting of every round ----------------------------------------------------------------------------------

    def fingerprint(self) -> None:
        """Taken when a round begins, compared when it ends."""
        self._digest_step = self.step
        due = self.step < COMPARE_FIRST or self.step % COMPARE_EVERY == 0
        self._digests = self._digest.compute() if due and not self.alone else []

    def agree(self, advances: bool, next_batch: int, steps: int) -> Agreement:
        """Meets the others. With `advances`, what this round did counts from here on; `steps` optimizer steps of it."""
        self._membership.hold(self.step + steps, self._shown.while_held)
        vote = 0
        if self._membership.wanted is not None:
            self._wait_for_newcomers(self.step + steps)
            vote = self._vote(self.step + steps)  # before contexts are kept: with it, they are not final yet
        if advances:
            self._keep_contexts(self._engine.point + 1)
        words = [*self.wishes(), vote, *self._digests]
        heard = self.generation.fabric.exchange(words)
        if advances:
            self._engine.point += 1
            self.point_batch = next_batch
            self._began_pass = False
            self._forget_previous()
        if heard.count(words) == len(heard):  # as in nearly every step
            asked = any(words[: WISHES + 1])
            self.agreement = Agreement(tuple(words[:WISHES]), vote) if asked else NOTHING_ASKED
            return self.agreement
        self._compare_digests([row[WISHES + 1 :] for row in heard])
        votes = {row[WISHES] for row in heard}
        wishes = tuple(max(column) for column in list(zip(*heard, strict=True))[:WISHES])
        self.agreement = Agreement(wishes, votes.pop() if len(votes) == 1 else 0)
        return self.agreement

    def _vote(self, step: int) -> int:
        vote, wanted = self._membership.vote, self._membership.wanted
        if not vote or wanted is None or step < wanted.hold_at:
            return 0
        if not wanted.joiners or not self.is_main:
            return vote
        self._looked += 1
        return vote if self._newcomers_follow() else 0

    def _wait_for_newcomers(self, step: int) -> None:
        """From the step of a planned change on, for so long in all: it takes place after this step."""
        wanted = self._membership.wanted
        if wanted is None or not wanted.hold_at or step < wanted.hold_at or not self.is_main or not wanted.joiners:
            return
        if self._awaited[0] != wanted.generation or self.generation.formation.parked:  # too few: they do not train on
            self._awaited = wanted.generation, time.monotonic() + IN_STEP_SECONDS
        while self._membership.vote == wanted.generation and not self._newcomers_follow():
            if time.monotonic() > self._awaited[1]:
                return
            time.sleep(2e-4)

    def _newcomers_follow(self) -> bool:
        """Whether every newcomer stands where we stand and has made every step: only then will nobody wait for it.

        Where steps are so short that it never has when we look, a step behind will do.
        """
        here = self._desk.place[:3]
        desks = self._joining_desks()
        behind = 0 if self._looked < PATIENT_LOOKS else 1
        return desks is not None and all(
            desk.place[:3] == here and desk.clock >= 2 * (self.step - behind) for desk in desks
        )

    def _joining_desks(self) -> list[Desk] | None:
        """The newcomers' desks; None if one cannot be found. A main worker that leaves has not built with them."""
        wanted, pending = self._membership.wanted, self._membership.pending
        if wanted is None:
            return None
        if pending is not None:
            return [pending.desks[number] for number in wanted.joiners]
        if self._joining[0] != wanted.generation:
            places = dict(zip(wanted.members, wanted.desks, strict=True))
            try:
                desks = [Desk.open(places[number], self._engine.virtual) for number in wanted.joiners]
            except OSError:
                return None
            self._joining = (wanted.generation, desks)
        return self._joining[1]

    @property
    def is_main(self) -> bool:
        return 0 in self.generation.placement.workers[self.generation.rank]

    def _compare_digests(self, rows: list[list[int]]) -> None:
        for row in rows[1:]:
            for bucket, (ours, theirs) in enumerate(zip(rows[0], row, strict=True)):
                if ours != theirs:
                    self._raise_divergence(bucket)

    def _raise_divergence(self, bucket: int) -> None:
        engine, buckets = self._engine, self._engine.layout.buckets
        where = "among those that are not trained"
        if bucket < len(buckets):
            names = [engine.names[i] for i in buckets[bucket]]
            where = f"in bucket {bucket} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        raise DivergenceError(
            f"the workers' parameters differ after step {self._digest_step}, {where}: something changes them on some "
            "workers only"
        )

    # -- recovery points ---------------------------------------------------------------------------------------------

    def begin_pass(self, batch: int) -> None:
        """All local virtual workers have drawn what a new pass draws."""
        self._keep_contexts(self._engine.point + 1)
        self._engine.point += 1
        self.point_batch = batch
        self._began_pass = True
        self.make_final()

    def _keep_contexts(self, number: int) -> None:
        if self.alone and self._membership.wanted is None:
            self._packed = {}
            return  # nobody could go on from them
        feeds = self.feeds()
        changing = self._membership.wanted is not None  # others may go on from what is final
        self._looks_again = self._late_draws or changing or self.step < LOOK_FIRST or self.step % LOOK_EVERY == 0
        final = not self._looks_again
        for v in self._engine.order:
            packed = self._engine.contexts.pack(v, feeds)
            self._packed[v] = packed
            self._put(v, number, packed, final)

    def make_final(self) -> None:
        """At the end of a round: what was kept before the optimizer acted is still so, as a rule."""
        engine, feeds = self._engine, self.feeds()
        for v in engine.order:
            if v in self._packed and v != engine.contexts.resident and self._desk.make_final(v, engine.point):
                continue
            packed = engine.contexts.pack(v, feeds)
            if v in self._packed and packed != self._packed[v]:
                self._late_draws = True
            if self._packed.get(v) != packed or not self._desk.make_final(v, engine.point):
                self._put(v, engine.point, packed, final=True)

    def needs_final(self) -> bool:
        """Whether to look again, at the end of a round, at contexts that were kept before the optimizer acted.

        They change in between only if a script draws random numbers after backward(). Looking costs as much as keeping,
        so it is done in the first steps and now and then, always from the first such draw on, and at every change.
        """
        agreed = self.agreement
        if (agreed is not None and agreed.change_to > 0) or self._membership.wanted is not None:
            return True
        return not self.alone and (self._looks_again or not self._packed)

    def _put(self, v: int, number: int, packed: bytes, final: bool) -> None:
        if not self._desk.put_context(v, number, packed, final):
            raise StateLost(
                f"virtual worker {v}'s context takes {len(packed)} bytes, more than the desk has room for: create all "
                "session loaders before the first epoch"
            )

    # -- changing over -----------------------------------------------------------------------------------------------

    @property
    def somebody_leaves(self) -> bool:
        """With the change that all have voted for."""
        wanted = self._membership.wanted
        return wanted is not None and bool(wanted.leavers)

    def announce(self, generation: int) -> None:
        """First of all, since newcomers wait for it: the old generation is over, and here is the rest of its state."""
        wanted = self._membership.wanted
        assert wanted is not None
        address = ""
        if wanted.joiners and self.is_main:
            whole = any(desk.cannot_read for desk in self._joining_desks() or ())
            self._handed = hand_over(self.prepared, self.rest_of_state(), whole)
            address = self._handed.address
        self._desk.announce_switch(generation, self.step, address)

    def change_over(self, generation: int) -> None:
        """After a step that all members voted at: those who stay take up what was built, those who leave go."""
        membership, wanted = self._membership, self._membership.wanted
        assert wanted is not None
        began = time.monotonic()
        old = self.generation
        if membership.number not in wanted.members:
            membership.say(op="switched", generation=generation, step=self.step)
            membership.wait_for_dismissal()
            raise Left()
        new = membership.take_pending(generation)
        self._previous, self._looked = old, 0
        self._engine.take_up(new)
        old.kept += self._shown.stop()  # what newcomers still need of this step stays until they have come
        self._load_moved(old)
        membership.say(op="switched", generation=generation, step=self.step)  # leavers may go, the next change may come
        self.keep_anew()
        self.switched_at = time.monotonic() - began

    def _load_moved(self, old: Generation) -> None:
        """Contexts of the virtual workers that come here, from the desks of those who had them."""
        engine, feeds = self._engine, self.feeds()
        for v in engine.order:
            if v in engine.contexts:
                continue
            owner = old.formation.members[old.placement.host(v)]
            desk = old.desks[owner]
            old.fabric.wait_for(owner, lambda desk=desk, v=v: is_final(desk, v, engine.point))  # type: ignore[misc]
            record = desk.context(v, engine.point)
            assert record is not None
            engine.contexts.unpack(v, record[0], feeds)
        engine.contexts.keep_only(engine.order)

    def keep_anew(self) -> None:
        """Virtual workers have come from elsewhere: from now on their contexts are on this desk, too."""
        self._packed = {}
        if not self.alone:
            self.make_final()

    def _forget_previous(self) -> None:
        self.sources = []
        if self._previous is not None:
            self._membership.take_down(self._previous, self._handed)
            self._previous = self._handed = None

    def show_state(self) -> None:
        """At the end of every step, for those who follow."""
        self._shown.show()

    # -- losses ------------------------------------------------------------------------------------------------------

    def recover(self, current: "Pass | None") -> None:
        """A member is gone. The survivors form a generation and go back to the last recovery point."""
        engine, membership = self._engine, self._membership
        old = self.generation
        old.fabric.stop()
        desks = [*old.desks.values(), *(self._previous.desks.values() if self._previous else ()), *self.sources]
        new = membership.regroup(old, self.step)
        if self._previous is not None:
            membership.take_down(self._previous)
        self._previous = old
        engine.take_up(new)
        engine.syncs_buffers = engine.syncs_at_point
        engine.contexts.adopt(
            engine.order, engine.point, desks, self.feeds(), lambda v: self._make_up_for(v, desks, current)
        )
        if self._late_draws and self._some_not_final(desks):
            raise StateLost("a worker was lost whose script draws random numbers after backward()")
        self.keep_anew()
        if current is None:
            engine.contexts.go_outside()

    def _some_not_final(self, desks: Sequence[Desk]) -> bool:
        found = [newest_context(desks, v, self._engine.point) for v in self._engine.order]
        return any(record is not None and not record[1] for record in found)

    def _make_up_for(self, v: int, desks: Sequence[Desk], current: "Pass | None") -> None:
        """Its worker died before the beginning of this pass: what it would have drawn there is drawn here."""
        engine = self._engine
        before = newest_context(desks, v, engine.point - 1)
        if not self._began_pass or before is None or current is None:
            raise StateLost(f"the context of virtual worker {v} was lost with its worker")
        engine.contexts.unpack(v, before[0], self.feeds())
        engine.contexts.make_resident(v)
        current.loader.feed.new_pass(v)

    def introduction(self, environment: dict[str, str]) -> bytes:
        """What the members of the next generation learn about this worker."""
        engine = self._engine
        return json.dumps({"layout": engine.layout.state(), "environment": environment}).encode()
