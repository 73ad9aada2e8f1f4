"""The members of a job as one newcomer sees them: whom of them it follows, when it begins to, and how it reads them."""

import contextlib
import errno
import json
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from concertina.core.formation import Formation
from concertina.runtime.catch_up import CatchUp
from concertina.runtime.desk import Desk
from concertina.runtime.member_memory import MemberMemory
from concertina.runtime.prepared import Prepared
from concertina.runtime.remote_memory import RemoteMemory
from concertina.runtime.segments import Segment, host_of, is_here
from concertina.runtime.state_map import make_room
from concertina.runtime.together import Together
from concertina.runtime.ways import SHARES, way_in

TURN_SECONDS = 120.0  # that a newcomer waits for others to get the state before it
AGAIN_SECONDS = 0.5  # between two tries to read over a network
TRIES = 5  # per change, before the state is handed over at the switch instead
MOVES = 3  # of a member's state to other memory, before it is left to the switch

Share = tuple[Desk, int, int]  # of a member, and which of the shares it gives: from, up to


class Sources:
    """Those who train before one change; OSError if one of them is gone already."""

    def __init__(self, formation: Formation, number: int, own: Desk, prepared: Prepared, virtual: int) -> None:
        self._formation = formation
        self._number = number
        self._own = own
        self._prepared = prepared
        self._virtual = virtual
        self.desks = {member: Desk.open(address, virtual) for member, address in formation.sources}
        self._way = way_in(formation, number, self._racks())
        self._followed: list[tuple[Desk, str]] = []  # members, and where it is written down where their state lies
        self._before: list[Desk] = []  # of newcomers whose turn comes before ours
        self._asked_at = time.monotonic()  # for our turn
        self._tries = 0
        self._moves = 0
        self._try_at = 0.0
        self._begun = False
        self.gone = False  # their state can no longer be read; the master will say whom to follow next
        self.handed_over = ""  # why all of the state is to be handed over at the switch; empty: it is not

    def _racks(self) -> dict[str, int]:
        """Where the hosts of members and newcomers stand, as far as they have said."""
        if not self._own.rack:
            return {}
        desks = list(self.desks.values())
        for number in self._formation.joiners:
            with contextlib.suppress(OSError):  # it is gone; so is this change
                desks.append(self._open(number))
        return {host_of(desk.segment.address): desk.rack for desk in desks}

    def _open(self, member: int) -> Desk:
        """Of one who will train after the change."""
        at = self._formation.members.index(member)
        return Desk.open(self._formation.desks[at], self._virtual)

    # -- what is so --------------------------------------------------------------------------------------------------

    @property
    def wants_beginning(self) -> bool:
        """Whether nobody is followed yet, or no more where its state lies now."""
        return not self._begun or (self.have_moved and self._moves < MOVES)

    @property
    def have_moved(self) -> bool:
        """Whether a member that we follow keeps its state in other memory than it said."""
        return any(desk.described[1] != described for desk, described in self._followed)

    @property
    def by_network(self) -> bool:
        return self._way is not None and self._way.remote

    @property
    def followed(self) -> list[int]:
        """Numbers of the members whose memory we read."""
        return [n for n, desk in self.desks.items() if any(desk is followed for followed, _ in self._followed)]

    # -- beginning ---------------------------------------------------------------------------------------------------

    def may_begin(self) -> bool:
        """Whether all members have written down where their state lies, and it is our turn to read it."""
        ready = all(desk.described[0] == self._formation.generation for desk in self.desks.values())
        return ready and time.monotonic() >= self._try_at and self._is_our_turn()

    def _is_our_turn(self) -> bool:
        """Transfers that would get into each other's way come one after another."""
        if self._way is None or not self._way.after or time.monotonic() > self._asked_at + TURN_SECONDS:
            return True
        try:
            self._before = self._before or [self._open(number) for number in self._way.after]
        except OSError:
            return True  # one of them is gone; so is this change
        return all(desk.clock > 0 for desk in self._before)

    def begin(self) -> CatchUp | Together | None:
        """Follows members from here on; None if that cannot be: now, or at all (`handed_over`)."""
        self._moves += self.have_moved
        self._begun, self.handed_over = True, ""
        shares = self._shares()
        self._followed = [(desk, desk.described[1]) for desk, _, _ in shares]
        catch_up = None
        try:
            catch_up = self._follow(shares)
            if catch_up is None:
                self.handed_over = "it is kept in a form that nobody else can use"
            elif self._moves >= MOVES:
                catch_up.leave_to_switch("the script keeps its state in other memory again and again")
        except OSError as error:
            if self.by_network:
                self.lost_sight(error)
            else:
                self.handed_over = f"the memory of a member cannot be read ({error})"
        self._say_whether_handed_over()
        return catch_up

    def _shares(self) -> list[Share]:
        if self._way is None:  # on one host each newcomer follows another member
            desks = [desk for _, desk in sorted(self.desks.items())]
            return [(desks[self._number % len(desks)], 0, SHARES)]
        return [(self.desks[number], first, end) for number, first, end in self._way.sources]

    def _follow(self, shares: list[Share]) -> CatchUp | Together | None:
        """None if their state is in a form that nobody else can use."""
        made: list[CatchUp] = []
        room: list[Tensor] = []
        form: Any = None
        try:
            for desk, first, end in shares:
                memory, description = read_description(desk)
                if description is None:
                    return None
                if isinstance(memory, MemberMemory):
                    _try_to_read(memory, self._prepared, description)
                if form is None:
                    form = _form(description)
                    room = [tensor for _, tensor in make_room(self._prepared, description)]
                if _form(description) != form:
                    memory.close()
                    raise OSError("one member has told anew where its state lies, and another has not yet")
                share = (first, end, SHARES)
                awaited = partial(self._awaits_us, desk)
                made.append(CatchUp(memory, desk, self._prepared, description, room, share, awaited))
        except OSError:
            for catch_up in made:
                catch_up.close()
            raise
        return made[0] if len(made) == 1 else Together(made)

    def _awaits_us(self, desk: Desk) -> bool:
        """Whether the member may be waiting for this change with the step that it is in."""
        hold_at = self._formation.hold_at
        return hold_at > 0 and desk.clock // 2 + 1 >= hold_at

    def lost_sight(self, error: OSError) -> None:
        """A network may fail for a moment; a member that has ended is missed by the master, too. One that lives has
        given back memory that we were about to read, and will say where its state lies now."""
        if not self.by_network and error.errno == errno.ESRCH:
            self.gone = True
            return
        self._followed = []
        if not self.by_network:
            self._moves += 1
            self._begun, self._try_at = False, time.monotonic() + AGAIN_SECONDS
            return
        self._tries += 1
        if self._tries < TRIES:
            self._begun, self._try_at = False, time.monotonic() + AGAIN_SECONDS
            return
        self.handed_over = f"the memory of a member on another host cannot be read ({error})"
        self._say_whether_handed_over()

    def _say_whether_handed_over(self) -> None:
        if self._own.cannot_read != bool(self.handed_over):
            self._own.cannot_read = bool(self.handed_over)


def read_description(desk: Desk) -> tuple[MemberMemory | RemoteMemory, Any]:
    """The memory of the process whose desk it is, and where in it the state lies; None if nobody else can use it."""
    segment = Segment.open(desk.described[1])
    size = int.from_bytes(segment.memory[:8], "little")
    found = json.loads(segment.memory[8 : 8 + size])
    state = found["memory"]
    if state is None or is_here(desk.segment.address):
        return MemberMemory(found["pid"], () if state is None else state["shared"]), state
    return RemoteMemory(found["served"]), state


def _form(description: dict[str, Any]) -> list[Any]:
    """All that is said of the state but for where it lies."""
    return [[*item[:3], *item[4:]] for item in description["items"]]


def _try_to_read(memory: MemberMemory, prepared: Prepared, description: dict[str, Any]) -> None:
    """A byte of every kind of memory that the state lies in; OSError if one of them is closed to us."""
    here = {"cpu": torch.device("cpu"), "cuda": next(prepared.model.parameters()).device}
    addresses = {kind: address for _, _, _, address, kind, *_ in description["items"]}
    for kind, address in addresses.items():
        memory.read(address, torch.empty(1, dtype=torch.uint8, device=here[kind]))
