"""What all stores and watches do alike, whatever they stand on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from concertina.store.protocol import Guard, Lease


class Closing(ABC):
    """Is closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BaseStore(Closing):
    """See protocol.Store."""

    @abstractmethod
    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None,
        lease: Lease | None = None,
        guard: Guard | None = None,
    ) -> int | None: ...

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        revision = self.compare_and_set(key, value, expected=None, lease=lease)
        assert revision is not None
        return revision
