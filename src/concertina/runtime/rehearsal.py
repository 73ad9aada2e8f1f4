"""A newcomer runs the loop's body once before it is let in, so that nobody waits for what a first time takes.

Libraries load their kernels, memory is taken, compilers compile. The turn counts for nothing: optimizers and all that
acts once per step do nothing in it, what it draws and what it does to buffers and gradients is undone, and everything
else that belongs to the job is replaced when the newcomer is let in. A job that goes on from a checkpoint at the end of
a loop does the same, since the script may use after the loop what its body sets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from concertina.runtime.data import Feed
from concertina.runtime.device_memory import finish_work
from concertina.runtime.digest import ParameterDigest
from concertina.runtime.rng import RandomState, aside
from concertina.runtime.virtual import VirtualEngine


def rehearse(engine: VirtualEngine, feed: Any) -> Iterator[Any]:
    """Gives the loop one batch and cleans up when the body is through. None of a stream: its records are others'."""
    if not isinstance(feed, Feed):
        return
    with aside():
        batch = feed.sample()
    random, buffers = RandomState.capture(), engine.buffers.copy()
    engine.rehearses = True
    try:
        with _gradients_taken(engine.params):
            yield batch
    finally:
        engine.rehearses = False
        _rehearse_reduction(engine)
        finish_work(engine.params)
        for param in engine.params:
            param.grad = None
        engine.buffers.load_from(buffers)
        random.restore()


@contextmanager
def _gradients_taken(params: Sequence[Tensor]) -> Iterator[None]:
    """Takes each gradient as it appears, as a turn does. What a backward asks the C library for, one gradient after
    another, the process then already has; the kernel gives memory slowly, and in the first turn all would wait for it.
    """
    on_host = [param for param in params if param.requires_grad and not param.is_cuda]  # a script may freeze some
    hooks = [param.register_post_accumulate_grad_hook(_take_into(torch.empty_like(param))) for param in on_host]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _take_into(place: Tensor) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def take(param: Tensor) -> None:
        if param.grad is not None and param.grad.layout == place.layout:
            param.grad = place.copy_(param.grad)

    return take


def _rehearse_reduction(engine: VirtualEngine) -> None:
    """The few operations of a turn that are ours: a GPU's kernels, too, are loaded when they are first used."""
    for grad in [param.grad for param in engine.params if param.grad is not None][:1]:
        torch.mul(grad, 0.5, out=torch.empty_like(grad))
    ParameterDigest(engine.layout).compute()
