"""Choosing how gradients are summed."""

from pathlib import Path

from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.gloo_contexts import ContextsReducer, GlooContexts, follows_ring_order
from concertina.runtime.group import Group
from concertina.runtime.reduce import LocalFold, NativeAllReduce, Reducer, VirtualRing
from concertina.runtime.shared_fold import SharedFold

CHOICES = ("auto", "shared", "ring", "contexts")


class ReducerFactory:
    """Makes the reducer for a layout; asks this build of gloo once in which order it adds."""

    def __init__(self, env: WorkerEnv, group: Group | None) -> None:
        if env.reduction not in CHOICES:
            raise UsageError(f"reduction {env.reduction!r} is not one of {', '.join(CHOICES)}")
        self._env = env
        self._group = group
        self._contexts = self._open_contexts()

    def _open_contexts(self) -> GlooContexts | None:
        """The fallback, opened if asked for or if the probe finds another order than ours."""
        env = self._env
        if env.reduction in ("ring", "shared") or env.virtual <= 2 or not env.run_dir or env.placement.one_each:
            return None  # two terms have only one order; gloo itself needs no probe
        rendezvous = Path(env.run_dir) / f"contexts-{env.generation}"
        contexts = GlooContexts(rendezvous, env.virtual, env.placement.workers[env.worker])
        keep = env.reduction == "contexts" or not follows_ring_order(contexts)
        return contexts if keep else None

    def make(self, layout: BucketLayout) -> Reducer:
        placement = self._env.placement
        if self._contexts is not None:
            return ContextsReducer(layout, placement, self._env.worker, self._contexts)
        if self._group is None:
            return LocalFold(layout, self._env.virtual)
        if placement.one_each:
            return NativeAllReduce(layout, self._group)
        in_host_memory = not any(param.is_cuda for param in layout.params)
        if in_host_memory and self._env.reduction != "ring":  # all workers of a job are on one machine so far
            return SharedFold(layout, placement, self._group)
        return VirtualRing(layout, placement, self._group)
