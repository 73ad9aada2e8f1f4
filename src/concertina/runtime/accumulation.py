"""Gradients that outlive a turn: what the script left in `.grad` after a step, and what accumulates under no_sync.

Both are where a virtual worker's next accumulation starts, so both lie in `.grad` again when its turn comes.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from concertina.runtime.contexts import VirtualContext


class Accumulation:
    """What every turn finds in `.grad` at its beginning."""

    def __init__(self, params: Sequence[nn.Parameter], in_buckets: bool) -> None:
        """`in_buckets`: under DDP, gradients would be views of the buckets (gradient_as_bucket_view)."""
        self._params = params
        self._in_buckets = in_buckets
        self._base: list[Tensor | None] | None = None  # gradients that the last step left to all virtual workers
        self._base_kept = False  # for the step that is under way
        self._handed: list[Tensor | None] | None = None  # this turn's copy of them
        self.clears_first = False  # the script sets gradients to None before every backward
        self.must_clear = False  # in this step, which was begun with gradients that nobody kept

    def begin_round(self) -> None:
        """What the user left in `.grad` after a step is where every virtual worker's next accumulation starts."""
        if self._base_kept:
            return
        self._base_kept = True
        left = [p.grad for p in self._params]
        self._base, self.must_clear = None, False
        if all(g is None for g in left):
            return
        if self.clears_first:
            self.must_clear = True
        else:
            self._base = [None if g is None else g.detach().clone() for g in left]
        self.clear()

    def stepped(self) -> None:
        """The gradients were reduced: what is left after this step is looked at anew."""
        self._base_kept = False

    def hand_out(self, context: VirtualContext) -> None:
        """A turn begins."""
        self._handed = None
        if context.grads is not None:
            marks = context.in_bucket or [False] * len(self._params)
            self._handed = [g if mark else None for g, mark in zip(context.grads, marks, strict=True)]
            for p, g in zip(self._params, context.grads, strict=True):
                p.grad = g
            context.grads = context.in_bucket = None
        elif self._base is not None:
            self._handed = [None if g is None else g.clone() for g in self._base]
            for p, g in zip(self._params, self._handed, strict=True):
                p.grad = g

    def keep(self, context: VirtualContext) -> None:
        """A turn ends that did not reduce its gradients."""
        grads = [p.grad for p in self._params]
        if any(g is not None for g in grads):
            context.grads = grads
            context.in_bucket = [g is not None and self.lives_in_bucket(i, g) for i, g in enumerate(grads)]
        self.clear()

    def clear(self) -> None:
        for p in self._params:
            p.grad = None

    def lives_in_bucket(self, index: int, grad: Tensor) -> bool:
        """DDP divides instead of multiplying where the gradient already is the bucket's own memory."""
        return self._in_buckets and self._handed is not None and grad is self._handed[index]

    def left_by_last_step(self, index: int) -> Tensor | None:
        return None if self._base is None else self._base[index]
