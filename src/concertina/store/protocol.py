"""What every store can do, and the rules they share. Values in, values out; no store is known here.

A store maps keys to bytes. Every change gets a revision, a number that only grows and is never used twice in the life
of a store: it orders all changes, names a version of a key for compare-and-set, and says where to watch on from.
All calls may be made from several threads. Every wait is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from concertina.core.errors import StoreRequestError

Clock = Callable[[], float]

ABSENT = 0  # the revision to expect of a key that must not be there
MAX_KEY = 512  # characters
MAX_VALUE = 1 << 20  # bytes; etcd takes requests of 1.5 MiB, and what works on one store should work on all
MAX_TTL = 365 * 86400.0  # seconds
KEEP_CHANGES = 4096  # that a watch can go back; etcd keeps as many as its operator says
KEEP_BYTES = 64 << 20  # of values in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key as it is now."""

    key: str
    value: bytes
    revision: int  # of the change that wrote this value
    lease: int | None = None  # the key vanishes with this lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All keys under a prefix at one moment, in order. A watch `after=revision` misses nothing and repeats nothing."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key was written, or deleted when there is no value."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Keys attached to it vanish when it is not kept alive for `ttl` seconds."""

    id: int
    ttl: float  # as granted: never less than was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Do it only while this other key still stands at this revision."""

    key: str
    revision: int


class Watch(Protocol):
    """The changes under a prefix, each once and in order, whatever happens to the connection meanwhile."""

    @property
    def revision(self) -> int:
        """All changes up to here were handed out: open a new watch `after` it to go on."""
        ...

    def poll(self, limit_s: float) -> tuple[Change, ...]:
        """The next changes; empty when there were none within the limit. Changes of one revision come together."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A small, strictly ordered map with leases."""

    def get(self, key: str) -> Entry | None: ...

    def list_prefix(self, prefix: str) -> Listing:
        """Every key that starts with `prefix` (all keys when it is empty)."""
        ...

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        """Write whatever was there before. Without a lease the key is freed from the one it had. Gives the revision."""
        ...

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None,
        lease: Lease | None = None,
        guard: Guard | None = None,
    ) -> int | None:
        """Write if the key stands at revision `expected` (ABSENT: is not there; None: whatever) and the guard holds.

        Gives the new revision, or None when nothing was written.
        """
        ...

    def delete(self, key: str, *, expected: int | None = None, guard: Guard | None = None) -> bool:
        """Whether the key was there, stood at `expected`, and is gone now."""
        ...

    def grant(self, ttl: float) -> Lease: ...

    def keep_alive(self, lease: Lease) -> None:
        """The lease has its whole time again. Raises LeaseGone when it is too late."""
        ...

    def revoke(self, lease: Lease) -> None:
        """End it now. Ending what is over already is no error."""
        ...

    def watch(self, prefix: str, *, after: int) -> Watch:
        """Changes with a revision above `after`, which may lie in the past."""
        ...

    def close(self) -> None:
        """Closes its watches too. Leases are not revoked."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_key(key: str) -> None:
    """Keys are printable, so that the character behind all others can close a range in every store."""
    if not key or len(key) > MAX_KEY or not key.isprintable():
        seen = repr(key if len(key) <= 40 else key[:40] + "...")
        raise StoreRequestError(
            f"key {seen} ({len(key)} characters): needed 1 to {MAX_KEY} printable characters, as in 'jobs/7/state'"
        )


def check_prefix(prefix: str) -> None:
    if prefix:
        check_key(prefix)


def check_value(key: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise StoreRequestError(f"value of {key!r} is {type(value).__name__}, needed bytes: encode it first")
    if len(value) > MAX_VALUE:
        raise StoreRequestError(
            f"value of {key!r} has {len(value)} bytes, needed at most {MAX_VALUE}: keep it in a file and store its name"
        )


def check_ttl(ttl: float) -> None:
    if not 0 < ttl <= MAX_TTL:
        raise StoreRequestError(f"a lease of {ttl} s: needed more than 0 and at most {MAX_TTL:.0f} seconds")
