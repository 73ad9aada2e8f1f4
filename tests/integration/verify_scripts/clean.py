"""Nothing is wrong with this one."""

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
session.prepare(model, optimizer, scheduler)
session.seed(1)
loader = session.loader(Squares(), batch_size=6)
for _ in session.epochs(5):
    for x, y in loader:
        loss = mse_loss(model(x), y)
        loss.backward()
        session.log(loss=loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
