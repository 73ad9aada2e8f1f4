"""Scripts and the command line, as a user has them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from concertina.backends.local import LocalBackend

HEAD = """
import sys, torch, concertina as ct
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
"""

DATA = """
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 1, generator=g))
"""

SMALL = (
    HEAD
    + """
session = ct.join()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    + DATA
)

LOOP = """
for epoch in session.epochs(EPOCHS):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
"""

TRAIN = (
    SMALL
    + """
model, optimizer = session.prepare(model, optimizer)
loader = session.loader(data, batch_size=4)
"""
    + LOOP
)

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a training script; `EPOCHS` in it becomes a number."""

    def write(text: str, epochs: int = 2, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(text.replace("EPOCHS", str(epochs)))
        return path

    return write


@pytest.fixture
def concertina(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line to its end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*args: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from concertina.cli import main; main()", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=tmp_path)

    return call


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    nursery = LocalBackend.open(tmp_path_factory.mktemp("nursery"), threads=1)
    yield nursery
    nursery.close()
