"""A job whose parameters count how often each record of a sharded stream was part of a step that counted.

shard_job.py OUT --lengths 5,0,9 [--batch N] [--epochs N] [--pause SECONDS]
"""

import argparse
import time

import torch
from torch import nn

import concertina as ct


class Tally(nn.Module):
    """The gradient of `count` is 1 for every record of a batch; `mix` depends on the order of all batches."""

    def __init__(self, records: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(records, dtype=torch.float64))
        self.mix = nn.Parameter(torch.ones(16))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(numbers[:, None] * torch.arange(1, 17))
        noise = 1 + 0.1 * torch.randn(())
        return self.count[numbers].sum() + noise * (self.mix * waves).tanh().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    firsts = [sum(lengths[:k]) for k in range(len(lengths))]

    def read(item: int) -> object:
        """Every other item is a list, as of a file that is read at once; the others come one by one."""
        numbers = range(firsts[item], firsts[item] + lengths[item])
        return list(numbers) if item % 2 else (n for n in numbers)

    session = ct.join()
    torch.manual_seed(0)
    model = Tally(sum(lengths))
    groups = [{"params": [model.count], "lr": -float(session.size)}, {"params": [model.mix], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    model, optimizer = session.prepare(model, optimizer)
    session.seed(1)
    stream = session.shards(list(range(len(lengths))), read, batch_size=args.batch, seed=3)

    for _ in session.epochs(args.epochs):
        for numbers in stream:
            time.sleep(args.pause)
            loss = model(numbers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if session.is_main:
            torch.save({"count": model.count.data, "mix": model.mix.data, "step": session.step}, args.out)


main()
