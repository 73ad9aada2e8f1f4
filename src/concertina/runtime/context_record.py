"""A virtual worker's context as bytes: what of a step only its own worker knows.

Made after every step, so it is quick; read from memory that another process wrote, so it is data and nothing else.
"""

import json
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concertina.runtime.rng import RandomState

LaneState = tuple[Any, Any, bytes]  # random states of Python, NumPy and torch, cheap to send between processes

_PYTHON = struct.Struct("<q625I?d")
_NUMPY = struct.Struct("<qqd")
_KEYS = 624 * 4


_packed_python: tuple[Any, bytes] = (None, b"")  # Python's generator seldom moves: the last state, and its bytes


def pack_generators(python: Any, numpy: Any, torch_cpu: bytes) -> bytes:
    global _packed_python
    if python != _packed_python[0]:
        version, words, gauss = python
        _packed_python = (python, _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0))
    _, keys, position, has_gauss, cached = numpy
    return b"".join(
        (
            _packed_python[1],
            keys.astype(np.uint32, copy=False).tobytes(),
            _NUMPY.pack(position, has_gauss, cached),
            torch_cpu,
        )
    )


def unpack_generators(data: memoryview) -> tuple[Any, Any, bytes]:
    version, *words, has, gauss = _PYTHON.unpack_from(data, 0)
    at = _PYTHON.size
    keys = np.frombuffer(data[at : at + _KEYS], dtype=np.uint32).copy()
    position, has_gauss, cached = _NUMPY.unpack_from(data, at + _KEYS)
    python = (version, tuple(words), gauss if has else None)
    return python, ("MT19937", keys, position, has_gauss, cached), bytes(data[at + _KEYS + _NUMPY.size :])


class ContextWriter:
    """Collects blobs behind one small JSON head."""

    def __init__(self) -> None:
        self._blobs: list[bytes] = []

    def add(self, blob: bytes) -> int:
        """The blob's length, to be kept in the head; blobs are read back in the order in which they were added."""
        self._blobs.append(blob)
        return len(blob)

    def close(self, head: dict[str, Any]) -> bytes:
        raw = json.dumps(head, separators=(",", ":")).encode()
        return b"".join((len(raw).to_bytes(8, "little"), raw, *self._blobs))


class ContextReader:
    """Gives the blobs back in order."""

    def __init__(self, record: bytes) -> None:
        size = int.from_bytes(record[:8], "little")
        self.head: dict[str, Any] = json.loads(record[8 : 8 + size])
        self._data = memoryview(record)[8 + size :]

    def take(self, size: int) -> memoryview:
        blob, self._data = self._data[:size], self._data[size:]
        return blob


def pack_random(writer: ContextWriter, state: RandomState) -> list[int]:
    cpu = writer.add(pack_generators(state.python, state.numpy, state.torch_cpu.numpy().tobytes()))
    cuda = -1 if state.torch_cuda is None else writer.add(state.torch_cuda.numpy().tobytes())
    return [cpu, cuda]


def unpack_random(reader: ContextReader, sizes: list[int]) -> RandomState:
    python, numpy, raw = unpack_generators(reader.take(sizes[0]))
    cuda = None if sizes[1] < 0 else bytes_to_tensor(bytes(reader.take(sizes[1])))
    return RandomState(python, numpy, bytes_to_tensor(raw), cuda)


def pack_lane(writer: ContextWriter, state: LaneState) -> int:
    return writer.add(pack_generators(*state))


def unpack_lane(reader: ContextReader, size: int) -> LaneState:
    return unpack_generators(reader.take(size))


def bytes_to_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """The elements in the order of their indices, whatever their order in memory."""
    if not tensor.numel():
        return b""
    plain = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_from_bytes(raw: memoryview, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape).to(like.device)
