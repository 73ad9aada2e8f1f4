"""How the members of a gloo group on several hosts learn each other's addresses: in a meeting.

gloo asks for a store: every member puts its addresses there and waits for those of the others. A file is of no use
between hosts, and torch's own server would be one more port that anybody may talk to. The fabric knows all members.
"""

import json
from datetime import timedelta
from typing import Any

from concertina.core.errors import ConcertinaError
from concertina.runtime.fabric import Fabric
from concertina.runtime.torch_internals import Store


class FabricStore(Store):  # type: ignore[misc]
    """Good for one group: what was put before the first question is all that ever will be."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__()
        self._fabric = fabric
        self._put: dict[str, bytes] = {}
        self._found: dict[str, bytes] | None = None
        self.failure: ConcertinaError | None = None  # gloo would tell of it in words of its own

    def set(self, key: str, value: Any) -> None:
        self._put[key] = bytes(value)

    def get(self, key: str) -> bytes:
        found = self._all()
        if key not in found:
            raise KeyError(f"no member of the group has put {key!r}")
        return found[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _all(self) -> dict[str, bytes]:
        if self._found is None:
            mine = json.dumps({key: value.hex() for key, value in self._put.items()})
            try:
                everybody = self._fabric.gather_bytes(mine.encode())
            except ConcertinaError as error:
                self.failure = error
                raise
            self._found = {k: bytes.fromhex(v) for said in everybody for k, v in json.loads(said).items()}
        return self._found
