"""The random state that is captured is the one that goes on."""

import random

import numpy as np
import torch

from concertina.runtime.rng import RandomState, numpy_state, python_state, seed_everything, torch_state


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


def test_pythons_state_is_never_an_old_one() -> None:
    before = RandomState.capture()
    try:
        moves = [
            lambda: None,
            random.random,
            lambda: random.gauss(0, 1),  # keeps a second number back
            lambda: random.gauss(0, 1),  # gives it out, and the twister does not move
            lambda: random.seed(5),
            lambda: random.seed(5),
            lambda: random.gauss(0, 1),
            lambda: setattr(random._inst, "gauss_next", None),
            lambda: random.setstate(before.python),
            lambda: [random.getrandbits(32) for _ in range(624)],  # the position is the same again
            before.restore,
            random.random,
        ]
        for move in moves:
            move()
            assert python_state() == random.getstate()
    finally:
        before.restore()


def test_torchs_state_is_never_an_old_one() -> None:
    before = RandomState.capture()
    try:
        for move in (
            lambda: None,
            lambda: torch.rand(1),
            lambda: torch.randn(1),
            lambda: torch.rand(624),
            before.restore,
        ):
            move()
            assert torch.equal(torch_state(), torch.get_rng_state())
    finally:
        before.restore()


def test_a_snapshot_of_what_has_not_moved_is_the_same_object() -> None:
    found = RandomState.capture()
    np.random.seed(0)  # with a normal number kept back, NumPy is asked every time
    before = RandomState.capture()
    try:
        assert RandomState.capture(before) is before
        torch.rand(1)
        after = RandomState.capture(before)
        assert after is not before
        assert after.python is before.python
        before.restore()
        assert RandomState.capture(before).same_as(before)
    finally:
        found.restore()


def test_states_that_take_turns_without_being_drawn_from_stay_the_same_objects() -> None:
    found = RandomState.capture()
    try:
        states = []
        for seed in (1, 2):
            seed_everything(seed)
            states.append(RandomState.capture())
        for _ in range(3):
            for state in states:
                state.restore()
                assert RandomState.capture(state) is state
    finally:
        found.restore()
