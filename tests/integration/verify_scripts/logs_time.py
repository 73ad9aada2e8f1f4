"""Logs how long a step took, which is different every time and harms nothing."""

import time

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
for _ in session.epochs(1):
    for x, y in loader:
        began = time.perf_counter()
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss, seconds=time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad()
