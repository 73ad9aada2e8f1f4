"""Contexts survive the way through bytes."""

import random

import numpy as np
import pytest
import torch

from concertina.runtime.context_record import (
    ContextReader,
    ContextWriter,
    pack_random,
    tensor_from_bytes,
    tensor_to_bytes,
    unpack_random,
)
from concertina.runtime.rng import RandomState


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_random_states_come_back_as_they_were(draws: int) -> None:
    before = RandomState.capture()
    try:
        for _ in range(draws):
            random.gauss(0, 1)  # keeps a second number back
            np.random.normal()
            torch.randn(3)
        state = RandomState.capture()
        writer = ContextWriter()
        sizes = pack_random(writer, state)
        back = unpack_random(ContextReader(writer.close({})), sizes)
        assert back.same_as(state)
        back.restore()
        after = (random.gauss(0, 1), np.random.normal(), torch.randn(1).item())
        state.restore()
        assert (random.gauss(0, 1), np.random.normal(), torch.randn(1).item()) == after
    finally:
        before.restore()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.arange(5, dtype=torch.int64),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.empty(0),
    ],
)
def test_tensors_come_back_whatever_their_order_in_memory(tensor: torch.Tensor) -> None:
    back = tensor_from_bytes(memoryview(tensor_to_bytes(tensor)), tensor)
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
