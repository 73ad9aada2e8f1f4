"""Hosts for `benchmarks.rescale --hosts N`: network namespaces of this machine, with one slot each.

Everything between workers goes over TCP, and nothing through shared memory. With a rate, each host's link carries so
much in each direction and no more. Needs root and iproute2.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from concertina.backends.base import Seat
from concertina.core.seats import choose

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

COMMAND_SECONDS = 20.0

Seats = Callable[[Mapping[int, Seat]], Seat | None]


@contextmanager
def several_hosts(count: int, folder: Path, rate: str) -> Iterator[tuple[Any, Seats]]:
    """A backend of so many hosts, and where the next worker goes beside those that are seated."""
    from namespaces import network  # of the tests
    from several_hosts import NamespaceHosts

    with network(count) as net:
        if rate:
            for host in net.hosts:
                _limit(rate, host.link)
                _limit(rate, "eth0", host.prefix)
        backend = NamespaceHosts(net, folder)

        def seat(seated: Mapping[int, Seat]) -> Seat | None:
            host = choose(backend.hosts(), {number: seat.node for number, seat in seated.items()})
            return None if host is None else Seat(node=host.name)

        try:
            yield backend, seat
        finally:
            backend.close()


def _limit(rate: str, device: str, prefix: Sequence[str] = ()) -> None:
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    subprocess.run([*prefix, "tc", "qdisc", "add", "dev", device, *limit], check=True, timeout=COMMAND_SECONDS)
