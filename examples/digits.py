"""Handwritten digits: a small CNN with BatchNorm, dropout and random augmentation.

    python examples/digits.py                                                              alone
    concertina run --virtual 4 --workers 1 --resize "40=4,80=2" examples/digits.py         on 1, 4, then 2 workers

--virtual decides the result, the number of workers does not: the model is the same to the bit.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

import concertina as ct

TRAIN = 1437  # images to learn from; the other 360 are for testing


def load_digits():
    """The images inside the scikit-learn package, without the time that importing it takes."""
    package = Path(find_spec("sklearn").origin).parent
    table = torch.from_numpy(np.loadtxt(package / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32))
    return table[:, :64].view(-1, 1, 8, 8) / 16, table[:, 64].long()


class Digits(Dataset):
    """8x8 images that shift by a pixel and get some noise whenever they are looked at."""

    def __init__(self):
        images, labels = load_digits()
        self.images, self.labels = images[:TRAIN], labels[:TRAIN]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        dx, dy = torch.randint(3, (2,)).tolist()
        shifted = F.pad(self.images[i], (1, 1, 1, 1))[:, dy : dy + 8, dx : dx + 8]
        return shifted + 0.05 * torch.randn(1, 8, 8), self.labels[i]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(256, 10),
    )  # fmt: skip


def evaluate(model):
    images, labels = (t[TRAIN:].to(next(model.parameters()).device) for t in load_digits())
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", default="", help="file for the trained weights")
    args = parser.parse_args()

    session = ct.join()
    device = session.device
    torch.manual_seed(0)
    loader = session.loader(Digits(), batch_size=16, shuffle=True, seed=0, drop_last=True)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=args.epochs * len(loader))
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    session.seed(1)

    for epoch in session.epochs(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.log(loss=loss)
        if session.is_main:
            print(f"epoch {epoch}: test accuracy {evaluate(model):.1%}", flush=True)
    if session.is_main and args.out:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
