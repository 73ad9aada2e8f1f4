"""Step time against plain DDP, and the reduction against gloo's all-reduce, on this machine's CPU.

    python -m benchmarks.runtime          prints the table of docs/results/runtime.md

Everything compared is measured in the same processes, in alternating blocks, and reported as a ratio of medians.
"""

import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import concertina as ct
from concertina.core.env import WorkerEnv
from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.fabric import Fabric, Post
from concertina.runtime.gloo_contexts import ring_sum
from concertina.runtime.group import Group
from concertina.runtime.rendezvous import meet_in
from concertina.runtime.shared_fold import SharedFold
from concertina.runtime.virtual_ring import VirtualRing

BUCKET = 6_500_000  # float32 elements: 26 MB
REDUCTIONS = ((4, 2), (4, 3), (8, 2), (8, 4))


# -- step time, P = W = 2 -------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """2.8 million parameters in 26 tensors, with BatchNorm: a step of a few hundred milliseconds on one core."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def step_times(rank: int, world: int, folder: str, blocks: int, steps: int) -> None:
    """DDP and concertina on two copies of a model, block by block in the same two processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/ddp", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    twins = [ConvNet(), ConvNet()]
    twins[1].load_state_dict(twins[0].state_dict())
    ddp = DistributedDataParallel(twins[0])
    ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    batches = [(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))) for _ in range(world * steps)]
    loss_of = nn.CrossEntropyLoss()

    env = WorkerEnv(virtual=world, members=tuple(range(world)), worker=rank, run_dir=folder, threads=1, level="D0")
    os.environ.update(env.to_environ())
    dist_is_initialized, dist.is_initialized = dist.is_initialized, lambda: False  # the other half of this process
    session = ct.join()
    optimizer = torch.optim.SGD(twins[1].parameters(), lr=0.01, momentum=0.9)
    model, optimizer = session.prepare(twins[1], optimizer)
    dist.is_initialized = dist_is_initialized
    loader = session.loader(batches, batch_size=1, shuffle=False, collate_fn=lambda items: items[0])
    mine = [batches[k] for k in range(rank, len(batches), world)]
    times: dict[str, list[float]] = {"ddp": [], "concertina": []}
    for epoch in session.epochs(blocks + 1):
        dist.barrier()
        ours = timed_steps(loader, model, optimizer, loss_of)
        dist.barrier()
        theirs = timed_steps(mine, ddp, ddp_optimizer, loss_of)
        if epoch:
            times["concertina"] += ours
            times["ddp"] += theirs
    same = all(torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))
    if rank == 0:
        row = {side: 1000 * statistics.median(values) for side, values in times.items()}
        Path(folder, "steps.json").write_text(json.dumps({**row, "same_bits": same, "steps": len(times["ddp"])}))
    dist.barrier()
    os._exit(0)  # two process groups in one process do not end quietly


def timed_steps(batches: Any, model: Any, optimizer: Any, loss_of: Any) -> list[float]:
    marks = [time.perf_counter()]
    for x, y in batches:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
    return [b - a for a, b in pairwise(marks[1:])]  # the first step opens the pass


def measure_steps(blocks: int = 8, steps: int = 12) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(step_times, args=(2, folder, blocks, steps), nprocs=2)
        return json.loads(Path(folder, "steps.json").read_text())


# -- the reduction of one bucket --------------------------------------------------------------------------------------


def reduction_times(rank: int, virtual: int, workers: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    post, members = Post.create(), tuple(range(workers))
    formation = meet_in(Path(folder), 0, rank, members, virtual, post.segment.address, "")
    fabric = Fabric.form(0, members, rank, post, formation.posts)
    fabric.meet()
    group = Group(Path(folder) / "group", fabric)
    layout = BucketLayout.initial([torch.empty(BUCKET)], DdpOptions())
    placement = VirtualPlacement.blocks(virtual, workers)
    reducers: dict[str, Any] = {
        "shared": SharedFold(layout, placement, fabric),
        "ring": VirtualRing(layout, placement, group),
    }
    terms = [torch.randn(BUCKET, generator=torch.Generator().manual_seed(v)) for v in range(virtual)]
    for reducer in reducers.values():
        for v in reducer.order:
            reducer.buffer(v, 0).copy_(terms[v])
    flat = terms[rank].clone()
    times: dict[str, list[float]] = {"native": [], "shared": [], "ring": []}
    for _ in range(repeats):
        for side, taken in times.items():
            fabric.meet()
            began = time.perf_counter()
            if side == "native":
                group.sum_async(flat).wait()
            else:
                reducers[side].ready(reducers[side].order[-1], 0)
                reducers[side].fold()
                fabric.meet()
                total = reducers[side].results()[0]
            fabric.meet()
            taken.append(time.perf_counter() - began)
            assert side == "native" or torch.equal(total, ring_sum(terms)), f"the sum of {side} is not gloo's"
    if rank == 0:
        row = {side: 1000 * statistics.median(values[2:]) for side, values in times.items()}
        sent = reducers["ring"].bytes_sent / repeats / 4 / BUCKET
        Path(folder, "ring.json").write_text(json.dumps({**row, "sent": sent}))
    fabric.meet()


def measure_reduction(virtual: int, workers: int, repeats: int = 25) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(reduction_times, args=(virtual, workers, folder, repeats), nprocs=workers)
        return json.loads(Path(folder, "ring.json").read_text())


def main() -> None:
    steps = measure_steps()
    ratio = steps["concertina"] / steps["ddp"]
    print(f"step time, P = W = 2: concertina {steps['concertina']:.1f} ms, DDP {steps['ddp']:.1f} ms, "
          f"ratio {ratio:.3f}, same bits: {steps['same_bits']}")  # fmt: skip
    print()
    print("| P | W | all-reduce of W processes ms | shared memory | virtual ring | ring sends per worker (buckets) |")
    print("|---|---|---|---|---|---|")
    for virtual, workers in REDUCTIONS:
        row = measure_reduction(virtual, workers)
        shared, ring = row["shared"] / row["native"], row["ring"] / row["native"]
        print(
            f"| {virtual} | {workers} | {row['native']:.1f} | {shared:.2f} | {ring:.2f} | {row['sent']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
