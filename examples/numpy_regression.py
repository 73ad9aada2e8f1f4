"""Handwritten digits by softmax regression in plain NumPy: gradients by hand, momentum by hand.

    python examples/numpy_regression.py                                                          alone
    concertina run --virtual 4 --workers 1 --resize "20=4,40=2" examples/numpy_regression.py     on 1, 4, then 2 workers

What makes the loop of numpy_regression_plain.py elastic: the arrays that are trained are given to prepare(), what else
has to survive is registered, and reduce() gives the mean gradient over all virtual workers once the last had its turn.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import concertina as ct

TRAIN = 1437  # images to learn from; the other 360 are for testing


def load_digits():
    """The images inside the scikit-learn package, without the time that importing it takes."""
    package = Path(find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :64] / 16, table[:, 64].astype(int)


def probabilities(images, weights, bias):
    scores = np.exp(images @ weights + bias)
    return scores / scores.sum(1, keepdims=True)


def gradients(images, labels, weights, bias):
    errors = (probabilities(images, weights, bias) - np.eye(10)[labels]) / len(labels)
    return images.T @ errors, errors.sum(0)


class Momentum:
    """Gradient descent with a memory, which is state: whoever goes on with the arrays needs it, too."""

    def __init__(self, arrays, rate):
        self.arrays, self.rate, self.speeds = arrays, rate, [np.zeros_like(array) for array in arrays]

    def step(self, grads):
        for array, speed, grad in zip(self.arrays, self.speeds, grads, strict=True):
            speed *= 0.9
            speed += grad
            array -= self.rate * speed

    def state_dict(self):
        return {"rate": self.rate, "speeds": self.speeds}

    def load_state_dict(self, state):
        self.rate, self.speeds = state["rate"], state["speeds"]


def report(epoch, images, labels, weights, bias, out):
    right = probabilities(images[TRAIN:], weights, bias).argmax(1) == labels[TRAIN:]
    print(f"epoch {epoch}: test accuracy {right.mean():.1%}", flush=True)
    if out:
        np.savez(out, weights=weights, bias=bias)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default="", help="file for the trained arrays")
    args = parser.parse_args()

    images, labels = load_digits()
    weights, bias = np.zeros((64, 10)), np.zeros(10)
    momentum = Momentum([weights, bias], rate=0.1)
    session = ct.join()
    session.prepare(weights, bias)
    session.register("momentum", momentum)
    session.on_rescale(lambda generation, workers: print(f"generation {generation}: {workers} workers", flush=True))
    batches = session.loader(list(zip(images[:TRAIN], labels[:TRAIN], strict=True)), batch_size=16, seed=0)
    for epoch in session.epochs(args.epochs):
        for x, y in batches:
            grads = session.reduce(*gradients(x, y, weights, bias))
            if grads is not None:
                momentum.step(grads)
        if session.is_main:
            report(epoch, images, labels, weights, bias, args.out)


if __name__ == "__main__":
    main()
