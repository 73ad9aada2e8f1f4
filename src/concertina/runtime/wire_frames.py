"""What workers of different hosts say to each other about their memory, as bytes. Pure.

A reader connects to the owner of memory, both prove that they know the job's key, the reader names segments, and from
then on the owner sends their contents and every change, in the order in which it was made. Nothing is executed or
unpickled; every length is checked before memory is set aside for it.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from concertina.core.errors import ConcertinaError

MAGIC = b"concertina-wire1"
NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST = 1 << 20  # bytes of contents in one frame
LARGEST = 1 << 42  # bytes of one segment

_HEAD = struct.Struct("<BxxxIqI")  # kind, segment, offset or size, length of what follows
_NUMBER = struct.Struct("<q")
HELLO_BYTES = len(MAGIC) + NONCE_BYTES  # of the owner, who speaks first
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES + _NUMBER.size  # of the reader
WELCOME_BYTES = PROOF_BYTES + _NUMBER.size  # of the owner again


class Kind(IntEnum):
    OPEN = 1  # reader: send me this segment
    SIZE = 2  # owner: it is so large; its contents follow
    BYTES = 3  # owner: contents or a change
    WHOLE = 4  # owner: all contents have been sent
    GONE = 5  # owner: there is no such segment
    FOLLOW = 16  # reader: from here on this connection is for reading memory of yours (`read_frames.py`)


class WireError(ConcertinaError):
    """The other side does not speak as agreed; the connection is of no use any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    segment: int
    at: int = 0  # offset; in SIZE, the size
    data: bytes = b""


def pack(kind: Kind, segment: int, at: int = 0, data: bytes = b"", size: int = 0) -> bytes:
    """A frame, or with `size` its head, which that many bytes are to follow."""
    return _HEAD.pack(kind, segment, at, size or len(data)) + data


@dataclass(slots=True)
class Parser:
    """Cuts a stream of bytes into frames."""

    _pending: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises WireError at the first thing that cannot be."""
        self._pending += data
        at = 0
        try:
            while len(self._pending) - at >= _HEAD.size:
                kind, segment, offset, length = _HEAD.unpack_from(self._pending, at)
                if length > LONGEST or not 0 <= offset <= LARGEST:
                    raise WireError(f"a frame of {length} bytes at {offset}: at most {LONGEST} are agreed")
                if len(self._pending) - at < _HEAD.size + length:
                    return
                begin = at + _HEAD.size
                at = begin + length
                yield Frame(_kind(kind), segment, offset, bytes(self._pending[begin:at]))
        finally:
            del self._pending[:at]


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise WireError(f"a frame of kind {number}, which does not exist") from None


# -- who is there ----------------------------------------------------------------------------------------------------


def hello(nonce: bytes) -> bytes:
    return MAGIC + nonce


def answer(key: str, greeting: bytes, nonce: bytes, number: int) -> bytes:
    """The reader's: it knows the key, and is worker `number`."""
    if not greeting.startswith(MAGIC) or len(greeting) != HELLO_BYTES:
        raise WireError("whoever listens there is no worker of ours")
    said = nonce + _NUMBER.pack(number)
    return said + _proof(key, b"reader", greeting, said)


def check_answer(key: str, greeting: bytes, said: bytes) -> int:
    """The number of a reader that knows the key."""
    body, proof = said[:-PROOF_BYTES], said[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"reader", greeting, body)):
        raise WireError("somebody connected who does not know the job's key")
    number: int = _NUMBER.unpack(body[NONCE_BYTES:])[0]
    return number


def welcome(key: str, greeting: bytes, said: bytes, number: int) -> bytes:
    mine = _NUMBER.pack(number)
    return mine + _proof(key, b"owner", greeting, said + mine)


def check_welcome(key: str, greeting: bytes, said: bytes, back: bytes, number: int) -> None:
    """Whether the owner knows the key and is the worker that we look for."""
    mine, proof = back[: _NUMBER.size], back[_NUMBER.size :]
    if not hmac.compare_digest(proof, _proof(key, b"owner", greeting, said + mine)):
        raise WireError("whoever listens there does not know the job's key")
    if _NUMBER.unpack(mine)[0] != number:
        raise WireError(f"there is worker {_NUMBER.unpack(mine)[0]} now where worker {number} was")


def _proof(key: str, role: bytes, greeting: bytes, said: bytes) -> bytes:
    return hmac.new(key.encode(), role + greeting + said, hashlib.sha256).digest()
