"""A character transformer that reads what Python's help() says about the language.

    torchrun --nproc-per-node 4 examples/chars_ddp.py

The plain DistributedDataParallel twin of chars.py: `diff examples/chars_ddp.py examples/chars.py`.
"""

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # the kernels that concertina takes, too
    torch.manual_seed(0)
    dataset = Snippets(CODES[:TRAIN])
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_of(model, x.to(device), y.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test loss {evaluate(model.module):.3f} per character", flush=True)
    if dist.get_rank() == 0 and args.out:
        torch.save(model.module.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
