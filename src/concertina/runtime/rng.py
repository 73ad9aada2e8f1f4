"""The random state of one virtual worker: Python, NumPy, torch on the CPU and on the GPU in use."""

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """A snapshot of every generator that user code draws from without naming one."""

    python: Any
    numpy: Any
    torch_cpu: Tensor
    torch_cuda: Tensor | None

    @classmethod
    def capture(cls) -> "RandomState":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(random.getstate(), numpy_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        _forget_numpy()
        torch.set_rng_state(self.torch_cpu)
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


_MT_BYTES = 624 * 4 + 4  # NumPy's Mersenne twister in memory: its words and its position
_last_numpy: tuple[bytes, Any] = (b"", None)


def numpy_state() -> Any:
    """np.random.get_state(), which takes 35 microseconds, without asking if the generator has not moved since.

    The twister's own memory tells; a second normal number that is kept back is not in it, so with one of those NumPy is
    asked.
    """
    global _last_numpy
    generator = getattr(np.random.mtrand, "_rand")._bit_generator  # noqa: B009  # NumPy's global one, whatever it is
    if type(generator) is not np.random.MT19937:
        return np.random.get_state()
    now = ctypes.string_at(generator.ctypes.state_address, _MT_BYTES)
    if now != _last_numpy[0] or _last_numpy[1][3]:
        _last_numpy = (now, np.random.get_state())
    return _last_numpy[1]


def _forget_numpy() -> None:
    global _last_numpy
    _last_numpy = (b"", None)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (with the GPU) as a rank of a DDP script would."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
