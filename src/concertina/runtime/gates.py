"""Optimizer, scheduler and gradient scaler act once per step, although the loop body runs once per virtual worker.

The objects stay the user's own. What is replaced are methods of the instance: before the last local virtual worker's
turn they do nothing, in that turn they do what they always did.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from concertina.core.errors import UnsupportedScript, UsageError
from concertina.runtime.virtual import VirtualEngine


def gate_optimizer(optimizer: Optimizer, engine: VirtualEngine) -> None:
    number = engine.optimizers
    engine.optimizers += 1
    engine.stepping.append(optimizer)
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(getattr(step, "__func__", step))
    def gated_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise UnsupportedScript(
                "optimizer.step(closure) evaluates the model several times per step, which virtual workers cannot "
                "take part in; use an optimizer without a closure"
            )
        if engine.rehearses:
            return None
        if engine.turn is None:
            return step()
        engine.turn.stepped = True
        if not engine.turn.is_last:
            engine.turn.rates_at_step = engine.learning_rates()
            return None
        if not engine.step_done:
            raise UsageError(
                "optimizer.step() before the gradients were reduced: it must follow a backward() outside no_sync()"
            )
        if engine.on_update is None:
            return step()
        engine.on_update(number)
        result = step()
        engine.on_updated()
        return result

    @functools.wraps(zero_grad)
    def watched_zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none and engine.on_update is not None:
            engine.on_spoiled()  # gradients that newcomers would read are being overwritten
        zero_grad(set_to_none=set_to_none)
        turn = engine.turn
        if turn is not None and set_to_none and not turn.backward_done:
            engine.contexts[turn.virtual_worker].cleared_by.add(number)

    # A bound method, since a scheduler that is made later looks for one; setattr, since mypy rightly objects otherwise.
    setattr(optimizer, "step", types.MethodType(gated_step, optimizer))  # noqa: B010
    setattr(optimizer, "zero_grad", watched_zero_grad)  # noqa: B010


def gate_scheduler(scheduler: LRScheduler, engine: VirtualEngine) -> None:
    """A scheduler's state_dict is its whole __dict__, so its method is replaced in a class made for it instead."""
    kind = type(scheduler)

    @functools.wraps(kind.step)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if acts_now(engine):
            kind.step(self, *args, **kwargs)

    members = {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), members)


def gate_average(average: AveragedModel, engine: VirtualEngine) -> None:
    """An average of weights takes them in once per step, after the optimizer."""
    _gate(average, "update_parameters", engine)


def gate_scaler(scaler: GradScaler, engine: VirtualEngine) -> None:
    for method in ("unscale_", "step", "update"):
        _gate(scaler, method, engine)


def acts_now(engine: VirtualEngine) -> bool:
    """Whether what happens once per step happens in this turn."""
    return not engine.rehearses and (engine.turn is None or engine.turn.is_last)


def _gate(thing: object, method: str, engine: VirtualEngine) -> None:
    original = getattr(thing, method)

    @functools.wraps(original)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if acts_now(engine):
            return original(*args, **kwargs)
        return None

    setattr(thing, method, gated)
