"""The random state of one virtual worker: Python, NumPy, torch on the CPU and on the GPU in use."""

import contextlib
import ctypes
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """A snapshot of every generator that user code draws from without naming one.

    Of a generator that has not moved since the last snapshot, it is the very same object.
    """

    python: Any
    numpy: Any
    torch_cpu: Tensor
    torch_cuda: Tensor | None

    @classmethod
    def capture(cls, before: "RandomState | None" = None) -> "RandomState":
        """`before` itself, if nothing has moved."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        python, numpy, torch_cpu = python_state(), numpy_state(), torch_state()
        if (
            before is not None
            and before.python is python
            and before.numpy is numpy
            and before.torch_cpu is torch_cpu
            and before.torch_cuda is None
            and cuda is None
        ):
            return before
        return cls(python, numpy, torch_cpu, cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        _python.keep(_python_memory(), self.python)
        np.random.set_state(self.numpy)
        _numpy.keep(_numpy_memory(), self.numpy)
        torch.set_rng_state(self.torch_cpu)
        _torch.keep(self.torch_cpu)
        if self.torch_cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.torch_cuda)

    def same_as(self, other: "RandomState") -> bool:
        ours, theirs = self.torch_cuda, other.torch_cuda
        return (
            self.python == other.python
            and all(np.array_equal(a, b) for a, b in zip(self.numpy, other.numpy, strict=True))
            and torch.equal(self.torch_cpu, other.torch_cpu)
            and (ours is None or theirs is None or torch.equal(ours, theirs))
        )

    def state(self) -> dict[str, Any]:
        """Plain values and tensors only, so that a checkpoint loads without executing code."""
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
        }

    @classmethod
    def load(cls, state: dict[str, Any]) -> "RandomState":
        version, words, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        return cls(
            (version, tuple(words.tolist()), gauss),
            (name, keys.numpy().astype(np.uint32), position, has_gauss, cached),
            state["torch_cpu"],
            state["torch_cuda"],
        )


# Asking a generator for its state takes up to 40 microseconds, and seldom has it moved. Its own memory tells.

_MT_BYTES = 624 * 4 + 4  # a Mersenne twister: its words and its position
_libc = ctypes.PyDLL(None)  # calls that are over before another thread could use the time
_compare = _libc.memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Last:
    """The last state of a generator, and its memory of that time."""

    def __init__(self) -> None:
        self.state: Any = None
        self._image = ctypes.create_string_buffer(_MT_BYTES)
        self._at = ctypes.addressof(self._image)
        self._known = False

    def stands(self, memory: int) -> bool:
        """Whether the generator whose twister lies there (0: it is not known where) has not moved."""
        return self._known and memory != 0 and _compare(memory, self._at, _MT_BYTES) == 0

    def keep(self, memory: int, state: Any) -> Any:
        self.state, self._known = state, memory != 0
        if memory:
            ctypes.memmove(self._at, memory, _MT_BYTES)
        return state


_python, _numpy = _Last(), _Last()


def _python_head() -> int:
    """How far into a random.Random its twister lies; 0 where it is not found (another Python)."""
    head = object.__basicsize__
    if not hasattr(random, "_inst") or random.Random.__basicsize__ < head + _MT_BYTES:
        return 0
    for seed in (1, 2):
        probe = random.Random(seed)
        probe.random()
        *words, position = probe.getstate()[1]
        if ctypes.string_at(id(probe) + head, _MT_BYTES) != struct.pack("=i624I", position, *words):
            return 0
    return head


_HEAD = _python_head()


def _python_memory() -> int:
    generator = getattr(random, "_inst", None)
    return id(generator) + _HEAD if _HEAD and type(generator) is random.Random else 0


def python_state() -> Any:
    """random.getstate(). A second normal number that is kept back is not in the twister's memory."""
    memory = _python_memory()
    if _python.stands(memory) and _python.state[2] == random._inst.gauss_next:  # type: ignore[attr-defined]
        return _python.state
    return _python.keep(memory, random.getstate())


_numpy_at: tuple[Any, int] = (None, 0)  # NumPy's global generator and its memory


def _numpy_memory() -> int:
    global _numpy_at
    generator = getattr(np.random.mtrand, "_rand")._bit_generator  # noqa: B009  # whatever it is at the moment
    if generator is not _numpy_at[0]:
        plain = type(generator) is np.random.MT19937
        _numpy_at = (generator, generator.ctypes.state_address if plain else 0)
    return _numpy_at[1]


def numpy_state() -> Any:
    """np.random.get_state(). With a second normal number kept back, NumPy is asked."""
    memory = _numpy_memory()
    if _numpy.stands(memory) and not _numpy.state[3]:
        return _numpy.state
    return _numpy.keep(memory, np.random.get_state())


class _LastOfTorch:
    """The last state of torch's generator, which is asked for its state every time."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self._size = self._at = 0

    def stands(self, now: Tensor) -> bool:
        return now.numel() == self._size and _compare(now.data_ptr(), self._at, self._size) == 0

    def keep(self, state: Tensor) -> Tensor:
        self.state, self._size, self._at = state, state.numel(), state.data_ptr()
        return state


_torch = _LastOfTorch()


def torch_state() -> Tensor:
    """torch.get_rng_state()"""
    now = torch.default_generator.get_state()
    last = _torch.state
    return last if last is not None and _torch.stands(now) else _torch.keep(now)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is drawn within leaves no trace: all random states are afterwards what they were before."""
    before = RandomState.capture()
    try:
        yield
    finally:
        before.restore()


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (with the GPU) as a rank of a DDP script would."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
