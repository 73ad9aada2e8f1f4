"""A newcomer: it follows the members of a training job until it is one of them.

It runs the user's script like everybody, up to the loop over the data. There it stands beside the members, pass by
pass, until they announce the step after which it is one of them; then it has the state of that step and takes turns.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from concertina.core.errors import ConcertinaError
from concertina.core.formation import Formation
from concertina.runtime.catch_up import CatchUp
from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import finish_work
from concertina.runtime.elastic import Elastic
from concertina.runtime.fabric import LIMIT_SECONDS, PeersLost
from concertina.runtime.handover import load_small_state, receive
from concertina.runtime.interrupts import Left
from concertina.runtime.member_memory import MemberMemory
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.remote_memory import RemoteMemory
from concertina.runtime.segments import Segment, host_of, is_here
from concertina.runtime.state_map import make_room, set_others
from concertina.runtime.together import Together
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.ways import SHARES, Way, way_in

IDLE_SECONDS = 0.0002
IDLE_BY_NETWORK_SECONDS = 0.001
TURN_SECONDS = 120.0  # that a newcomer waits for others to get the state before it
AGAIN_SECONDS = 0.5  # between two tries to read over a network
TRIES = 5  # per change, before the state is handed over at the switch instead
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
        self._sources: dict[int, Desk] = {}
        self._catch_up: CatchUp | Together | None = None
        self._gone_in = -1  # generation whose state could no longer be read
        self._followed: list[tuple[Desk, str]] = []  # members, and where it is written down where their state lies
        self._way: Way | None = None
        self._before: list[Desk] = []  # of newcomers whose turn comes before ours
        self._asked_at = 0.0  # for our turn
        self._tries = 0
        self._try_at = 0.0
        self.handed_over = ""  # why all of the state is to be handed over at the switch; empty: it is not
        self._looked_for = 0  # generation for which it is known whom to follow
        self.late = -1  # pieces that had to be copied at the switch; -1: all
        self.replayed = 0  # steps of the members that we made, too
        self.on_synced: Callable[[CatchUp | Together | None], None] = lambda catch_up: None
        self._synced = 0  # generation that we have said to be ready for

    @property
    def told(self) -> dict[str, str | bool | list[int]]:
        """Whose memory we read, how, and why not to the end, if so."""
        sources = [n for n, desk in self._sources.items() if any(desk is followed for followed, _ in self._followed)]
        gave_up = "" if self._catch_up is None else self._catch_up.gave_up
        return {"sources": sources, "network": self._by_network, "gave_up": gave_up}

    @property
    def _by_network(self) -> bool:
        return self._way is not None and self._way.remote

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
            try:
                virtual = self._engine.virtual
                self._sources = {number: Desk.open(address, virtual) for number, address in wanted.sources}
            except OSError:
                time.sleep(0.05)  # one of them is gone; the master will say how it goes on
                continue
            self._formation = wanted
            self._way = way_in(wanted, self._membership.number, self._racks(wanted))
            self._asked_at = time.monotonic()
            self._before, self._tries = [], 0
            return
        raise ConcertinaError("no worker of the job could be found")

    def _racks(self, formation: Formation) -> dict[str, int]:
        """Where the hosts of members and newcomers stand, as far as they have said."""
        if not self._desk.rack:
            return {}
        desks = list(self._sources.values())
        places = dict(zip(formation.members, formation.desks, strict=True))
        for number in formation.joiners:
            with contextlib.suppress(OSError):  # it is gone; so is this change
                desks.append(Desk.open(places[number], self._engine.virtual))
        return {host_of(desk.segment.address): desk.rack for desk in desks}

    def _place(self) -> tuple[int, int, int, int]:
        """Where the members are: the farthest of them, since they are at most a step apart."""
        return max((desk.place for desk in self._sources.values()), key=lambda place: (place[0], place[3]))

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
                time.sleep(IDLE_BY_NETWORK_SECONDS if self._by_network else IDLE_SECONDS)
        raise ConcertinaError(f"nobody let this newcomer in within {LIMIT_SECONDS:.0f} s")

    def _keep_up(self) -> bool:
        """Copies, replays or compares a little; False if there was nothing to do."""
        assert self._formation is not None
        generation = self._formation.generation
        if self._gone_in == generation:
            return False  # the master will say whom to follow next
        if self._looked_for != generation or self._has_moved():
            self._find_description(generation)
            return False
        try:
            worked = self._catch_up.work() if self._catch_up is not None else False
        except OSError as error:  # the member that we followed has ended, or a connection
            self._stop_following()
            if self._by_network:
                self._look_again(error)
            else:
                self._gone_in = generation
            return False
        if self._catch_up is None:
            self._desk.clock = max(desk.clock for desk in self._sources.values()) // 2 * 2
        elif self._catch_up.in_step:
            self._desk.clock = 2 * self._catch_up.version
        else:
            return worked
        if self._synced != generation:
            self._synced = generation
            self._membership.say(op="synced", generation=generation)
            self.on_synced(self._catch_up)
        return worked

    def _has_moved(self) -> bool:
        """Whether a member that we follow keeps its state in other memory than it said."""
        return any(desk.described[1] != described for desk, described in self._followed)

    def _find_description(self, generation: int) -> None:
        """The members to follow are among those who have written down where their state lies."""
        ready = [desk for _, desk in sorted(self._sources.items()) if desk.described[0] == generation]
        if len(ready) < len(self._sources) or time.monotonic() < self._try_at or not self._is_our_turn():
            return
        self._looked_for = generation
        self._stop_following()
        self.handed_over = ""
        if self._way is None:  # on one host each newcomer follows another member
            sources = [(ready[self._membership.number % len(ready)], 0, SHARES)]
        else:
            sources = [(self._sources[number], first, end) for number, first, end in self._way.sources]
        self._followed = [(desk, desk.described[1]) for desk, _, _ in sources]
        try:
            self._catch_up = self._follow(sources)
            if self._catch_up is None:
                self.handed_over = "it is kept in a form that nobody else can use"
        except OSError as error:
            if self._by_network:
                self._look_again(error)
            else:
                self.handed_over = f"the memory of a member cannot be read ({error})"
        if self._desk.cannot_read != bool(self.handed_over):
            self._desk.cannot_read = bool(self.handed_over)

    def _look_again(self, error: OSError) -> None:
        """A network may fail for a moment; if the member has ended, the master will say whom to follow next."""
        self._tries += 1
        if self._tries < TRIES:
            self._looked_for, self._try_at = -1, time.monotonic() + AGAIN_SECONDS
            return
        self.handed_over = f"the memory of a member on another host cannot be read ({error})"
        self._desk.cannot_read = True

    def _is_our_turn(self) -> bool:
        """Transfers that would get into each other's way come one after another."""
        if self._way is None or not self._way.after or time.monotonic() > self._asked_at + TURN_SECONDS:
            return True
        assert self._formation is not None
        places = dict(zip(self._formation.members, self._formation.desks, strict=True))
        try:
            if not self._before:
                self._before = [Desk.open(places[number], self._engine.virtual) for number in self._way.after]
        except OSError:
            return True  # one of them is gone; so is this change
        return all(desk.clock > 0 for desk in self._before)

    def _follow(self, sources: list[tuple[Desk, int, int]]) -> CatchUp | Together | None:
        """Begins to follow these members; None if their state is in a form that nobody else can use."""
        shares: list[CatchUp] = []
        room: list[torch.Tensor] | None = None
        try:
            for desk, first, end in sources:
                memory, description = _read_description(desk)
                if description is None:
                    return None
                if isinstance(memory, MemberMemory):
                    _try_to_read(memory, self._prepared, description)
                if room is None:
                    room = [tensor for _, tensor in make_room(self._prepared, description)]
                shares.append(CatchUp(memory, desk, self._prepared, description, room, (first, end, SHARES)))
        except OSError:
            for share in shares:
                share.close()
            raise
        return shares[0] if len(shares) == 1 else Together(shares)

    def _announced(self) -> tuple[int, int, str] | None:
        """Generation, step and address of the state, once a member has said that we belong to them."""
        assert self._formation is not None
        for number, desk in self._sources.items():
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
            self._complete(step, self._sources[source])
            set_others(self._prepared, state["others"])
            load_small_state(self._prepared, state["small"])
        self._engine.load_shared_state(rest["engine"])
        self._engine.point = rest["point"]
        self._engine.take_up(generation)
        self._elastic.step = rest["step"]
        self._elastic.sources = list(self._sources.values())
        self._take_contexts(generation)
        self._elastic.keep_anew()
        self._membership.say(op="switched", generation=formation.generation, step=step)
        self._stop_following()
        return rest

    def _stop_following(self) -> None:
        catch_up, self._catch_up = self._catch_up, None
        self._followed = []
        if isinstance(catch_up, Together):
            catch_up.close()  # its threads must not write where the next one writes
        else:
            self._membership.take_down(catch_up)

    def _complete(self, step: int, source: Desk) -> None:
        """Parameters and optimizer state as they are after `step`; if need be, all from the worker that let us in."""
        catch_up = self._catch_up
        if catch_up is not None and not self._has_moved() and self._finishes(catch_up, step):
            return
        self._stop_following()
        memory, description = _read_description(source)
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
                found = [record for desk in self._sources.values() if (record := desk.context(v, point)) and record[1]]
                if found:
                    break
                if generation.fabric.lost or time.monotonic() > until:
                    raise PeersLost(generation.fabric.lost)
                time.sleep(2e-5)
            self._engine.contexts.unpack(v, found[0][0], feeds)
        self._engine.contexts.resident = None
        self._engine.contexts.apart = True


def _warm_up(prepared: Prepared) -> None:
    """What torch sets up at the first backward of a process, threads for every device among it; now nobody waits."""
    devices = {param.device for param in prepared.model.parameters()} | {torch.device("cpu")}
    for device in devices:
        x = torch.ones(16, 16, requires_grad=True, device=device)
        torch.nn.functional.linear(x, x).sum().backward()
    finish_work(prepared.model.parameters())


def _read_description(desk: Desk) -> tuple[MemberMemory | RemoteMemory, Any]:
    """The memory of the process whose desk it is, and where in it the state lies; None if nobody else can use it."""
    segment = Segment.open(desk.described[1])
    size = int.from_bytes(segment.memory[:8], "little")
    found = json.loads(segment.memory[8 : 8 + size])
    state = found["memory"]
    if state is None or is_here(desk.segment.address):
        return MemberMemory(found["pid"], () if state is None else state["shared"]), state
    return RemoteMemory(found["served"]), state


def _try_to_read(memory: MemberMemory, prepared: Prepared, description: dict[str, Any]) -> None:
    """A byte of every kind of memory that the state lies in; OSError if one of them is closed to us."""
    here = {"cpu": torch.device("cpu"), "cuda": next(prepared.model.parameters()).device}
    addresses = {kind: address for _, _, _, address, kind, *_ in description["items"]}
    for kind, address in addresses.items():
        memory.read(address, torch.empty(1, dtype=torch.uint8, device=here[kind]))
