"""What a worker keeps where the others can read it, for as long as it lives and after.

* Its virtual workers' *contexts* as they were after every step, so that somebody else can go on with them should this
  worker end. The last few are kept: a worker may die while it writes.
* A *clock* that is odd while parameters or optimizer state change and otherwise says how many steps they have seen, so
  that another process can read them from this one's memory and know what it has read.
* Its *place* in the data, where its host stands, and what a newcomer needs to follow step by step.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from concertina.runtime.segments import Segment

SLOTS = 4  # records kept per virtual worker
SMALL = 1 << 16  # bytes of a record that is remembered, so that it is not written again
META = 1 << 16  # bytes for one note to those who follow
METAS = 16  # of them that are kept

_CLOCK, _NOTED, _SWITCH_GENERATION, _SWITCH_STEP, _OVERWRITTEN, _CANNOT_READ, _RACK, _STOP = range(8)
_PLACE = 8  # epoch, loader, pass, batch
_HANDED = 16  # length of the address of the state handed over, and the address
_DESCRIBED = 32  # generation it was made for, length of the address of a description of the state, and the address
_WORDS = 64
_SLOT_WORDS = 4  # number, final, length, sequence


class Desk:
    """One worker's shared memory. The worker writes, the others read."""

    def __init__(self, segment: Segment, virtual: int, capacity: int) -> None:
        self.segment = segment
        self._virtual = virtual
        self._capacity = capacity
        self.words = memoryview(segment.memory).cast("q")
        self._heads = _WORDS
        self._metas_at = 8 * (_WORDS + virtual * SLOTS * _SLOT_WORDS)
        self._records_at = self._metas_at + METAS * META
        self._written = [0] * virtual
        self._holds: dict[int, bytes] = {}  # by place of a record: what was written there last

    @classmethod
    def create(cls, virtual: int, capacity: int) -> "Desk":
        """`capacity` bytes per context; memory that is never written is never used."""
        capacity = -(-capacity // 64) * 64
        size = 8 * (_WORDS + virtual * SLOTS * _SLOT_WORDS) + METAS * META + virtual * SLOTS * capacity
        return cls(Segment.create(size), virtual, capacity)

    @classmethod
    def open(cls, address: str, virtual: int) -> "Desk":
        segment = Segment.open(address)
        fixed = 8 * (_WORDS + virtual * SLOTS * _SLOT_WORDS) + METAS * META
        capacity = (segment.size - fixed) // (virtual * SLOTS)
        return cls(segment, virtual, capacity // 64 * 64)

    # -- contexts of virtual workers ---------------------------------------------------------------------------------

    def put_context(self, v: int, number: int, record: bytes, final: bool) -> bool:
        """Keeps virtual worker v's context of recovery point `number`; False if there is no room for it."""
        if len(record) > self._capacity:
            return False
        slot = self._written[v] % SLOTS
        self._written[v] += 1
        head, at = self._head(v, slot), self._record(v, slot)
        self.words[head] = -1  # torn until the last line
        self.segment.push(8 * head, 8)
        if self._holds.pop(at, None) is not record:
            self.segment.memory[at : at + len(record)] = record
            self.segment.push(at, len(record))
        if len(record) <= SMALL:
            self._holds[at] = record
        self.words[head + 1] = int(final)
        self.words[head + 2] = len(record)
        self.words[head + 3] = self._written[v]
        self.words[head] = number
        self.segment.push(8 * head, 8 * _SLOT_WORDS)
        return True

    def make_final(self, v: int, number: int) -> bool:
        """The newest record of that recovery point stays as it is; False if there is none."""
        head = self._head(v, (self._written[v] - 1) % SLOTS)
        if self.words[head] != number:
            return False
        self.words[head + 1] = 1
        self.segment.push(8 * (head + 1), 8)
        return True

    def context(self, v: int, number: int) -> tuple[bytes, bool] | None:
        """The newest record of that recovery point, and whether it is final."""
        found = []
        for slot in range(SLOTS):
            head = self._head(v, slot)
            if self.words[head] == number and self.words[head + 3]:  # a slot that was never used is all zeros
                found.append((self.words[head + 3], slot))
        if not found:
            return None
        slot = max(found)[1]
        head, at = self._head(v, slot), self._record(v, slot)
        return self.segment.memory[at : at + self.words[head + 2]], bool(self.words[head + 1])

    def _head(self, v: int, slot: int) -> int:
        return self._heads + (v * SLOTS + slot) * _SLOT_WORDS

    def _record(self, v: int, slot: int) -> int:
        return self._records_at + (v * SLOTS + slot) * self._capacity

    # -- the clock ---------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        return self.words[_CLOCK]

    @clock.setter
    def clock(self, value: int) -> None:
        self.words[_CLOCK] = value
        self.segment.push(8 * _CLOCK, 8)

    # -- where in the data, for those who follow ---------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Epoch, loader, pass of this epoch, batch. A loader of -1: between passes."""
        epoch, loader, number, batch = self.words[_PLACE : _PLACE + 4]
        return epoch, loader, number, batch

    @place.setter
    def place(self, value: tuple[int, int, int, int]) -> None:
        for k, word in enumerate(value):
            self.words[_PLACE + k] = word
        self.segment.push(8 * _PLACE, 32)

    @property
    def rack(self) -> int:
        """A number that hosts near each other have in common; 0: nobody has said."""
        return self.words[_RACK]

    def say_rack(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self.words[_RACK] = int.from_bytes(digest, "little") if name else 0
        self.segment.push(8 * _RACK, 8)

    @property
    def cannot_read(self) -> bool:
        """A newcomer's: it may not look into the members' memory and needs all of the state handed over."""
        return bool(self.words[_CANNOT_READ])

    @cannot_read.setter
    def cannot_read(self, value: bool) -> None:
        self.words[_CANNOT_READ] = int(value)
        self.segment.push(8 * _CANNOT_READ, 8)

    @property
    def stop_asked(self) -> int:
        """The recovery point from which on this worker's script has asked for the end of training; 0 if it has not."""
        return self.words[_STOP]

    @stop_asked.setter
    def stop_asked(self, point: int) -> None:
        self.words[_STOP] = point
        self.segment.push(8 * _STOP, 8)

    # -- what a follower needs of a step -----------------------------------------------------------------------------

    def describe(self, generation: int, address: str) -> None:
        """Where it is written down in which memory of this process the state lies."""
        raw = address.encode()
        at = 8 * (_DESCRIBED + 2)
        self.segment.memory[at : at + len(raw)] = raw
        self.words[_DESCRIBED + 1] = len(raw)
        self.words[_DESCRIBED] = generation
        self.segment.push(8 * _DESCRIBED, 16 + len(raw))

    @property
    def described(self) -> tuple[int, str]:
        at = 8 * (_DESCRIBED + 2)
        return self.words[_DESCRIBED], self.segment.memory[at : at + self.words[_DESCRIBED + 1]].decode()

    @property
    def overwritten(self) -> int:
        """The step whose gradients take, or have taken, the place of those before."""
        return self.words[_OVERWRITTEN]

    @overwritten.setter
    def overwritten(self, step: int) -> None:
        self.words[_OVERWRITTEN] = step
        self.segment.push(8 * _OVERWRITTEN, 8)

    def note(self, entry: Mapping[str, Any]) -> None:
        """For those who follow: what an optimizer is about to do, or that a step is over. Has a `step`, at least."""
        data = json.dumps(entry, separators=(",", ":")).encode()
        if len(data) + 8 > META:
            data = json.dumps({"step": entry["step"], "too_long": True}).encode()
        number = self.words[_NOTED] + 1
        at = self._metas_at + (number % METAS) * META
        self.segment.memory[at + 8 : at + 8 + len(data)] = data
        self.words[at // 8] = len(data)
        self.segment.push(at, 8 + len(data))
        self.words[_NOTED] = number
        self.segment.push(8 * _NOTED, 8)

    @property
    def noted(self) -> int:
        """How many notes there have been."""
        return self.words[_NOTED]

    def read_note(self, number: int) -> dict[str, Any] | None:
        """None if it has been overwritten."""
        at = self._metas_at + (number % METAS) * META
        data = self.segment.memory[at + 8 : at + 8 + self.words[at // 8]]
        if self.noted > number + METAS - 2:  # the next note but one may be in the making, over this one
            return None
        found: dict[str, Any] = json.loads(data)
        return found

    # -- the change to another generation ----------------------------------------------------------------------------

    def announce_switch(self, generation: int, step: int, address: str) -> None:
        """After `step` this generation is over; the state that is not on anybody's desk lies at `address`."""
        raw = address.encode()
        self.words[_HANDED] = len(raw)
        self.segment.memory[8 * (_HANDED + 1) : 8 * (_HANDED + 1) + len(raw)] = raw
        self.words[_SWITCH_STEP] = step
        self.segment.push(8 * _SWITCH_STEP, 8)
        self.segment.push(8 * _HANDED, 8 + len(raw))
        self.words[_SWITCH_GENERATION] = generation
        self.segment.push(8 * _SWITCH_GENERATION, 8)

    @property
    def switch(self) -> tuple[int, int, str]:
        """Generation and step of the newest change announced here, and where the state is; zeros before any."""
        generation, step, size = self.words[_SWITCH_GENERATION], self.words[_SWITCH_STEP], self.words[_HANDED]
        raw = self.segment.memory[8 * (_HANDED + 1) : 8 * (_HANDED + 1) + size]
        return generation, step, raw.decode()


def newest_context(desks: Sequence[Desk], v: int, number: int) -> tuple[bytes, bool] | None:
    """Virtual worker v's context at a recovery point, from whichever desk has it; a final one before another."""
    found = [record for desk in desks if (record := desk.context(v, number)) is not None]
    return max(found, key=lambda record: record[1], default=None)


def is_final(desk: Desk, v: int, number: int) -> bool:
    """Whether the context of that recovery point is there as it will stay."""
    found = desk.context(v, number)
    return found is not None and found[1]
