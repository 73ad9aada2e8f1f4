"""Where the replicated state of a job lies in a worker's memory, so that a newcomer can read it from there.

Parameters and optimizer state are by far the largest part of what a newcomer needs, and equal on all workers. It reads
them straight out of another worker's process or GPU, which does nothing for it. Where that cannot be, they travel with
the rest of the state.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from concertina.runtime.buckets import is_dense
from concertina.runtime.device_memory import allocations
from concertina.runtime.prepared import Prepared

PIECE = 1 << 26  # bytes per call, so that other threads of the reader run in between


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def read_memory(pid: int, address: int, target: Tensor) -> None:
    """Copies another process's memory into `target`; OSError if that cannot be done."""
    size, done = target.numel() * target.element_size(), 0
    while done < size:
        part = min(PIECE, size - done)
        here = _Vector(target.data_ptr() + done, part)
        there = _Vector(address + done, part)
        got = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            raise OSError(ctypes.get_errno(), f"cannot read the memory of process {pid}")
        done += got


def readable(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "cuda") and is_dense(tensor) and tensor.layout is torch.strided


def as_bytes(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as one row of bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def as_buffer(data: Tensor) -> memoryview:
    """Bytes in host memory, as sockets and hashes take them."""
    return data.numpy().data


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the state: a parameter (`key` empty), or what an optimizer keeps for one."""

    optimizer: int
    param: int
    key: str
    tensor: Tensor


def all_params(prepared: Prepared) -> list[Tensor]:
    return list(prepared.model.parameters())


def items(prepared: Prepared) -> Iterator[Item]:
    """In an order that is the same in every process of the job."""
    for i, param in enumerate(all_params(prepared)):
        yield Item(-1, i, "", param.detach())
    for k, optimizer in enumerate(prepared.optimizers):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for i, param in enumerate(held):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield Item(k, i, key, value)


def describe(prepared: Prepared) -> dict[str, Any] | None:
    """Addresses of all items; None if some of them cannot be read from outside."""
    found = list(items(prepared))
    if not all(readable(item.tensor) for item in found):
        return None
    kept = others(prepared)
    if kept is None:
        return None
    try:
        shared = allocations(x.tensor for x in found)
    except OSError:
        return None
    return {
        "shared": shared,
        "items": [[x.optimizer, x.param, x.key, x.tensor.data_ptr(), *_form(x.tensor)] for x in found],
        "others": kept,
    }


def others(prepared: Prepared) -> list[list[Any]] | None:
    """What optimizers keep for parameters besides tensors: plain values; None if there is anything else, or something
    that is of no parameter (MADGRAD counts its steps so)."""
    found: list[list[Any]] = []
    for k, optimizer in enumerate(prepared.optimizers):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if len(optimizer.state) > sum(param in optimizer.state for param in held):
            return None
        for i, param in enumerate(held):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, int | float | bool | None):
                    found.append([k, i, key, value])
                elif not isinstance(value, Tensor):
                    return None
    return found


def _form(tensor: Tensor) -> tuple[str, str, list[int], list[int]]:
    return tensor.device.type, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())


def make_room(prepared: Prepared, description: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """Gives the newcomer's optimizers the same tensors; address there and tensor here for every item."""
    params = all_params(prepared)
    pairs: list[tuple[int, Tensor]] = []
    held = [[p for group in o.param_groups for p in group["params"]] for o in prepared.optimizers]
    for optimizer in prepared.optimizers:
        optimizer.state.clear()
    for k, i, key, address, kind, dtype, shape, stride in description["items"]:
        if k < 0:
            pairs.append((address, params[i].detach()))
            continue
        device = held[k][i].device if kind == "cuda" else torch.device(kind)
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        prepared.optimizers[k].state[held[k][i]][key] = tensor
        pairs.append((address, tensor))
    set_others(prepared, description["others"])
    return pairs


def set_others(prepared: Prepared, found: list[list[Any]]) -> None:
    held = [[p for group in o.param_groups for p in group["params"]] for o in prepared.optimizers]
    for k, i, key, value in found:
        prepared.optimizers[k].state[held[k][i]][key] = value
