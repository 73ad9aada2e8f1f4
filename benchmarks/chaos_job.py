"""A small job that uses everything a crash could damage: dropout, BatchNorm, augmentation in data-loading processes,
clipping, a scheduler. Writes a digest of all state at the end.

    chaos_job.py OUT [--steps N] [--pause SECONDS] [--loaders N]
"""

import argparse
import faulthandler
import hashlib
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import concertina as ct


class Noisy(Dataset):
    """Samples that draw random numbers when they are made."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator) + 0.01 * torch.randn(16)
        return x, (x[:4].sum() > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds each turn waits, as it would for a GPU")
    parser.add_argument("--loaders", type=int, default=0)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR2)  # where all threads are, into the worker's log: for runs that do not end
    session = ct.join()
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    session.seed(7)
    loader = session.loader(Noisy(), batch_size=8, seed=3, num_workers=args.loaders)
    for _ in session.epochs(1000):
        for x, y in loader:
            time.sleep(args.pause)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.log(loss=loss)
    if session.is_main:
        digest = hashlib.sha256()
        kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
        for tensor in [*model.parameters(), *model.buffers(), *kept]:
            digest.update(tensor.detach().numpy().tobytes())
        digest.update(repr(scheduler.state_dict()).encode())
        args.out.write_text(digest.hexdigest())


main()
