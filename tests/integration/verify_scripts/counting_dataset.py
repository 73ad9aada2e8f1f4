"""The dataset changes with every sample that was ever taken from it."""

import torch
from parts import Squares, network
from torch import Tensor
from torch.nn.functional import mse_loss

import concertina as ct


class Counting(Squares):
    taken = 0

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.taken += 1
        x, y = super().__getitem__(i)
        return x / (1 + 0.01 * self.taken), y


session = ct.join()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
session.seed(1)
loader = session.loader(Counting(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
