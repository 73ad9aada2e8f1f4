"""A newcomer: it follows the members of a training job until it is one of them.

It runs the user's script like everybody, up to the loop over the data. There it stands beside the members, pass by
pass, until they announce the step after which it is one of them; then it has the state of that step and takes turns.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from concertina.core.errors import ConcertinaError
from concertina.core.formation import Formation
from concertina.runtime.catch_up import CatchUp, rehearse_update
from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import finish_work
from concertina.runtime.elastic import Elastic
from concertina.runtime.fabric import LIMIT_SECONDS, PeersLost
from concertina.runtime.handover import load_small_state, receive
from concertina.runtime.interrupts import Left
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.sources import Sources, read_description
from concertina.runtime.state_map import make_room, set_others
from concertina.runtime.together import Together
from concertina.runtime.virtual import VirtualEngine

IDLE_SECONDS = 0.0002
IDLE_BY_NETWORK_SECONDS = 0.001
FOLLOWED_SECONDS = 5.0  # that the member we follow may take to end a step that another has ended


class Follower:
    """One newcomer's way into the job."""

    def __init__(
        self, engine: VirtualEngine, membership: Membership, elastic: Elastic, desk: Desk, prepared: Prepared
    ) -> None:
        self._engine = engine
        self._membership = membership
        self._elastic = elastic
        self._desk = desk
        self._prepared = prepared
        self._formation: Formation | None = None
        self._sources: Sources | None = None  # of that formation
        self._catch_up: CatchUp | Together | None = None
        self.late = -1  # pieces that had to be copied at the switch; -1: all
        self.replayed = 0  # steps of the members that we made, too
        self.on_synced: Callable[[CatchUp | Together | None], None] = lambda catch_up: None
        self._synced = 0  # generation that we have said to be ready for

    @property
    def told(self) -> dict[str, str | bool | list[int]]:
        """Whose memory we read, how, and why not to the end, if so."""
        gave_up = "" if self._catch_up is None else self._catch_up.gave_up
        return {"sources": self._seen.followed, "network": self._seen.by_network, "gave_up": gave_up}

    @property
    def handed_over(self) -> str:
        """Why all of the state is handed over at the switch; empty if it is not."""
        return self._seen.handed_over

    @property
    def _seen(self) -> Sources:
        assert self._sources is not None, "nobody has been met yet"
        return self._sources

    # -- finding the others ------------------------------------------------------------------------------------------

    def wait_until_let_in(self) -> int:
        """Everything of the script before its loop is done; the epoch that the others are in."""
        _warm_up(self._prepared)
        self._membership.say(op="ready")
        self._meet_sources()
        return self._place()[0]

    def _meet_sources(self) -> None:
        """Whom to follow; again if the change that was to let us in is given up."""
        until = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until:
            wanted = self._membership.wait_for_wanted()
            if wanted is self._formation:
                return
            engine, number = self._engine, self._membership.number
            try:
                self._sources = Sources(wanted, number, self._desk, self._prepared, engine.virtual)
            except OSError:
                time.sleep(0.05)  # one of them is gone; the master will say how it goes on
                continue
            self._formation = wanted
            return
        raise ConcertinaError("no worker of the job could be found")

    def _place(self) -> tuple[int, int, int, int]:
        """Where the members are: the farthest of them, since they are at most a step apart."""
        return max((desk.place for desk in self._seen.desks.values()), key=lambda place: (place[0], place[3]))

    # -- beside the loop ---------------------------------------------------------------------------------------------

    def follow(self, epoch: int, loader: int, number: int) -> dict[str, Any] | None:
        """Stands beside the members' pass; the state of the step at which they let us in, or None if they have moved
        on to another pass."""
        until = time.monotonic() + LIMIT_SECONDS
        mine = (epoch, loader, number)
        while time.monotonic() < until:
            if self._membership.dismissed:
                raise Left()
            if self._membership.wanted is not self._formation:
                self._meet_sources()
            announced = self._announced()
            if announced is not None:
                try:
                    return self._come_in(*announced)
                except (OSError, PeersLost, ConcertinaError):
                    raise Left() from None  # whoever had the state is gone; the others go on without this newcomer
            place = self._place()
            if place[1] >= 0 and place[:3] != mine and place[0] >= epoch:
                return None
            self._desk.place = (*mine, place[3])
            if place[:3] != mine or not self._keep_up():
                time.sleep(IDLE_BY_NETWORK_SECONDS if self._seen.by_network else IDLE_SECONDS)
        raise ConcertinaError(f"nobody let this newcomer in within {LIMIT_SECONDS:.0f} s")

    def _keep_up(self) -> bool:
        """Copies, replays or compares a little; False if there was nothing to do."""
        assert self._formation is not None
        generation, sources = self._formation.generation, self._seen
        if sources.gone:
            return False
        if sources.wants_beginning:
            if sources.may_begin():
                self._stop_following()
                self._catch_up = sources.begin()
            return False
        try:
            worked = self._catch_up.work() if self._catch_up is not None else False
        except OSError as error:  # the member that we followed has ended, or a connection
            self._stop_following()
            sources.lost_sight(error)
            return False
        if self._catch_up is None:
            self._desk.clock = max(desk.clock for desk in self._seen.desks.values()) // 2 * 2
        elif self._catch_up.in_step:
            self._desk.clock = 2 * self._catch_up.version
        else:
            return worked
        if self._synced != generation:
            self._synced = generation
            self._membership.say(op="synced", generation=generation)
            self.on_synced(self._catch_up)
        return worked

    def _announced(self) -> tuple[int, int, str] | None:
        """Generation, step and address of the state, once a member has said that we belong to them."""
        assert self._formation is not None
        for number, desk in self._seen.desks.items():
            generation, step, address = desk.switch
            if generation == self._formation.generation and address:
                return number, step, address
        return None

    def _come_in(self, source: int, step: int, address: str) -> dict[str, Any]:
        """The members have changed over after `step` and wait for nobody but us."""
        formation = self._formation
        assert formation is not None
        state = receive(address)
        generation = self._membership.wait_for_pending(formation.generation)
        rest: dict[str, Any] = state["rest"]
        if state["others"] is None:
            self._prepared.load(state["whole"])
        else:
            self._complete(step, self._seen.desks[source])
            set_others(self._prepared, state["others"])
            load_small_state(self._prepared, state["small"])
        self._engine.load_shared_state(rest["engine"])
        self._engine.point = rest["point"]
        self._engine.take_up(generation)
        self._elastic.step = rest["step"]
        self._elastic.sources = list(self._seen.desks.values())
        self._take_contexts(generation)
        self._elastic.keep_anew()
        self._membership.say(op="switched", generation=formation.generation, step=step)
        self._stop_following()
        return rest

    def _stop_following(self) -> None:
        catch_up, self._catch_up = self._catch_up, None
        if isinstance(catch_up, Together):
            catch_up.close()  # its threads must not write where the next one writes
        else:
            self._membership.take_down(catch_up)

    def _complete(self, step: int, source: Desk) -> None:
        """Parameters and optimizer state as they are after `step`; if need be, all from the worker that let us in."""
        catch_up = self._catch_up
        if catch_up is not None and not self._seen.have_moved and self._finishes(catch_up, step):
            return
        self._stop_following()
        memory, description = read_description(source)
        with torch.no_grad():
            memory.copy_settled(step, make_room(self._prepared, description))
        memory.close()

    def _finishes(self, catch_up: CatchUp | Together, step: int) -> bool:
        """False if whoever we followed cannot be read any more; then the main worker's memory serves."""
        try:
            if self._reaches(catch_up, step):
                self.late, self.replayed = catch_up.finish(step), catch_up.replayed
                return True
        except OSError:
            pass
        return False

    def _reaches(self, catch_up: CatchUp | Together, step: int) -> bool:
        """The main worker announces a switch; the one that we follow may still be in its optimizer, or gone."""
        until = time.monotonic() + FOLLOWED_SECONDS
        while not catch_up.reaches(step):
            if time.monotonic() > until:
                return False
            time.sleep(2e-5)
        return True

    def _take_contexts(self, generation: Generation) -> None:
        """Of our virtual workers, from the desks of those who had them before."""
        point = self._engine.point
        feeds = self._elastic.feeds()
        for v in self._engine.order:
            until = time.monotonic() + LIMIT_SECONDS
            while True:
                # Before the desks: what was written before a worker ended counts. Leavers are not of the generation.
                lost = {*generation.fabric.lost, *(self._membership.lost & self._seen.desks.keys())}
                found = [
                    record for desk in self._seen.desks.values() if (record := desk.context(v, point)) and record[1]
                ]
                if found:
                    break
                if lost or time.monotonic() > until:
                    raise PeersLost(sorted(lost))
                time.sleep(2e-5)
            self._engine.contexts.unpack(v, found[0][0], feeds)
        self._engine.contexts.resident = None
        self._engine.contexts.apart = True


def _warm_up(prepared: Prepared) -> None:
    """What torch sets up at a process's first backward, threads for every device among it, and first update; now nobody
    waits."""
    devices = {param.device for param in prepared.model.parameters()} | {torch.device("cpu")}
    for device in devices:
        x = torch.ones(16, 16, requires_grad=True, device=device)
        torch.nn.functional.linear(x, x).sum().backward()
    for optimizer in prepared.optimizers:
        rehearse_update(optimizer)
    finish_work(prepared.model.parameters())
