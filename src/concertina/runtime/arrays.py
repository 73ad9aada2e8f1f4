"""NumPy arrays in the place of a model, for training loops that know nothing of torch.

What is trained are parameters that lie in the arrays' own memory, and gradients that the loop computed by hand enter
the engine as if a backward had. So everything else is what it is for a torch model: virtual workers, the order of the
sum, newcomers, losses, checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from concertina.core.errors import UsageError
from concertina.runtime.virtual import VirtualEngine

Array = NDArray[Any]
_TAG = "numpy array"  # key of an array that travels as a tensor


class ArrayModel(nn.Module):
    """Parameters that share the arrays' memory."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        super().__init__()
        for k, array in enumerate(arrays):
            _check_trainable(k, array)
            self.register_parameter(f"array{k}", nn.Parameter(torch.from_numpy(array)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        result: Tensor = _Given.apply(gradients, *self.parameters())  # type: ignore[no-untyped-call]
        return result


class _Given(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.given = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        return (None, *ctx.given)


def _check_trainable(number: int, array: Array) -> None:
    wrong = [] if array.dtype in (np.float32, np.float64) else [f"of {array.dtype}"]
    wrong += [] if array.flags.c_contiguous else ["not contiguous"]
    wrong += [] if array.flags.writeable else ["read-only"]
    if wrong:
        raise UsageError(
            f"prepare() cannot train array {number}, which is {' and '.join(wrong)}: needed is a writable, contiguous "
            "array of float32 or float64 (np.array(x, dtype=np.float64) makes one)"
        )


def mean_over_virtual_workers(engine: VirtualEngine, gradients: Sequence[Any]) -> list[Array] | None:
    """In the last turn of a step, the mean of what all virtual workers gave, summed as DDP would; before, None."""
    model = engine.model
    if not isinstance(model, ArrayModel):
        raise UsageError("session.reduce() is for arrays that prepare() was given; a torch model needs loss.backward()")
    if engine.turn is None:
        raise UsageError("session.reduce() outside the loop over the data: call it once in the loop's body")
    model(_as_tensors(gradients, engine.params)).backward()
    if not (engine.turn.is_last and engine.step_done):
        return None
    reduced = []
    for param in engine.params:
        assert param.grad is not None
        reduced.append(param.grad.numpy().copy())  # its memory is used again
        param.grad = None
    return reduced


def _as_tensors(gradients: Sequence[Any], params: Sequence[Tensor]) -> list[Tensor]:
    if len(gradients) != len(params):
        raise UsageError(
            f"session.reduce() got {len(gradients)} gradients, needed {len(params)}: one for each array that prepare() "
            "was given, in the same order"
        )
    found = []
    for k, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
        copy = np.array(gradient, dtype=param.detach().numpy().dtype, order="C")
        if copy.shape != tuple(param.shape):
            raise UsageError(
                f"session.reduce(): gradient {k} has shape {copy.shape}, its array has {tuple(param.shape)}"
            )
        found.append(torch.from_numpy(copy))
    return found


def stack(rows: list[Any]) -> Any:
    """A batch of arrays out of samples of arrays or numbers."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: stack([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stack(list(column)) for column in zip(*rows, strict=True))
    return np.stack([np.asarray(row) for row in rows])


# -- registered state --------------------------------------------------------------------------------------------------


class WithArrays:
    """A registered thing whose state holds arrays: they travel as tensors, since what is read back executes nothing."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def state_dict(self) -> Any:
        return _to_tensors(self._thing.state_dict())

    def load_state_dict(self, state: Any) -> None:
        self._thing.load_state_dict(_to_arrays(state))


class BareArray:
    """An array registered as it is; what is loaded goes into its memory."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def state_dict(self) -> dict[str, Array]:
        return {"array": self._array}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        self._array[...] = state["array"]


def carried(thing: Any) -> Any:
    """What to register for `thing`: the thing itself, unless its state is made of arrays."""
    if isinstance(thing, np.ndarray):
        return WithArrays(BareArray(thing))
    if isinstance(thing, nn.Module) or not hasattr(thing, "state_dict"):
        return thing
    return WithArrays(thing)


def _to_tensors(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        try:
            return {_TAG: torch.from_numpy(state.copy())}
        except TypeError:
            raise UsageError(
                f"registered state holds an array of {state.dtype}, needed are numbers or booleans"
            ) from None
    if type(state) is dict:
        return {key: _to_tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_to_tensors(value) for value in state)
    return state


def _to_arrays(state: Any) -> Any:
    if type(state) is dict:
        if state.keys() == {_TAG}:
            return state[_TAG].numpy().copy()
        return {key: _to_arrays(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_to_arrays(value) for value in state)
    return state
