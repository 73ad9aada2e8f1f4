"""The user's objects that make up the state of a job: model, optimizers, schedulers, scalers and registered things."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from concertina.core.errors import CheckpointError, UsageError
from concertina.runtime.arrays import Array, ArrayModel


@dataclass(slots=True)
class Prepared:
    """What prepare() and register() were given."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    scalers: list[GradScaler] = field(default_factory=list)
    registered: dict[str, Any] = field(default_factory=dict)
    arrays: list[Array] = field(default_factory=list)  # that are trained in the place of a model

    @classmethod
    def sort(cls, things: tuple[Any, ...]) -> "Prepared":
        """By kind; exactly one model is needed."""
        found = cls()
        for thing in things:
            found._add(thing)
        if found.arrays:
            found.models.append(ArrayModel(found.arrays))
        if len(found.models) != 1:
            raise UsageError(
                f"prepare() needs one model and got {len(found.models)}"
                + ("; put several networks into one nn.Module, and no NumPy arrays beside it" if found.models else "")
            )
        return found

    def _add(self, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            self.models.append(thing)
        elif isinstance(thing, Optimizer):
            self.optimizers.append(thing)
        elif isinstance(thing, LRScheduler):
            self.schedulers.append(thing)
        elif isinstance(thing, GradScaler):
            self.scalers.append(thing)
        elif isinstance(thing, np.ndarray):
            self.arrays.append(thing)
        else:
            raise UsageError(
                f"prepare() cannot take a {type(thing).__name__}: it takes a model (or NumPy arrays), optimizers, "
                "schedulers and gradient scalers; use session.register(name, thing) for other state"
            )

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def state(self) -> dict[str, Any]:
        return {
            "parameters": {name: p.detach() for name, p in self.model.named_parameters()},
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [s.state_dict() for s in self.schedulers],
            "scalers": [s.state_dict() for s in self.scalers],
            "registered": {name: thing.state_dict() for name, thing in self.registered.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Changes everything; `check_fits` has to come first."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(state["parameters"][name])
        for kind in ("optimizers", "schedulers", "scalers"):
            for thing, saved in zip(getattr(self, kind), state[kind], strict=True):
                thing.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            _keep_precision(optimizer, saved)
        for name, thing in self.registered.items():
            thing.load_state_dict(state["registered"][name])

    def check_fits(self, state: dict[str, Any], source: str) -> None:
        """Raises CheckpointError unless the state is of this script's objects."""
        ours = {name: (tuple(p.shape), p.dtype) for name, p in self.model.named_parameters()}
        theirs = {name: (tuple(p.shape), p.dtype) for name, p in state["parameters"].items()}
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"{source} is of another model: {name} is {_shape(theirs.get(name))} there and "
                    f"{_shape(ours.get(name))} here"
                )
        for kind in ("optimizers", "schedulers", "scalers"):
            if len(getattr(self, kind)) != len(state[kind]):
                raise CheckpointError(
                    f"{source} has {len(state[kind])} {kind}, the script prepares {len(getattr(self, kind))}"
                )
        missing = set(self.registered) ^ set(state["registered"])
        if missing:
            raise CheckpointError(
                f"{source} and the script do not register the same things: {', '.join(sorted(missing))}"
            )


def _keep_precision(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """torch has cast what an optimizer keeps to its parameter's dtype: beside bfloat16, the product that NAdam keeps in
    float32 has lost bits by that. (An optimizer that writes its state in a way of its own reads it, too.)"""
    if not saved.keys() >= {"state", "param_groups"}:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        now = optimizer.state.get(param, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(now.get(key), Tensor) and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device, copy=True)


def _shape(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if found is None else f"{'x'.join(map(str, found[0])) or 'a scalar'} {found[1]}"
