"""What goes wrong if one ingredient of the recipe is missing. Each entry removes one from the running process."""

from collections.abc import Sequence
from typing import Any

import torch

from concertina.runtime import reduce, virtual
from concertina.runtime.accumulation import Accumulation
from concertina.runtime.buckets import BucketLayout
from concertina.runtime.buffers import FlatBuffers
from concertina.runtime.contexts import Contexts
from concertina.runtime.gradients import Gradients
from concertina.runtime.rng import RandomState
from concertina.runtime.virtual import VirtualEngine


def no_rebuild() -> None:
    def keep(self: BucketLayout, order: object) -> None:
        self.rebuilt = True

    BucketLayout.rebuild = keep


def random_state_lost_at_change() -> None:
    unpack = Contexts.unpack

    def unpack_with_another_state(self: Contexts, v: int, record: bytes, loaders: Sequence[Any]) -> None:
        unpack(self, v, record, loaders)
        torch.manual_seed(99)
        self[v].random = RandomState.capture()

    Contexts.unpack = unpack_with_another_state


def divide_by_p() -> None:
    Accumulation.lives_in_bucket = lambda self, index, grad: True
    reduce.LocalFold.scale = lambda self, factor: [term.div_(round(1 / factor)) for term in self._terms]


def scale_after_the_sum() -> None:
    results, take = reduce.LocalFold.results, Gradients.take

    def take_unscaled(self: Gradients, v: int, index: int, param: torch.Tensor) -> None:
        virtual_workers, self._virtual = self._virtual, 1
        take(self, v, index, param)
        self._virtual = virtual_workers

    def results_scaled(self: reduce.LocalFold) -> list[torch.Tensor]:
        sums = results(self)
        for flat in sums:
            flat.mul_(1.0 / self._virtual)
        return sums

    Gradients.take, reduce.LocalFold.results = take_unscaled, results_scaled
    reduce.LocalFold.scale = lambda self, factor: None


def one_shared_random_state() -> None:
    RandomState.restore = lambda self: None


def one_shared_set_of_buffers() -> None:
    FlatBuffers.load_from = lambda self, saved: None


def rank_order_sum() -> None:
    reduce._chunk_edges = lambda flat, virtual: [0] + [flat.numel()] * virtual


def static_graph_rebuilt_early() -> None:
    BucketLayout.wants_ready_order = property(lambda self: not self.rebuilt)


def rebuild_although_find_unused() -> None:
    BucketLayout.wants_ready_order = property(lambda self: not self.rebuilt)


def buffers_synced_at_every_micro_batch() -> None:
    begin = VirtualEngine.begin_round

    def begin_synced(self: VirtualEngine) -> None:
        self.syncs_buffers = True
        begin(self)

    VirtualEngine.begin_round = begin_synced


def multiply_although_in_bucket() -> None:
    Accumulation.lives_in_bucket = lambda self, index, grad: False


def zeros_for_unused() -> None:
    VirtualEngine._usage = lambda self: None


def data_workers_share_random_state() -> None:
    from concertina.runtime import data

    data.set_lane_state = lambda state: None


LEAVE_OUT = {name: f for name, f in list(globals().items()) if callable(f) and getattr(f, "__module__", "") == __name__}
__all__ = ["LEAVE_OUT", "virtual"]
