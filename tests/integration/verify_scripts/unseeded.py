"""Augments with NumPy's random numbers and never seeds them."""

import numpy as np
import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        x = x * float(np.random.uniform(0.9, 1.1))
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
