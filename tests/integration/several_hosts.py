"""Workers on several hosts that are this machine: loopback addresses, or network namespaces."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

import torch
from namespaces import Network

from concertina.backends.local import LocalBackend
from concertina.core.messages import MASTER
from concertina.core.seats import Host

SCRIPT = """
import pathlib, sys, time, torch, concertina as ct
from torch import nn
from torch.utils.data import TensorDataset

go = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
session = ct.join()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(256, 8, generator=g), torch.randn(256, 1, generator=g))
model, optimizer = session.prepare(model, optimizer)
session.seed(7)
loader = session.loader(data, batch_size=4)
for epoch in session.epochs(1000):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        for _ in range(1 if session.step < 30 else 300):  # slow towards the end, until the test has done all it wants
            if not go.exists():
                time.sleep(0.01)
"""


class LoopbackHosts(LocalBackend):
    """Every host is an address of the loopback interface, with so many slots."""

    address = "127.0.0.1"
    slots = (1, 1, 1)

    def hosts(self) -> Sequence[Host]:
        return [Host(f"127.0.0.{2 + k}", f"127.0.0.{2 + k}", slots) for k, slots in enumerate(self.slots)]

    def host_of(self, node: str) -> str:
        return node


class NamespaceHosts:
    """A nursery in every namespace; the master is here. A host that was cut off can be given up on: then its workers
    count as ended although nobody could end them, as a backend has to do that cannot reach them any more."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.address = network.address
        self._network = network
        self._here = LocalBackend.open(folder / "here", 1)
        self._there = {h.name: LocalBackend.open(folder / h.name, 1, prefix=h.prefix) for h in network.hosts}
        self._home: dict[int, str] = {}
        self._gone: set[str] = set()
        self.deaf: set[str] = set()  # hosts that our signals do not reach
        self._given_up: set[int] = set()
        self._to_tell: list[dict[str, object]] = []

    def hosts(self) -> Sequence[Host]:
        return [Host(h.name, h.address, 1) for h in self._network.hosts if h.name not in self._gone]

    def give_up(self, name: str) -> None:
        self._gone.add(name)
        for worker, home in self._home.items():
            if home == name and self._there[name].pid_of(worker) is not None and worker not in self._given_up:
                self._given_up.add(worker)
                self._to_tell.append({"event": "worker_exited", "worker": worker, "pid": 0, "code": -SIGKILL})

    def take_back(self, name: str) -> None:
        self._gone.discard(name)

    def start_worker(
        self, worker: int, script: Path, args: Sequence[str], env: Mapping[str, str], log: Path, node: str = ""
    ) -> None:
        self._home[worker] = node
        self._there[node].start_worker(worker, script, args, env, log)

    def host_of(self, node: str) -> str:
        return next(h.address for h in self._network.hosts if h.name == node)

    def start_master(self, env: Mapping[str, str], log: Path) -> None:
        self._here.start_master(env, log)

    def events(self, timeout: float, also: int | None = None) -> list[dict[str, object]]:
        until = time.monotonic() + timeout
        while True:
            found, self._to_tell = self._to_tell, []
            if also is not None:
                with suppress(BlockingIOError):
                    os.set_blocking(also, False)
                    os.read(also, 4096)
            for backend in (self._here, *self._there.values()):
                found += [e for e in backend.events(0.0) if e.get("worker") not in self._given_up]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.01)

    def signal_workers(self, number: Signals, workers: Sequence[int] | None = None) -> None:
        for name, backend in self._there.items():
            if name not in self.deaf:
                backend.signal_workers(number, workers)
        if workers is not None and MASTER in workers:
            self._here.signal_workers(number, (MASTER,))

    def pid_of(self, worker: int) -> int | None:
        return self._here.pid_of(worker) if worker == MASTER else self._there[self._home[worker]].pid_of(worker)

    def end_workers(self) -> None:
        for backend in (self._here, *self._there.values()):
            backend.end_workers()

    def close(self) -> None:
        for backend in (self._here, *self._there.values()):
            backend.close()


def differences(a: Path, b: Path) -> list[str]:
    """What of two checkpoints is not equal to the bit, but for how many workers made them."""
    names = sorted(path.name for path in a.glob("*.pt"))
    if names != sorted(path.name for path in b.glob("*.pt")):
        return ["files"]
    found = []
    for name in names:
        one, other = (torch.load(folder / name, weights_only=True) for folder in (a, b))
        if "scaling" in one:
            one.pop("scaling"), other.pop("scaling")
        found += _differences(name, one, other)
    return found


def _differences(name: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [x for key in a for x in _differences(f"{name}.{key}", a[key], b[key])]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [x for k, (p, q) in enumerate(zip(a, b, strict=True)) for x in _differences(f"{name}.{k}", p, q)]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return [] if same and a.numpy().tobytes() == b.numpy().tobytes() else [name]
    return [] if a == b else [name]
