"""A regression MLP that learns a wavy surface. Needs nothing but torch: start reading here.

python examples/mlp.py                                                       alone
concertina run --virtual 4 --workers 1 --resize "40=4,80=2" examples/mlp.py  on 1, then 4, then 2 workers
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import concertina as ct


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

    session = ct.join()
    device = session.device
    torch.manual_seed(0)
    loader = session.loader(TensorDataset(*surface(4000, seed=1)), batch_size=32, shuffle=True, seed=0)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    session.seed(1)

    for epoch in session.epochs(args.epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.log(loss=loss)
        if session.is_main:
            print(f"epoch {epoch}: mean squared error {evaluate(model):.5f}", flush=True)
    if session.is_main and args.out:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
