"""What the interface is made of. Whoever wires the cluster makes these; nothing here starts anything."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from concertina.cluster.mirror import Mirror
from concertina.server.auth import local_user
from concertina.server.oracle import NoOracle, Oracle
from concertina.store.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    store: Store
    mirror: Mirror  # started by whoever made it
    state: Path  # the folder that has jobs/JOB/events.jsonl and logs/
    host: str = "127.0.0.1"  # that it will be reached at; another than loopback needs tokens
    token_needed: bool = False  # also on loopback
    local_name: str = field(default_factory=local_user)  # who asks on loopback without a token
    script_roots: tuple[Path, ...] = ()  # scripts must lie under one of them; none: anywhere
    oracle: Oracle = field(default_factory=NoOracle)  # answers why, eta and quote
    access_log: Path | None = None  # who asked for what, as JSON lines
    answer_s: float = 5.0  # that a request waits for the controller
    clock: Callable[[], float] = time.time
