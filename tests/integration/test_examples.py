"""Every example, run elastically with changes of worker count, ends with the tensors of its torchrun DDP twin."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from concertina.backends.local import LocalBackend
from concertina.runner import RunSettings, parse_changes, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("digits", "chars", "mlp")
VIRTUAL = 3
PATIENCE_S = 240.0  # for one example on a machine that is busy with other things
LEAVE_S = 40.0  # torchrun gives its ranks 30


def execute(command: list[str], proof: Path) -> str:
    """What a command printed that must write the file `proof`.

    The exit code says less than the file: a DDP rank's gloo threads can abort it at exit, when all is saved.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        process.communicate(timeout=LEAVE_S)
        raise
    assert proof.exists(), err[-3000:]
    return out


def ddp_tensors(name: str, out: Path) -> dict[str, Tensor]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(VIRTUAL)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    printed = execute([*torchrun, str(EXAMPLES / f"{name}_ddp.py"), "--epochs", "1", "--out", str(out)], out)
    assert printed.startswith("epoch 0: ")
    tensors: dict[str, Tensor] = torch.load(out)
    return tensors


def elastic_tensors(name: str, changes: str, out: Path, backend: LocalBackend) -> dict[str, Tensor]:
    settings = RunSettings(
        script=EXAMPLES / f"{name}.py",
        args=["--epochs", "1", "--out", str(out)],
        virtual=VIRTUAL,
        changes=parse_changes(changes),
        run_dir=out.parent / "run",
    )
    report = run(settings, backend=backend)
    assert [g.workers for g in report.generations] == [1, 3, 2]
    assert [row["duplicated"] + row["missed"] for row in report.samples] == [0]
    tensors: dict[str, Tensor] = torch.load(out)
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_changing_worker_counts_give_the_tensors_of_the_ddp_twin(
    name: str, tmp_path: Path, backend: LocalBackend
) -> None:
    elastic = elastic_tensors(name, "5=3,12=2", tmp_path / "elastic.pt", backend)
    ddp = ddp_tensors(name, tmp_path / "ddp.pt")
    assert elastic.keys() == ddp.keys()
    assert [key for key in ddp if not torch.equal(elastic[key], ddp[key])] == []


def test_an_example_runs_under_plain_python(tmp_path: Path) -> None:
    out = tmp_path / "alone.pt"
    printed = execute([sys.executable, str(EXAMPLES / "mlp.py"), "--epochs", "2", "--out", str(out)], out)
    assert re.fullmatch(r"epoch 0: mean squared error \d\.\d+\nepoch 1: mean squared error \d\.\d+\n", printed)
    assert len(torch.load(out)) == 6


@pytest.mark.parametrize("name", NAMES)
def test_example_and_twin_differ_in_few_lines(name: str) -> None:
    """What both must agree on (data, model, loop body) is the same text; only the wiring differs."""
    twin, example = (_without_head(EXAMPLES / f"{name}{suffix}.py") for suffix in ("_ddp", ""))
    delta = list(difflib.ndiff(twin, example))
    assert sum(line.startswith("+ ") for line in delta) <= 11
    assert sum(line.startswith("- ") for line in delta) <= 20


def _without_head(path: Path) -> list[str]:
    """The lines after docstring and imports."""
    lines = path.read_text().splitlines()
    last_import = max(i for i, line in enumerate(lines) if re.match(r"(import|from) ", line))
    return lines[last_import + 1 :]


def test_demo_sees_a_single_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = _demo(monkeypatch)
    ours = {"weight": torch.tensor([1.0, 0.0]), "count": torch.tensor(7)}
    assert demo.different_tensors(ours, {name: t.clone() for name, t in ours.items()}) == []
    assert demo.different_tensors(ours, {**ours, "weight": torch.tensor([1.0, -0.0])}) == ["weight"]
    assert demo.different_tensors(ours, {**ours, "count": torch.tensor(8)}) == ["count"]
    assert demo.different_tensors(ours, {"weight": ours["weight"]}) == ["count"]


def _demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo
