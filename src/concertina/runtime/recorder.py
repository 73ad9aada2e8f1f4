"""Notes down what a job computes, step by step, so that two runs can be compared to the bit.

One JSON line per turn and per step: hashes of every gradient, buffer, logged value and parameter. `concertina verify`
and the tests of the project read them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concertina.core.env import WorkerEnv
from concertina.runtime.digest import bit_pattern
from concertina.runtime.prepared import Prepared
from concertina.runtime.virtual import Turn, VirtualEngine


def fingerprint(value: Any) -> str:
    """A short hash of all bits of a tensor, or the value itself."""
    if isinstance(value, Tensor):
        raw = bit_pattern(value.detach().cpu().contiguous()).numpy().tobytes()
        return hashlib.blake2b(raw, digest_size=8).hexdigest()
    if isinstance(value, float):
        return value.hex()
    return repr(value)


class Recorder:
    """Writes one worker's notes."""

    def __init__(self, folder: Path, env: WorkerEnv, engine: VirtualEngine, prepared: Prepared) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"g{env.generation}-w{env.worker}.jsonl").open("w")
        self._engine = engine
        self._prepared = prepared
        self._logged: dict[str, str] = {}
        self._grads: dict[str, str] = {}
        self._step = 0
        self._is_main = env.worker == env.placement.host(0)
        engine.observer = self._saw_gradient
        engine.on_leave = self._turn_ended

    def logged(self, virtual_worker: int, values: dict[str, Any]) -> None:
        self._logged |= {name: fingerprint(value) for name, value in values.items()}

    def _saw_gradient(self, virtual_worker: int, index: int, grad: Tensor) -> None:
        self._grads[self._engine.names[index]] = fingerprint(grad)

    def _turn_ended(self, turn: Turn) -> None:
        v = turn.virtual_worker
        buffers = self._engine.buffers.by_name(self._engine.contexts[v].buffers)
        self._note(
            kind="turn",
            virtual=v,
            logged=self._logged,
            grads=self._grads,
            buffers={name: fingerprint(t) for name, t in buffers.items()},
            random={k: fingerprint(t) for k, t in _random_tensors(self._engine.contexts[v].random.state()).items()},
        )
        self._logged, self._grads = {}, {}

    def stepped(self, step: int) -> None:
        if self._is_main:
            named = self._prepared.model.named_parameters()
            self._note(kind="step", params={name: fingerprint(p) for name, p in named}, optim=self._optimizer_digest())
        self._step = step

    def _optimizer_digest(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for k, optimizer in enumerate(self._prepared.optimizers):
            for i, state in optimizer.state_dict()["state"].items():
                found |= {f"{k}.{i}.{name}": fingerprint(value) for name, value in state.items()}
            lrs = [group["lr"] for group in optimizer.param_groups]
            found[f"{k}.lr"] = " ".join(fingerprint(float(lr)) for lr in lrs)
        return found

    def _note(self, **fields: Any) -> None:
        self._file.write(json.dumps({"step": self._step + 1, **fields}) + "\n")

    def close(self) -> None:
        self._file.close()


def _random_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    found = {"python": state["python"][1], "numpy": state["numpy"][1], "torch": state["torch_cpu"]}
    cuda = state["torch_cuda"]
    return found if cuda is None else {**found, "cuda": torch.as_tensor(cuda)}
