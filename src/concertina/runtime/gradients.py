"""Gradients on their way: out of `.grad` into the reducer's buckets, and back into `.grad` as sums."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concertina.runtime.accumulation import Accumulation
from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.reduce import LocalFold, Reducer
from concertina.runtime.turn import Turn, check_dense


class Gradients:
    """Moves the gradients of one model; scaled on the way as DDP scales them."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        layout: BucketLayout,
        options: DdpOptions,
        virtual: int,
        accumulation: Accumulation,
    ) -> None:
        self._params = params
        self._names = names
        self._layout = layout
        self._options = options
        self._virtual = virtual
        self._accumulation = accumulation
        self._reducer: Reducer | None = None
        self._bucket_of: list[tuple[int, int]] = []  # by parameter: bucket, and position in it
        self._pending: list[int] = []  # parameters that each bucket still waits for
        self._filling: dict[int, list[Tensor]] = {}  # views of the buckets that this turn is filling
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # by (address, bucket)
        self.before_filling: Callable[[], None] = lambda: None
        self.observer: Callable[[int, int, Tensor], None] | None = None  # (virtual worker, parameter, gradient)

    @property
    def reducer(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    def use(self, reducer: Reducer | None) -> dict[tuple[int, int], list[Tensor]]:
        """From now on, gradients go there. The views of before, with which large memory may go."""
        before, self._views = self._views, {}
        self._reducer, self._filling = reducer, {}
        self._bucket_of = [(-1, -1)] * len(self._params)
        for b, members in enumerate(self._layout.buckets):
            for k, i in enumerate(members):
                self._bucket_of[i] = (b, k)
        return before

    def begin_turn(self) -> None:
        self._pending = [len(members) for members in self._layout.buckets]
        self._filling = {}

    def take(self, v: int, index: int, param: Tensor) -> None:
        """Moves a gradient, scaled as DDP scales it, from the parameter into its bucket."""
        grad = param.grad
        bucket, position = self._bucket_of[index]
        views = self._filling.get(bucket) or self._open(v, bucket)
        view = views[position]
        if grad is None:
            view.zero_()
        else:
            check_dense(self._names[index], grad)
            if self._accumulation.lives_in_bucket(index, grad):
                torch.div(grad, self._virtual, out=view)
            else:
                torch.mul(grad, 1.0 / self._virtual, out=view)
            if self.observer is not None:
                self.observer(v, index, grad)
            param.grad = None
        self._pending[bucket] -= 1
        if self._pending[bucket] == 0:
            self.reducer.ready(v, bucket)

    def take_all(self, turn: Turn) -> None:
        """`take` for all parameters at once, in a few calls of torch."""
        reducer = self._reducer
        assert isinstance(reducer, LocalFold)
        order = [i for bucket in self._layout.buckets for i in bucket]
        grads: list[Any] = [self._params[i].grad for i in order]
        turn.ready = {i for i, g in zip(order, grads, strict=True) if g is not None}
        if len(turn.ready) < len(grads) or self._options.gradient_as_bucket_view:
            taken, turn.ready = turn.ready, set()
            for i in sorted(taken):
                turn.ready.add(i)
                self.take(turn.virtual_worker, i, self._params[i])
            return
        for i, grad in zip(order, grads, strict=True):
            check_dense(self._names[i], grad)
        if self._virtual == 1:
            return  # a single term is the sum, where it is
        views = [view for b in range(len(self._layout.buckets)) for view in self._open(turn.virtual_worker, b)]
        torch._foreach_copy_(views, grads)
        reducer.scale(1.0 / self._virtual)
        reducer.all_ready(turn.virtual_worker)
        for p in self._params:
            p.grad = None

    def _open(self, v: int, bucket: int) -> list[Tensor]:
        self.before_filling()
        self._filling[bucket] = self._views_of(bucket, self.reducer.buffer(v, bucket))
        return self._filling[bucket]

    def _views_of(self, bucket: int, memory: Tensor) -> list[Tensor]:
        """One view per parameter; reducers use the same memory at every step, so they are made once."""
        key = (memory.data_ptr(), bucket)
        if key not in self._views:
            self._views[key] = self._layout.views(bucket, memory)
        return self._views[key]

    def hand_back(self, taken_at_end: bool, used: list[bool] | None) -> None:
        """The sums become the parameters' gradients; of those that nobody used, DDP leaves what was there."""
        results = self.reducer.results()
        if self._virtual == 1 and taken_at_end and not self._options.gradient_as_bucket_view:
            return  # `take_all` has left the gradients in place
        for b, flat in enumerate(results):
            for i, view in zip(self._layout.buckets[b], self._views_of(b, flat), strict=True):
                in_use = used is None or used[i]
                self._params[i].grad = view if in_use else self._accumulation.left_by_last_step(i)
