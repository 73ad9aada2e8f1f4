"""The state of a job in pieces, each of which can be copied and stepped along by itself.

Optimizers that treat every element alone are replayed on slices, all others on whole parameters.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from concertina.runtime.prepared import Prepared
from concertina.runtime.state_map import all_params

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


@dataclass(slots=True, eq=False)
class Part:
    """One tensor's share of a piece: where it lies there, and here."""

    key: str  # empty: the parameter itself
    address: int
    here: Tensor  # flat, the final memory; single numbers of slices but the first have a tensor of their own
    whole: Tensor  # all of it, as the optimizer sees it


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of one parameter with everything that optimizers keep for it."""

    param: int  # among all parameters of the model
    lo: int
    hi: int
    optimizer: int  # -1: no optimizer holds it
    group: int
    parts: list[Part]
    scalars: dict[str, torch.Size] = field(default_factory=dict)  # single numbers, with their shape
    version: int = -1  # steps that what we hold has seen; -1: nothing yet
    copied: int = -1  # steps that it had seen when it was copied
    compared: bool = False
    proved: bool = False  # compared after a step that we made, too: before, it says nothing about those
    exact: bool = True
    leaf: Tensor | None = None  # what the replaying optimizer takes for its parameter

    @property
    def where(self) -> list[tuple[int, Tensor]]:
        """Address there and memory here, for all of it."""
        return [(part.address, part.here) for part in self.parts]


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as one row."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def cut(prepared: Prepared, description: dict[str, Any], room: list[Tensor], elements: int) -> list[Piece]:
    """All of the state in pieces of at most so many elements, if they can be cut; `room` is one tensor per item."""
    params = all_params(prepared)
    pairs = [(address, tensor) for (_, _, _, address, *_), tensor in zip(description["items"], room, strict=True)]
    index = {id(p): i for i, p in enumerate(params)}
    of_param: dict[int, list[tuple[str, int, Tensor]]] = {i: [] for i in range(len(params))}
    held = [[p for group in o.param_groups for p in group["params"]] for o in prepared.optimizers]
    for (k, i, key, *_), (address, tensor) in zip(description["items"], pairs, strict=True):
        of_param[i if k < 0 else index[id(held[k][i])]].append((key, address, tensor))
    homes = {
        id(p): (k, g)
        for k, o in enumerate(prepared.optimizers)
        for g, group in enumerate(o.param_groups)
        for p in group["params"]
    }
    counting = {k for k, *_, value in description["others"] if value is not None}  # in plain numbers, unseen by us
    pieces = []
    for i, param in enumerate(params):
        optimizer, group = homes.get(id(param), (-1, -1))
        if optimizer in counting:
            optimizer, group = -1, -1
        tensors = of_param[i]
        sliceable = optimizer >= 0 and isinstance(prepared.optimizers[optimizer], ELEMENTWISE)
        sliceable = sliceable and all(t.numel() == 1 or t.stride() == param.stride() for _, _, t in tensors)
        size = elements if sliceable else max(1, param.numel())
        for lo in range(0, max(1, param.numel()), size):
            pieces.append(_piece(i, lo, min(lo + size, param.numel()), optimizer, group, tensors, param.numel()))
            # Trained, but by no optimizer that we know: the script changes it by hand, which nobody can replay.
            pieces[-1].exact = optimizer >= 0 or not param.requires_grad
    return pieces


def _piece(
    i: int, lo: int, hi: int, optimizer: int, group: int, tensors: list[tuple[str, int, Tensor]], whole: int
) -> Piece:
    parts: list[Part] = []
    scalars: dict[str, torch.Size] = {}
    for key, address, tensor in tensors:
        if tensor.numel() == whole and (whole > 1 or not key):
            part = flat(tensor)[lo:hi]
            parts.append(Part(key, address + lo * tensor.element_size(), part, tensor))
        elif tensor.numel() == 1:  # all slices count it on alike
            parts.append(Part(key, address, tensor.view(1) if lo == 0 else torch.zeros_like(tensor).view(1), tensor))
            scalars[key] = tensor.shape
        else:  # of a shape of its own: such an optimizer is replayed on whole parameters
            parts.append(Part(key, address, flat(tensor), tensor))
    return Piece(i, lo, hi, optimizer, group, parts, scalars)
