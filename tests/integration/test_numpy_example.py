"""A plain NumPy loop, made elastic by the same calls as a torch one, gives the same bits at any number of workers."""

import difflib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from concertina.backends.local import LocalBackend
from concertina.core.checkpoints import newest_whole
from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.runner import Report, Run, RunSettings, parse_changes
from concertina.runtime import Session

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EPOCHS = 2

Arrays = dict[str, np.ndarray]


def train(
    backend: LocalBackend, folder: Path, workers: int, changes: str = "", kill: bool = False, **more: Any
) -> tuple[Report, Arrays]:
    """Report and trained arrays; with `kill`, a worker ends by force after the first steps."""
    folder.mkdir(exist_ok=True)
    out = folder / "out.npz"
    settings = RunSettings(
        script=EXAMPLES / "numpy_regression.py",
        args=["--epochs", str(EPOCHS), "--out", str(out)],
        virtual=4,
        workers=workers,
        changes=parse_changes(changes),
        run_dir=folder / "run",
        **more,
    )
    seen: list[str] = []
    with Run(settings, lambda event: seen.append(str(event["event"])), backend) as job:
        while not job.turn():
            if kill and "step" in seen:
                os.kill(job.workers[max(job.workers)], signal.SIGKILL)
                kill = False
        report: Report = job.close_report()
    assert report.exit == 0, report.error
    assert not kill
    return report, dict(np.load(out))


@pytest.fixture(scope="module")
def alone(backend: LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """What one worker gives with all four virtual workers."""
    arrays = train(backend, tmp_path_factory.mktemp("alone"), 1)[1]
    assert np.abs(arrays["weights"]).max() > 0.1
    return arrays


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def test_changes_of_the_worker_count_leave_no_trace(alone: Arrays, backend: LocalBackend, tmp_path: Path) -> None:
    report, arrays = train(backend, tmp_path, 2, "6=4,14=1,25=3")
    assert [g.workers for g in report.generations] == [2, 4, 1, 3]
    assert same(arrays, alone)
    assert [row["duplicated"] + row["missed"] for row in report.samples] == [0] * EPOCHS


def test_a_killed_worker_leaves_no_trace(alone: Arrays, backend: LocalBackend, tmp_path: Path) -> None:
    report, arrays = train(backend, tmp_path, 3, kill=True)
    assert [g.workers for g in report.generations][:2] == [3, 2]
    assert same(arrays, alone)


def test_a_checkpoint_of_arrays_can_be_gone_on_from(alone: Arrays, backend: LocalBackend, tmp_path: Path) -> None:
    train(backend, tmp_path, 2, steps=30, checkpoint_dir=tmp_path / "kept")
    assert same(train(backend, tmp_path, 2, resume=newest_whole(tmp_path / "kept")[0])[1], alone)


def test_it_runs_under_plain_python_and_differs_from_the_plain_loop_in_few_lines(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "numpy_regression.py", "--epochs", "1", "--out", tmp_path / "x.npz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"generation 0: 1 workers\nepoch 0: test accuracy 8\d\.\d%\n", done.stdout)

    plain, elastic = (loop_of(EXAMPLES / f"numpy_regression{suffix}.py") for suffix in ("_plain", ""))
    new = [line for line in difflib.ndiff(plain, elastic) if line.startswith("+ ")]
    assert 0 < len(new) < 10
    assert "torch" not in (EXAMPLES / "numpy_regression.py").read_text()


def loop_of(path: Path) -> list[str]:
    """The lines of main(), without indentation: what is only moved is not different."""
    text = path.read_text()
    return [line.strip() for line in text[text.index("def main") : text.index("if __name__")].splitlines()]


LOOP = "for _ in session.epochs(1):\n    for x in session.loader([0.0] * 8): "
MISUSES = {
    "cannot train array 0, which is of int64": "session.prepare(np.zeros(3, dtype=int))",
    "which is not contiguous": "session.prepare(np.zeros((4, 4))[:, :2])",
    "no NumPy arrays beside it": "session.prepare(nn.Linear(1, 1), np.zeros(2))",
    "before session.loader": "session.loader([(0.0,)] * 8)\nsession.prepare(np.zeros(2))",
    "outside the loop": "session.prepare(np.zeros(2))\nsession.reduce(np.ones(2))",
    "got 1 gradients, needed 2": f"session.prepare(np.zeros(2), np.zeros(1))\n{LOOP} session.reduce(np.ones(2))",
    r"gradient 0 has shape \(3,\), its": f"session.prepare(np.zeros(2))\n{LOOP} session.reduce(np.ones(3))",
    "a torch model needs": f"session.prepare(nn.Linear(1, 1))\n{LOOP} session.reduce(np.ones(2))",
    "an array of <U1": "session.register('n', np.array(['a']))\nsession._prepared.registered['n'].state_dict()",
}


@pytest.mark.parametrize("sentence", MISUSES)
def test_misuse_gets_one_clear_sentence(sentence: str) -> None:
    session = Session(WorkerEnv())
    try:
        with pytest.raises(UsageError, match=sentence):
            exec(MISUSES[sentence], {"np": np, "nn": nn, "session": session})
    finally:
        session.close()
