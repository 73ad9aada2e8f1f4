"""What is noted down while a job is recorded: fingerprints, and what a script holds besides the prepared objects."""

import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from concertina.runtime import surroundings
from concertina.runtime.recorder import fingerprint, random_fingerprints, tensors_in
from concertina.runtime.rng import RandomState
from concertina.runtime.surroundings import Surroundings

# -- fingerprints -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    x: torch.Tensor


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


one = torch.ones(2, 3)

DIFFERENT = [
    (torch.tensor(0.0), torch.tensor(-0.0)),
    (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0))),
    (one, one.T),
    (one, one.double()),
    (one.bfloat16(), one.half()),
    (one, one.reshape(3, 2)),
    ([one], (one,)),
    ({"a": one}, {"b": one}),
    ({"a": one}, {"a": one + 1}),
    (Sample(one), Sample(one + 1)),
    (Plain(one), Plain(one + 1)),
    (np.float32(1), np.float64(1)),
    (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
    (1, True),
    (0.1, 0.1 + 2**-56),
    ("x" * 100, "x" * 99 + "y"),
]


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_values_that_differ_in_any_bit_have_different_fingerprints(left: Any, right: Any) -> None:
    assert fingerprint(left) != fingerprint(right)


EQUAL: list[Callable[[], Any]] = [
    lambda: torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
    lambda: torch.full((2,), float("nan")),
    lambda: one.to_sparse(),
    lambda: torch.ones(2, dtype=torch.complex64).conj(),
    lambda: {"a": [one, "text", None], "b": Plain(Sample(one))},
    lambda: {3, 1, 2},
    lambda: object(),
    lambda: Plain(lambda: 0),
    lambda: np.arange(6).reshape(2, 3).T,
]


@pytest.mark.parametrize("make", EQUAL)
def test_equal_values_have_equal_fingerprints_wherever_they_lie(make: Callable[[], Any]) -> None:
    kept = make(), make()  # both alive, so at different addresses
    assert fingerprint(kept[0]) == fingerprint(kept[1])
    assert "0x" not in fingerprint(kept[0])


def test_memory_format_does_not_matter() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert fingerprint(image) == fingerprint(image.to(memory_format=torch.channels_last))


def test_a_conjugate_is_the_same_before_and_after_it_is_computed() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj())


def test_one_bit_of_a_large_tensor_with_a_gradient_is_seen() -> None:
    large = torch.zeros(100_000, requires_grad=True)
    changed = large.detach().clone()
    changed[50_000] = -0.0
    assert fingerprint(large) == fingerprint(large.detach())
    assert fingerprint(large) != fingerprint(changed.requires_grad_())


def test_a_structure_that_contains_itself_has_a_fingerprint() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert fingerprint(loop)


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("python", random.random),
        ("python", lambda: random.gauss(0, 1)),
        ("numpy", np.random.rand),
        ("numpy", np.random.randn),
        ("torch", lambda: torch.rand(1)),
    ],
)
def test_one_draw_changes_the_fingerprint_of_that_generator_alone(name: str, draw: Callable[[], Any]) -> None:
    state = RandomState.capture()
    draw()  # the first draw makes hundreds of words anew, a later one only moves on by one
    before = random_fingerprints(RandomState.capture())
    draw()
    after = random_fingerprints(RandomState.capture())
    state.restore()
    assert {k for k in before if before[k] != after[k]} == {name}


def test_tensors_of_an_output_in_order() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [t.numel() for t in tensors_in({"x": a, "y": [b, (c, "no tensor")]})] == [1, 2, 3]


# -- surroundings -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this file were the script."""
    surroundings._is_users.cache_clear()
    monkeypatch.setattr(sys, "argv", [__file__])
    yield
    surroundings._is_users.cache_clear()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator()
        self.seen = 3


class Data(Dataset[int]):
    def __init__(self) -> None:
        self.rngs = [random.Random(0)]


def look(datasets: tuple[Any, ...] = ()) -> Surroundings:
    found = Surroundings()
    found.datasets = {id(d): d for d in datasets}
    found.look()
    return found


@pytest.mark.usefixtures("here")
def test_generators_are_found_by_their_path() -> None:
    noise = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(1, 1), Noisy())
    table = {"old": np.random.RandomState(0)}
    closed_over = torch.Generator()

    def draw() -> torch.Tensor:
        return torch.rand(1, generator=closed_over)

    found = look((Data(),)).generators
    assert found["noise"] is noise
    assert found["model.1.rng"] is model[1].rng
    assert found["table['old']"] is table["old"]
    assert found["closed_over"] is closed_over
    assert isinstance(found["dataset.rngs[0]"], random.Random)
    assert draw is not None


@pytest.mark.usefixtures("here")
def test_the_default_generators_belong_to_the_virtual_workers() -> None:
    mine = [torch.default_generator, random._inst, np.random.mtrand._rand]  # type: ignore[attr-defined]
    found = look().generators.values()
    assert not any(g is m for g in found for m in mine)


@pytest.mark.usefixtures("here")
def test_numbers_are_found_and_modules_tensors_and_foreign_variables_are_not() -> None:
    average, model = 0.5, Noisy()
    loss = torch.tensor(2.0)
    big = torch.zeros(10)
    found = look().numbers
    assert found["average"] == average
    assert found["model.seen"] == model.seen
    assert found["loss"] is loss
    assert "big" not in found
    assert big is not None
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # its frames have no file and so look like a script's
    roots = {re.split(r"[.\[]", name)[0] for name in found}
    assert roots <= {*locals(), *sys.modules}  # pytest's own frames are not the script's


def decorated_by_a_library(function: Any) -> Any:
    """As if its source were an installed package's."""
    repeats = 3

    def wrapper() -> Any:
        return [function() for _ in range(repeats)]

    wrapper.__code__ = wrapper.__code__.replace(co_filename="/site-packages/library.py")
    return wrapper


@pytest.mark.usefixtures("here")
def test_of_a_librarys_wrapper_only_what_it_wraps_is_looked_into() -> None:
    factor, noise = 1.5, random.Random(0)

    @decorated_by_a_library
    def draw() -> float:
        return factor * noise.random()

    names = {*(found := look()).numbers, *found.generators}
    assert {"factor", "noise"} <= names
    assert "repeats" not in names
    assert draw is not None


@pytest.mark.usefixtures("here")
def test_drawing_changes_the_state_that_is_noted() -> None:
    mine = {
        "a": torch.Generator(),
        "b": random.Random(0),
        "c": np.random.default_rng(0),
        "d": np.random.RandomState(0),
        "e": random.SystemRandom(),  # has no state to note
    }
    found = look()
    before = found.generator_states(fingerprint)
    torch.rand(1, generator=mine["a"])
    mine["b"].random()
    mine["c"].random()
    mine["d"].rand()
    after = found.generator_states(fingerprint)
    assert {path for path in before if before[path] != after[path]} == {f"mine['{k}']" for k in "abcd"}
    assert after["mine['a']"][0] == "torch.Generator"
    assert after["mine['c']"][0] == "numpy.Generator"
    assert "mine['e']" not in after


def test_installed_packages_are_not_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings._is_users.cache_clear()
    monkeypatch.setattr(sys, "argv", ["/project/train.py"])
    assert surroundings._is_users("/project/nets/cnn.py")
    assert not surroundings._is_users("/project/.venv/lib/python3/site-packages/timm/layers.py")
    assert not surroundings._is_users("/elsewhere/cnn.py")
    assert not surroundings._is_users(surroundings.__file__)
    surroundings._is_users.cache_clear()
