"""Memory on a GPU that other processes of the same machine can use.

The driver gives a handle for an allocation, whoever is told it can map that allocation into its own process. It does so
through the driver's own library, since torch's way counts users across processes, and a newcomer may die at any moment.
Not every allocation can be shared so (torch's expandable segments cannot); then OSError is raised.
"""

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

KIND = "cuda:"  # how the place of such memory begins
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), ctypes.c_uint64)
    driver.cuMemGetAddressRange_v2.argtypes = (
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    )
    return driver


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(code, f"the GPU's driver cannot {what} (error {code})")


def allocations(tensors: Iterable[Tensor]) -> list[tuple[int, int, str, str]]:
    """The allocations in which these tensors lie: address, size, the place under which others find it, no token."""
    found: dict[int, tuple[int, int, str, str]] = {}
    end = begin = 0
    for address in sorted({tensor.data_ptr() for tensor in tensors if tensor.is_cuda}):
        if begin <= address < end:
            continue
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        _check(_driver().cuMemGetAddressRange_v2(base, size, address), "find an allocation")
        begin, end = base.value, base.value + size.value
        _check(_driver().cuIpcGetMemHandle(handle, begin), "share this memory")
        found[begin] = (begin, size.value, KIND + bytes(handle.data).hex(), "")
    return list(found.values())


class _Interface:
    """What torch needs to know of memory that is not its own."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


class DeviceMapping:
    """Another process's allocation, mapped into this one."""

    def __init__(self, place: str, size: int, device: torch.device) -> None:
        handle, address = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(handle), bytes.fromhex(place.removeprefix(KIND)), ctypes.sizeof(handle))
        with torch.cuda.device(device):
            _check(_driver().cuIpcOpenMemHandle_v2(address, handle, _LAZY_PEER_ACCESS), "map another's memory")
            self._address: int | None = address.value
            self.bytes = torch.as_tensor(_Interface(address.value, size))

    def close(self) -> None:
        """Before its owner gives the memory back; nothing that was made of it may be used any more."""
        if self._address is not None:
            torch.cuda.synchronize(self.bytes.device)
            _driver().cuIpcCloseMemHandle(self._address)
            self._address = None


def finish_work(tensors: Iterable[Tensor]) -> None:
    """Waits until what was asked of the GPUs of these tensors is done; nothing to wait for on the host."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
