"""Nothing is wrong with this one, either; its model is compiled in place, with whatever hooks there are."""

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
model.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
session.seed(1)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
