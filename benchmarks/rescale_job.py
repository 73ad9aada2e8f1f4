"""The job that `benchmarks.rescale` grows, shrinks and moves: a model of a wanted size in an ordinary loop.

    rescale_job.py MARKS --megabytes 100 [--pause SECONDS] [--device cuda] [--costs]

A turn sleeps for `--pause` seconds, as a worker does whose GPU computes, then makes real gradients of all parameters.
On `--device cuda` model, gradients and optimizer are on a GPU, which all workers of the machine share.
Every worker writes when each of its steps ended to a file of its own in the folder MARKS, so that pauses are seen
from the workers that stay. With `--costs` it also writes what our coordination took of its CPU time.
"""

import argparse
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

LAYERS = 8
STEPS_PER_EPOCH = 4096
WARM_STEPS = 50  # of the measurement of costs


def make_model(megabytes: float) -> nn.Sequential:
    """float32 parameters of about so many megabytes, in layers of equal size."""
    width = max(16, round((megabytes * 250_000 / LAYERS) ** 0.5 / 16) * 16)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def finish(device: torch.device) -> None:
    """A step has ended when the GPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """One line per step that ended: its time, its number, the generation that made it."""

    def __init__(self, folder: Path, **about: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.getpid()}.marks"
        self._file = self.path.open("w", buffering=1)
        self._file.write(json.dumps({"pid": os.getpid(), **about}) + "\n")

    def step(self, step: int, generation: int) -> None:
        self._file.write(f"[{time.monotonic():.6f}, {step}, {generation}]\n")


class Samples(Dataset):
    """Random vectors, one a step and virtual worker."""

    def __init__(self, count: int, width: int) -> None:
        self._count, self._width = count, width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(index))


class Costs:
    """CPU time of this process's coordination: calls on the training thread, and threads of our own."""

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}
        self._within: list[float] = []  # for each call that is open: what calls within it took
        self._begun_at = 0
        self._threads: dict[str, float] = {}

    def around(self, owner: Any, name: str, part: bool = False) -> None:
        """Counts what `owner.name` takes of the calling thread, less what is counted of calls within it.

        A `part` counts only within another one.
        """
        inner = getattr(owner, name, None)
        if inner is None:
            return
        label = f"{owner.__name__}.{name}"

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or (part and not self._within):
                return inner(*args, **kwargs)
            self._within.append(0.0)
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self._taken[label] = self._taken.get(label, 0.0) + took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        setattr(owner, name, outer)

    def step(self, step: int, path: Path) -> None:
        if step == WARM_STEPS:
            self._taken, self._begun_at = {}, step
            self._threads = self._by_thread()
        elif step > WARM_STEPS and step % 100 == 0:
            steps = step - self._begun_at
            rows = {label: 1e6 * taken / steps for label, taken in self._taken.items()}
            for name, taken in self._by_thread().items():
                rows[f"thread {name}"] = 1e6 * (taken - self._threads.get(name, 0.0)) / steps
            path.write_text(json.dumps({"steps": steps, "microseconds": rows}))

    @staticmethod
    def _by_thread() -> dict[str, float]:
        found: dict[str, float] = {}
        for thread in threading.enumerate():
            if thread.name.startswith("concertina") and thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                found[thread.name] = found.get(thread.name, 0.0) + time.clock_gettime(clock)
        return found


def count_costs() -> Costs:
    """What runs once a step and has to do with others: the meeting, contexts kept for others, fingerprints."""
    from concertina.runtime.elastic import Elastic
    from concertina.runtime.fabric import Fabric

    costs = Costs()
    for name in ("agree", "make_final", "fingerprint"):
        costs.around(Elastic, name)
    costs.around(Elastic, "_keep_contexts", part=True)
    costs.around(Fabric, "_wait", part=True)  # polling while another worker is not there yet
    return costs


def main() -> None:
    import concertina as ct

    parser = argparse.ArgumentParser()
    parser.add_argument("marks", type=Path)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--costs", action="store_true")
    args = parser.parse_args()
    costs = count_costs() if args.costs else None

    session = ct.join()
    torch.manual_seed(0)
    device = session.device if args.device == "cuda" else torch.device("cpu")
    model = make_model(args.megabytes).to(device)
    optimizer = make_optimizer(model)
    width = model[0].in_features
    model, optimizer = session.prepare(model, optimizer)
    loader = session.loader(Samples(STEPS_PER_EPOCH * session.size, width), batch_size=1, shuffle=False)
    marks = Marks(args.marks)
    generation = [0]
    session.on_rescale(lambda number, workers: generation.__setitem__(0, number))
    for _ in session.epochs(1_000_000):
        for x in loader:
            time.sleep(args.pause)
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.is_last_turn:
                finish(device)
                marks.step(session.step + 1, generation[0])
                if costs is not None:
                    costs.step(session.step + 1, marks.path.with_suffix(".costs"))


if __name__ == "__main__":
    main()
