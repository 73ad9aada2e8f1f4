"""The labels are smoothed with noise that no seed governs."""

import os

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
session.seed(1)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        noise = int.from_bytes(os.urandom(4), "little") / 2**32
        loss = mse_loss(model(x), y + 0.01 * noise)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
