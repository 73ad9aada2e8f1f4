"""What a newcomer asks of a member's memory over the network, and how it is answered, as bytes. Pure.

A request names stretches by the addresses that the member has told of; whoever answers looks each of them up among
what it has told of, and reads nothing else. Every number is checked before memory is set aside for it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from concertina.runtime.wire_frames import WireError

MOST_STRETCHES = 1 << 16  # of one request
MOST_BYTES = 1 << 36
NOT_THERE = -1  # instead of a number of steps: it changed meanwhile, or is no longer kept
DIGEST_BYTES = 16

_REQUEST = struct.Struct("<BxxxIq")  # what, how many stretches, number of a note
_STRETCH = struct.Struct("<QQ")  # address, bytes
_REPLY = struct.Struct("<qQ")  # steps that it has seen, bytes that follow
REQUEST_BYTES, STRETCH_BYTES, REPLY_BYTES = _REQUEST.size, _STRETCH.size, _REPLY.size

Stretch = tuple[int, int]  # address, bytes


class What(IntEnum):
    STATE = 1  # as it is between two steps
    DIGEST = 2  # the same, hashed
    GRADIENTS = 3  # with which an optimizer acted, as one of the notes said


@dataclass(frozen=True, slots=True)
class Request:
    what: What
    stretches: int
    note: int


def ask(what: What, stretches: Sequence[Stretch], note: int = 0) -> bytes:
    return _REQUEST.pack(what, len(stretches), note) + b"".join(_STRETCH.pack(*stretch) for stretch in stretches)


def asked(data: bytes) -> Request:
    """The head of a request; its stretches follow."""
    what, stretches, note = _REQUEST.unpack(data)
    if not 0 < stretches <= MOST_STRETCHES:
        raise WireError(f"a request for {stretches} stretches: 1 to {MOST_STRETCHES} are agreed")
    try:
        return Request(What(what), stretches, note)
    except ValueError:
        raise WireError(f"a request of kind {what}, which does not exist") from None


def asked_stretches(data: bytes) -> list[Stretch]:
    found = [(address, size) for address, size in _STRETCH.iter_unpack(data)]
    total = sum(size for _, size in found)
    if total > MOST_BYTES:
        raise WireError(f"a request for {total} bytes: at most {MOST_BYTES} are agreed")
    return found


def reply(steps: int, size: int) -> bytes:
    return _REPLY.pack(steps, size)


def replied(data: bytes, expected: int) -> int:
    """The number of steps that what follows has seen, or NOT_THERE: then nothing follows."""
    steps, size = _REPLY.unpack(data)
    if size != (0 if steps == NOT_THERE else expected):
        raise WireError(f"{size} bytes in answer to a request for {expected}")
    return int(steps)
