"""The machines of a Ray cluster as nodes. Keepers and masters are processes of this machine; workers are anywhere."""

from dataclasses import replace
from pathlib import Path

from concertina.backends.ray import connect, disconnect, ray_nodes
from concertina.cluster.backend import CPU, LocalCluster
from concertina.cluster.records import NodePhase, NodeState

LOST = "Ray holds this machine for dead"


class RayCluster(LocalCluster):
    """A machine is known by its address: when it comes back it is the same one, whatever Ray calls it then."""

    def __init__(self, store: str, state_dir: Path, address: str = "auto") -> None:
        super().__init__(store, state_dir, 0, CPU)
        self._own_connection = connect(address)
        self._known: dict[str, NodeState] = {}

    @property
    def name(self) -> str:
        return "ray"

    def nodes(self) -> tuple[NodeState, ...]:
        """Every machine that was ever seen, by address."""
        try:
            alive = {host.address: host for host in ray_nodes()}
        except OSError:
            return tuple(self._known.values())  # Ray's head does not answer: what is known is as good as any guess
        for address, host in alive.items():
            self._known[address] = NodeState(
                id=address, device_type=host.device or CPU, slots=host.slots, address=address
            )
        for address, node in self._known.items():
            if address not in alive:
                self._known[address] = replace(node, phase=NodePhase.LOST, reason=LOST)
        return tuple(self._known[address] for address in sorted(self._known))

    def close(self) -> None:
        super().close()
        if self._own_connection:
            disconnect()
