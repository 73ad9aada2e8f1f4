"""A layer draws its noise from a generator of its own, which the virtual workers of a process share."""

import torch
from parts import Squares, network
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import concertina as ct


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


session = ct.join()
model = nn.Sequential()
model.add_module("trunk", network())
model.add_module("noise", Noise())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
session.seed(1)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
