"""What a script holds besides the prepared objects: random generators of its own, and plain numbers.

Only looked at while a job is recorded. The walk starts from the variables of the script's functions that are running,
from the globals of the script's own modules and from its datasets, and follows containers and objects of the script's
own classes a few steps. It reads, and changes nothing.
"""

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

DEPTH = 5  # containers and objects between a variable and what is found
MOST_OBJECTS = 5000
MOST_ITEMS = 64  # of one container
NUMBER_DEPTH = 2

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Surroundings:
    """The generators and numbers that the script's code can reach."""

    def __init__(self) -> None:
        self.datasets: dict[int, Any] = {}  # as the loaders have them; a script need not keep a name for its own
        self.generators: dict[str, Any] = {}  # by path from a variable: `noise`, `data.rng`
        self.numbers: dict[str, Any] = {}
        self._modules: dict[str, types.ModuleType] = {}  # the script's own
        self._loaded = 0  # modules there were when we looked for those

    def look(self) -> None:
        """Finds everything anew. Called from within the script's loop."""
        self.generators, self.numbers = {}, {}
        seen = {id(g) for g in _default_generators()}
        queue = deque((path, value, 0) for path, value in self._roots())
        for _ in range(MOST_OBJECTS):
            if not queue:
                break
            path, value, depth = queue.popleft()
            if isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                if depth <= NUMBER_DEPTH:
                    self.numbers.setdefault(path, value)
                continue
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, GENERATORS):
                self.generators[path] = value
            elif depth < DEPTH:
                queue.extend((p, v, depth + 1) for p, v in _inside(path, value))

    def generator_states(self, fingerprint: Callable[[Any], str]) -> dict[str, list[str]]:
        """(kind, state) by path."""
        found: dict[str, list[str]] = {}
        for path, generator in self.generators.items():
            state = _state_of(generator)
            if state is not None:
                kind = type(generator)
                found[path] = [f"{kind.__module__.partition('.')[0].strip('_')}.{kind.__name__}", fingerprint(state)]
        return found

    def _roots(self) -> Iterator[tuple[str, Any]]:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_users(frame.f_code.co_filename):
                yield from _public(frame.f_locals)
            frame = frame.f_back
        if self._loaded != len(sys.modules):
            self._loaded = len(sys.modules)
            self._modules = {name: module for name, module in list(sys.modules.items()) if _is_users(_file_of(module))}
        for name, module in self._modules.items():
            prefix = "" if name == "__main__" else f"{name}."
            yield from ((prefix + variable, value) for variable, value in _public(vars(module)))
        yield from (("dataset", dataset) for dataset in self.datasets.values())


def _public(variables: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(variables.items()) if not name.startswith("__")]


def _file_of(module: Any) -> str:
    """Without getattr, at which a lazy module would load itself."""
    return getattr(module, "__dict__", {}).get("__file__") or ""


def _default_generators() -> list[Any]:
    """Those that each virtual worker has its own state of."""
    on_gpu = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [torch.default_generator, random._inst, np.random.mtrand._rand, *on_gpu]


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    """Whether a file belongs to the script: beside or below it, and not an installed package."""
    if not filename.endswith(".py"):
        return False
    path = Path(filename).resolve()
    parts = set(path.parts)
    if "site-packages" in parts or "dist-packages" in parts or Path(__file__).resolve().parent.parent in path.parents:
        return False
    return Path(sys.argv[0]).resolve().parent in path.parents


def _inside(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}[{k!r}]", v) for k, v in list(value.items())[:MOST_ITEMS] if isinstance(k, str | int)]
    if isinstance(value, list | tuple):
        return [(f"{path}[{i}]", v) for i, v in enumerate(value[:MOST_ITEMS])]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        closed_over = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        if _is_users(value.__code__.co_filename):
            return closed_over
        return [pair for pair in closed_over if isinstance(pair[1], types.FunctionType)]  # which a library has wrapped
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__)]
    if isinstance(value, types.GeneratorType):
        return list(value.gi_frame.f_locals.items()) if value.gi_frame is not None else []
    if isinstance(value, functools.partial):
        return [(f"{path}.{k}", v) for k, v in [*enumerate(value.args), *value.keywords.items()]]
    if isinstance(value, nn.Module):
        held = {k: v for k, v in vars(value).items() if not k.startswith("_")} | dict(value.named_children())
        return [(f"{path}.{k}", v) for k, v in held.items() if k != "training"]
    if isinstance(value, Dataset) or _is_users(_file_of(sys.modules.get(type(value).__module__))):
        return [(f"{path}.{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
    return []


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    try:
        return generator.getstate()
    except NotImplementedError:  # SystemRandom has none: every draw is new
        return None
