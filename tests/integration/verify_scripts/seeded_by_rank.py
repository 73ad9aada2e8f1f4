"""Every worker seeds with the rank that it has before training: that of its first virtual worker."""

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(session.rank)
session.prepare(model, optimizer)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
