"""On which host the next worker of a job goes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that workers can be started on."""

    name: str
    address: str  # at which workers on other hosts reach it
    slots: int
    device: str = ""  # the type of its GPUs; empty: cores


def choose(hosts: Sequence[Host], seated: Mapping[int, str]) -> Host | None:
    """The host for one more worker; None if all are full.

    Where most of the job is already, as long as there is room: what need not cross the network is faster. `seated` says
    on which host each worker is, also on hosts that are gone.
    """
    taken = {host.name: sum(1 for name in seated.values() if name == host.name) for host in hosts}
    free = [host for host in hosts if taken[host.name] < host.slots]
    return max(free, key=lambda host: (taken[host.name], host.slots, host.name), default=None)
