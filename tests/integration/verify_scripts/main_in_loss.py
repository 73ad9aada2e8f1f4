"""The worker that hosts virtual worker 0 regularises, the others do not."""

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
        loss = mse_loss(model(x), y)
        if session.is_main:
            loss = loss + 0.01 * model[0].weight.square().sum()
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
