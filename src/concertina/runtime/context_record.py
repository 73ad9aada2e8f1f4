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
_FRONT = _PYTHON.size + _KEYS + _NUMPY.size  # of packed generators, before torch's


def pack_generators(python: Any, numpy: Any, torch_cpu: bytes) -> bytes:
    version, words, gauss = python
    _, keys, position, has_gauss, cached = numpy
    return b"".join(
        (
            _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0),
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


class Memory:
    """What was packed last, for things that seldom change from step to step.

    States are compared by identity: an equal one that is another object is packed again.
    """

    def __init__(self) -> None:
        self._generators: dict[Any, tuple[Any, Any, Any, bytes]] = {}  # by name: Python's, NumPy's, torch's state
        self._head: tuple[Any, bytes] = (None, b"")
        self._made_of: tuple[Any, list[int | None]] = (None, [None])
        self.last = b""  # the whole record

    def stands(self, random: RandomState, key: list[int | None]) -> bool:
        """Whether the last record was made of the same things; a key with None in it stands for nothing."""
        return self._made_of[0] is random and self._made_of[1] == key and None not in key

    def generators(self, name: Any, python: Any, numpy: Any, torch_cpu: Tensor | bytes) -> bytes:
        known = self._generators.get(name)
        if known is not None and known[0] is python and known[1] is numpy:
            if known[2] is torch_cpu:
                return known[3]
            front = known[3][:_FRONT]
        else:
            front = pack_generators(python, numpy, b"")
        packed = front + (torch_cpu if isinstance(torch_cpu, bytes) else torch_cpu.numpy().tobytes())
        self._generators[name] = (python, numpy, torch_cpu, packed)
        return packed

    def head(self, head: dict[str, Any]) -> bytes:
        if self._head[0] != head:
            self._head = (head, json.dumps(head, separators=(",", ":")).encode())
        return self._head[1]

    def record(self, raw: bytes, blobs: list[bytes], made_of: tuple[Any, list[int | None]]) -> bytes:
        self._made_of, self.last = made_of, b"".join((len(raw).to_bytes(8, "little"), raw, *blobs))
        return self.last


class ContextWriter:
    """Collects blobs behind one small JSON head."""

    def __init__(self, memory: Memory | None = None, made_of: tuple[Any, list[int | None]] = (None, [None])) -> None:
        self._blobs: list[bytes] = []
        self._memory = Memory() if memory is None else memory
        self._made_of = made_of

    def add(self, blob: bytes) -> int:
        """The blob's length, to be kept in the head; blobs are read back in the order in which they were added."""
        self._blobs.append(blob)
        return len(blob)

    def close(self, head: dict[str, Any]) -> bytes:
        return self._memory.record(self._memory.head(head), self._blobs, self._made_of)

    def add_generators(self, name: Any, python: Any, numpy: Any, torch_cpu: Tensor | bytes) -> int:
        """Random states, kept packed under `name`."""
        return self.add(self._memory.generators(name, python, numpy, torch_cpu))


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
    cpu = writer.add_generators("random", state.python, state.numpy, state.torch_cpu)
    cuda = -1 if state.torch_cuda is None else writer.add(state.torch_cuda.numpy().tobytes())
    return [cpu, cuda]


def unpack_random(reader: ContextReader, sizes: list[int]) -> RandomState:
    python, numpy, raw = unpack_generators(reader.take(sizes[0]))
    cuda = None if sizes[1] < 0 else bytes_to_tensor(bytes(reader.take(sizes[1])))
    return RandomState(python, numpy, bytes_to_tensor(raw), cuda)


def pack_lane(writer: ContextWriter, name: Any, state: LaneState) -> int:
    return writer.add_generators(name, *state)


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
