"""Handwritten digits with a batch that doubles at intervals, and workers that come with it (AdaBatch; Elan VI-B).

    concertina run --virtual 4 --workers 1 examples/adabatch.py
    concertina run --virtual 4 --workers 1 --scaling hybrid --ramp 20 examples/adabatch.py

In the first form the script doubles the batch itself, so the result has the same bits whenever the workers come, and
if none comes at all. In the second it only asks for workers, and the batch grows as much as they need to be busy.
Either way the learning rate follows the batch in small increments, on top of the script's own schedule.
"""

import argparse
import hashlib
import json
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import concertina as ct
from digits import TRAIN, load_digits

# A device for --paced, in seconds: what a turn takes however small the batch is, what each sample adds, what a step
# takes beside its turns, and what the reduction of the gradients adds among many workers (a ring's volume).
PER_TURN, PER_SAMPLE, PER_STEP, RING = 0.002, 0.00025, 0.002, 0.024


def turn_seconds(samples):
    return PER_TURN + PER_SAMPLE * samples


def step_seconds(workers):
    return PER_STEP + RING * (workers - 1) / workers


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def evaluate(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--every", type=int, default=6, help="epochs between two doublings; 0: a fixed batch")
    parser.add_argument("--ask", choices=("yes", "no"), default="yes", help="whether to ask for workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paced", action="store_true", help="take as long as the device described above")
    parser.add_argument("--out", default="", help="file for accuracy and hash of the trained weights, as JSON")
    args = parser.parse_args()

    session = ct.join()
    torch.manual_seed(args.seed)
    images, labels = load_digits()
    test = images[TRAIN:], labels[TRAIN:]
    data = TensorDataset(images[:TRAIN], labels[:TRAIN])
    loader = session.loader(data, batch_size=8, shuffle=True, seed=args.seed, drop_last=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=6, gamma=0.3)  # counts epochs
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    session.seed(args.seed)

    for epoch in session.epochs(args.epochs):
        doublings = epoch // args.every if args.every else 0
        if session.keeps_batch:
            session.scale_batch(2**doublings, ramp=20)
        if args.every and args.ask == "yes":
            session.request_workers(min(session.size, 2**doublings))
        began, took = time.monotonic(), 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss, batch=len(y) * session.size, workers=session.workers)
            if args.paced:
                took += turn_seconds(len(y)) + step_seconds(session.workers) * session.is_last_turn
                time.sleep(max(0.0, began + took - time.monotonic()))
                if session.is_last_turn:
                    session.step_took(took)
                    began, took = time.monotonic(), 0.0
        scheduler.step()
        if session.is_main and (epoch + 1) % 3 == 0:
            accuracy = evaluate(model, *test)
            print(f"epoch {epoch}: batch {len(y) * session.size}, test accuracy {accuracy:.1%}", flush=True)
    if session.is_main and args.out:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        with open(args.out, "w") as file:
            json.dump({"accuracy": evaluate(model, *test), "weights": hashlib.sha256(weights).hexdigest()[:16]}, file)


if __name__ == "__main__":
    main()
