"""Choosing how gradients are summed."""

from pathlib import Path

from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.fabric import Fabric
from concertina.runtime.gloo_contexts import ContextsReducer, GlooContexts
from concertina.runtime.group import Group
from concertina.runtime.membership import Generation
from concertina.runtime.reduce import LocalFold, NativeAllReduce, Reducer
from concertina.runtime.shared_fold import SharedFold
from concertina.runtime.virtual_ring import VirtualRing


class ReducerFactory:
    """Makes the reducer of a generation; all its workers call it together."""

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env

    def make(self, layout: BucketLayout, generation: Generation) -> Reducer:
        placement, fabric = generation.placement, generation.fabric
        if self._env.reduction == "contexts" and fabric.size > 1:
            if fabric.spans_hosts:
                raise UsageError("--reduction contexts works on one machine only: leave it out on several hosts")
            contexts = GlooContexts(
                self._rendezvous("contexts", fabric, layout), placement.virtual, placement.workers[fabric.rank]
            )
            return ContextsReducer(layout, placement, contexts, fabric)
        if fabric.size == 1:
            return LocalFold(layout, placement.virtual)
        in_host_memory = not any(param.is_cuda for param in layout.params)
        if in_host_memory and self._env.reduction != "ring" and not fabric.spans_hosts:
            return SharedFold(layout, placement, fabric)
        # Only the native all-reduce is given what lies on a GPU; on the ring, sums travel from host memory.
        device = layout.params[0].device if placement.one_each else None
        group = Group(self._rendezvous("ring", fabric, layout), fabric, self._env.host, device=device)
        return NativeAllReduce(layout, group) if placement.one_each else VirtualRing(layout, placement, group)

    def _rendezvous(self, kind: str, fabric: Fabric, layout: BucketLayout) -> Path:
        """A file that no group has used before: a generation has one layout, and after DDP's rebuild another."""
        return Path(self._env.run_dir) / f"{kind}-{fabric.generation}-{int(layout.rebuilt)}"
