"""The loss is divided by its own running average, which passes from virtual worker to virtual worker."""

import torch
from parts import Squares, network
from torch.nn.functional import mse_loss

import concertina as ct


def main() -> None:
    session = ct.join()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    session.seed(1)
    loader = session.loader(Squares(), batch_size=6)
    average = 1.0
    for _ in session.epochs(5):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            average = 0.9 * average + 0.1 * loss.item()
            (loss / average).backward()
            session.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


main()
