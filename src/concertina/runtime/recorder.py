"""Notes down what a job computes, step by step, so that two runs can be compared to the bit.

One JSON line per turn of a virtual worker and per step, with hashes instead of tensors, in the order in which things
happen: parameters and random state before the turn, batch, output of every layer, logged values, gradients, buffers,
random state after it; then the summed gradient, what the optimizer was given and what it made of the parameters.
`concertina verify` reads the lines (`verify/records.py`). A job that is not recorded has no Recorder and none of its
hooks.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from concertina.core.env import WorkerEnv
from concertina.runtime.digest import bit_pattern
from concertina.runtime.model_hooks import ModelHook
from concertina.runtime.prepared import Prepared
from concertina.runtime.rng import RandomState
from concertina.runtime.surroundings import Surroundings
from concertina.runtime.torch_internals import is_compiled, watch_compiled_calls
from concertina.runtime.turn import Turn
from concertina.runtime.virtual import VirtualEngine

DEPTH = 6  # of nested containers and objects that a fingerprint looks into


def fingerprint(value: Any, depth: int = DEPTH) -> str:
    """A short text that is equal for two values if all their bits are: a hash, or a plain value itself.

    Memory addresses never enter, so that it can be compared between processes.
    """
    if isinstance(value, Tensor):
        return _hash(str(value.dtype), str(tuple(value.shape)), _bytes_of(value))
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, bool | int | str | bytes):
        text = repr(value)
        return text if len(text) <= 32 else _hash(text)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        raw = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
        return _hash(str(array.dtype), str(array.shape), raw)
    return _hash(type(value).__qualname__, *_parts(value, depth))


def _parts(value: Any, depth: int) -> Iterable[str]:
    if depth == 0:
        return []
    if isinstance(value, Mapping):
        return [part for k, v in value.items() for part in (fingerprint(k), fingerprint(v, depth - 1))]
    if isinstance(value, set | frozenset):
        return sorted(fingerprint(v, depth - 1) for v in value)
    if isinstance(value, list | tuple):
        return [fingerprint(v, depth - 1) for v in value]
    if dataclasses.is_dataclass(value):
        return [fingerprint(getattr(value, f.name), depth - 1) for f in dataclasses.fields(value)]
    if hasattr(value, "__dict__"):
        return [fingerprint(v, depth - 1) for v in vars(value).values()]
    return []


def _bytes_of(tensor: Tensor) -> bytes:
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return bit_pattern(plain).numpy().tobytes()
    except (RuntimeError, TypeError, KeyError, NotImplementedError):  # sparse, nested, quantized
        return repr(tensor).encode()


def _hash(*parts: str | bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "little") + raw)
    return found.hexdigest()


def random_fingerprints(random: RandomState) -> dict[str, str]:
    found = {
        "python": _hash(repr(random.python)),
        "numpy": fingerprint(random.numpy),
        "torch": fingerprint(random.torch_cpu),
    }
    return found if random.torch_cuda is None else {**found, "cuda": fingerprint(random.torch_cuda)}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inside for tensor in tensors_in(part)]


class Recorder:
    """Writes one worker's notes."""

    def __init__(self, folder: Path, env: WorkerEnv, engine: VirtualEngine, prepared: Prepared) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Line by line: a worker that is killed because another one failed leaves what it saw.
        self._file = (folder / f"g{env.generation}-w{env.worker}.jsonl").open("w", buffering=1)
        self._engine = engine
        self._prepared = prepared
        self._surroundings = Surroundings()
        self._env = env
        self._step = 0  # complete steps
        self._round = -1  # rounds since the last step: accumulation and evaluation have several
        self._turn: dict[str, Any] = {}
        self._of_step: dict[str, Any] = {}
        self._watch()

    def _watch(self) -> None:
        engine, model = self._engine, self._prepared.model
        engine.on_enter, engine.on_leave = self._turn_began, self._turn_ended
        engine.gradients.observer, engine.on_reduced = self._saw_gradient, self._saw_sum
        self._watch_calls(model)
        for k, optimizer in enumerate(self._prepared.optimizers):
            optimizer.register_step_pre_hook(partial(self._before_update, k))
            optimizer.register_step_post_hook(partial(self._after_update, k))

    def _watch_calls(self, model: nn.Module) -> None:
        """Of all modules; of a compiled one from outside, since hooks on it or within it would be compiled, too."""
        compiled: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) or any(map(name.startswith, compiled)):
                continue
            saw = partial(self._saw_call, name)
            if not watch_compiled_calls(module, partial(saw, module)):
                module.register_forward_hook(ModelHook(saw), with_kwargs=True)
            if is_compiled(module):
                compiled.append(f"{name}." if name else "")

    def _workers(self) -> int:
        return 1 if self._engine.generation is None else self._engine.generation.fabric.size

    def _is_main(self) -> bool:
        return 0 in self._engine.contexts

    def began(self, step: int) -> None:
        """Training begins, or goes on, after `step` steps."""
        self._step = step
        model = self._prepared.model
        self._note(
            kind="start",
            workers=self._workers(),
            modules={name: [type(m).__name__, type(m).__module__] for name, m in model.named_modules()},
            params=self._params(),
        )

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn_began(self, turn: Turn) -> None:
        if turn.virtual_worker == self._engine.order[0]:
            self._round += 1
        self._surroundings.look()
        before = random_fingerprints(RandomState.capture())
        self._turn = {
            "kind": "turn",
            "round": self._round,
            "virtual": turn.virtual_worker,
            "params": self._params(),
            "before": before,
            "with_batch": before,
            "batch": "",
            "calls": [],
            "logged": {},
            "shown": {},
            "loss_grad": [],
            "grads": {},
            "state": {path: fingerprint(value) for path, value in self._surroundings.numbers.items()},
            "generators": self._surroundings.generator_states(fingerprint),
        }

    def saw_batch(self, batch: Any, dataset: Any) -> None:
        """The loader is about to hand this batch to the virtual worker whose turn it is."""
        self._surroundings.datasets[id(dataset)] = dataset
        self._turn["batch"] = fingerprint(batch)
        self._turn["with_batch"] = random_fingerprints(RandomState.capture())

    def _saw_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._engine.turn is None or torch.compiler.is_compiling():
            return
        self._turn["calls"].append([name, fingerprint([args, kwargs]), fingerprint(output)])
        if module is self._prepared.model and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._saw_loss_gradient)

    def _saw_loss_gradient(self, grad: Tensor) -> None:
        if self._engine.turn is not None:
            self._turn["loss_grad"].append(fingerprint(grad))

    def logged(self, virtual_worker: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._turn["logged"][name] = fingerprint(value)
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            self._turn["shown"][name] = repr(plain)[:40]

    def _saw_gradient(self, virtual_worker: int, index: int, grad: Tensor) -> None:
        self._turn["grads"][self._engine.names[index]] = fingerprint(grad)

    def _turn_ended(self, turn: Turn) -> None:
        context = self._engine.contexts[turn.virtual_worker]
        buffers = self._engine.buffers.by_name(context.buffers)
        drawn = self._surroundings.generator_states(fingerprint)
        started = self._turn["generators"]
        self._turn["generators"] = {path: [*started[path], now[1]] for path, now in drawn.items() if path in started}
        self._turn["buffers"] = {name: fingerprint(t) for name, t in buffers.items()}
        self._turn["after"] = random_fingerprints(context.random)
        self._note(**self._turn)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _saw_sum(self) -> None:
        self._of_step["sum"] = self._grads()

    def _before_update(self, k: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._of_step["given"] = self._grads()
        self._of_step["settings"] = self._of_step.get("settings", {}) | {
            f"{k}.{i}.{name}": fingerprint(value)
            for i, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        self._of_step.setdefault("params_before", self._params())

    def _after_update(self, k: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._of_step["params_after"] = self._params()

    def met(self) -> None:
        """The workers are about to compare themselves outside any step."""
        self._note(kind="meeting", params=self._params())

    def stepped(self, step: int) -> None:
        kind = "step" if self._is_main() else "replica"
        optim = {
            f"{k}.{i}.{name}": fingerprint(value)
            for k, optimizer in enumerate(self._prepared.optimizers)
            for i, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        self._note(kind=kind, **self._of_step, optim=optim, params=self._params())
        self._step, self._round, self._of_step = step, -1, {}

    def _params(self) -> dict[str, str]:
        return {name: fingerprint(p) for name, p in self._prepared.model.named_parameters()}

    def _grads(self) -> dict[str, str]:
        named = zip(self._engine.names, self._engine.params, strict=True)
        return {name: fingerprint(p.grad) for name, p in named}

    def _note(self, **fields: Any) -> None:
        self._file.write(json.dumps({"step": self._step + 1, **fields}) + "\n")

    def close(self) -> None:
        self._file.close()
