"""The reference: plain DistributedDataParallel over gloo, started by torchrun. Runs a list of jobs in one launch."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import Job, body, make_dataset, make_model, make_optimizer, make_scaler, seed_rank, set_flags
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(job: Job, rank: int, world: int) -> dict:
    set_flags(job)
    model = make_model(job)
    ddp = DistributedDataParallel(model, **job.ddp)
    opt, sched = make_optimizer(job, ddp)
    scaler = make_scaler(job)
    seed_rank(rank)
    dataset = make_dataset(job)
    sampler = DistributedSampler(dataset, world, rank, shuffle=True, seed=3, drop_last=job.drop_last)
    loader = DataLoader(
        dataset, batch_size=job.batch, sampler=sampler, drop_last=job.drop_last, num_workers=job.num_workers,
        persistent_workers=job.persistent,
    )  # fmt: skip
    losses, step, epoch = [], 0, 0
    while step < job.steps:
        sampler.set_epoch(epoch)
        for index, batch in enumerate(loader):
            losses.append(body(job, ddp, opt, sched, scaler, batch, index, ddp.no_sync))
            step += (index + 1) % job.accumulate == 0
            if step >= job.steps:
                break
        epoch += 1
    return {
        "params": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "opt": opt.state_dict(),
        "sched": sched.state_dict(),
        "scaler": scaler.state_dict(),
        "losses": torch.stack(losses),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    out = Path(sys.argv[2])
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        job = Job(**spec)
        torch.save(train(job, rank, world), out / f"{job.name}-r{rank}.pt")
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort it, long after the results are saved


main()
