"""Workers onto the hosts of a backend that has several."""

from collections.abc import Callable, Mapping, Sequence

from concertina.backends.base import Seat
from concertina.core.errors import UsageError
from concertina.core.seats import Host, choose


class HostSeats:
    """Asked where a new worker goes; `taken` is the run's own book of who sits where."""

    def __init__(self, hosts: Callable[[], Sequence[Host]]) -> None:
        self._hosts = hosts
        self.taken: Mapping[int, Seat] = {}

    @property
    def room(self) -> int:
        return sum(host.slots for host in self._hosts())

    def check_room(self, workers: int) -> None:
        hosts, room = self._hosts(), self.room
        if room < workers:
            raise UsageError(
                f"{workers} workers on {len(hosts)} hosts with {room} slots together: "
                f"use --workers {room} or fewer, or add hosts"
            )

    def __call__(self, worker: int) -> Seat | None:
        host = choose(self._hosts(), {number: seat.node for number, seat in self.taken.items()})
        return None if host is None else Seat(node=host.name)
