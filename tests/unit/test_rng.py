"""The random state that is captured is the one that goes on."""

import numpy as np

from concertina.runtime.rng import RandomState, numpy_state


def same(a, b) -> bool:
    return a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:]


def test_numpys_state_is_never_an_old_one() -> None:
    before = RandomState.capture()
    try:
        moves = [
            lambda: None,
            np.random.rand,
            np.random.normal,  # keeps a second number back
            np.random.normal,  # gives it out, and the twister does not move
            lambda: np.random.seed(5),
            lambda: np.random.seed(5),
            lambda: np.random.set_state(before.numpy),
            np.random.normal,
            before.restore,
            np.random.normal,
            lambda: None,
        ]
        for move in moves:
            move()
            assert same(numpy_state(), np.random.get_state())
    finally:
        before.restore()
