"""A character transformer that reads what Python's help() says about the language.

    python examples/chars.py                                                              alone
    concertina run --virtual 4 --workers 1 --resize "40=4,80=2" examples/chars.py         on 1, 4, then 2 workers

Tied embedding, dropout, AdamW and gradient clipping, all where a DDP script has them.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import concertina as ct

CONTEXT = 32
TEXT = "\n".join(topics.values())[:100_000]
ALPHABET = sorted(set(TEXT))
CODES = torch.tensor([ALPHABET.index(c) for c in TEXT])
TRAIN = 80_000  # characters to learn from; the other 20,000 are for testing


class Snippets(Dataset):
    """Snippets of text, each with itself shifted by one as the answer."""

    def __init__(self, codes):
        self.codes = codes

    def __len__(self):
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, i):
        piece = self.codes[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Transformer(nn.Module):
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.embedding.weight  # tied
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.layers(self.embedding(x) + self.place, mask=mask, is_causal=True))


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def evaluate(model):
    snippets, device = Snippets(CODES[TRAIN:]), model.place.device
    x, y = map(torch.stack, zip(*(snippets[i] for i in range(len(snippets))), strict=True))
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, x.to(device), y.to(device)).item()
    model.train()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="", help="file for the trained weights")
    args = parser.parse_args()

    session = ct.join()
    device = session.device
    torch.manual_seed(0)
    loader = session.loader(Snippets(CODES[:TRAIN]), batch_size=16, shuffle=True, seed=0)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = session.prepare(model, optimizer)
    session.seed(1)

    for epoch in session.epochs(args.epochs):
        for x, y in loader:
            loss = loss_of(model, x.to(device), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss)
        if session.is_main:
            print(f"epoch {epoch}: test loss {evaluate(model):.3f} per character", flush=True)
    if session.is_main and args.out:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
