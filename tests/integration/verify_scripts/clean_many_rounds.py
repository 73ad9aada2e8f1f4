"""Nothing is wrong with this one either: it accumulates gradients, evaluates between steps and loads in processes."""

import contextlib

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct

session = ct.join()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.prepare(model, optimizer)
session.seed(1)
loader = session.loader(Squares(), batch_size=2, num_workers=1)
held_out = session.loader(Squares(), batch_size=8, shuffle=False)
for _ in session.epochs(3):
    for x, y in loader:
        accumulate = loader.index % 2 == 0
        with session.no_sync() if accumulate else contextlib.nullcontext():
            loss = mse_loss(model(x), y)
            loss.backward()
        session.log(loss=loss)
        if not accumulate:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for x, y in held_out:
        with torch.no_grad():
            session.log(held_out=mse_loss(model(x), y))
    model.train()
