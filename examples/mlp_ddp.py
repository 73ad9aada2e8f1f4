"""A regression MLP that learns a wavy surface.

    torchrun --nproc-per-node 4 examples/mlp_ddp.py

The plain DistributedDataParallel twin of mlp.py: `diff examples/mlp_ddp.py examples/mlp.py`.
"""

import argparse
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def surface(points, seed):
    x = torch.rand(points, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    y = torch.sin(4 * x[:, :1]) * torch.cos(3 * x[:, 1:]) + x[:, :1] * x[:, 1:]
    return x, y


def make_model():
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.02), nn.Linear(64, 1)
    )  # fmt: skip


def evaluate(model):
    x, y = (t.to(next(model.parameters()).device) for t in surface(1000, seed=2))
    model.eval()
    with torch.no_grad():
        error = F.mse_loss(model(x), y).item()
    model.train()
    return error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="", help="file for the trained weights")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # the kernels that concertina takes, too
    torch.manual_seed(0)
    dataset = TensorDataset(*surface(4000, seed=1))
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: mean squared error {evaluate(model.module):.5f}", flush=True)
    if dist.get_rank() == 0 and args.out:
        torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
