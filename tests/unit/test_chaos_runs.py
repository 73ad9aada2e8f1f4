"""The runs of benchmarks/chaos.py side by side: what they find is kept and said, and stopping one stops all."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import chaos


class NoBackend:
    """Nothing is started; the folder of logs is there."""

    def __init__(self, folder: Path) -> None:
        self.closed = False
        folder.mkdir()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[NoBackend]:
    opened: list[NoBackend] = []

    def open_one(folder: Path, threads: int) -> NoBackend:
        opened.append(NoBackend(folder))
        return opened[-1]

    monkeypatch.setattr(chaos.LocalBackend, "open", open_one)
    return opened


def ran(folder: Path, seed: int, digest: str, **faults: int) -> chaos.Outcome:
    (folder / f"run-{seed}").mkdir()
    return chaos.Outcome(seed, faults=Counter({"kill worker at step": faults.get("faults", 0)}), digest=digest)


def test_runs_side_by_side_add_up(
    backends: list[NoBackend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        chaos, "run_once", lambda _, folder, seed, faults, stop: ran(folder, seed, "same", faults=faults)
    )
    assert chaos.chaos(faults=40, seed=1, to=tmp_path / "found.json", at_once=3) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum(run["faults"]["kill worker at step"] for run in found["runs"]) >= 40
    assert len({run["seed"] for run in found["runs"]}) == len(found["runs"])
    assert "40 of 40 faults" in capsys.readouterr().out
    assert [backend.closed for backend in backends] == [True] * 3


def test_a_differing_digest_is_said_and_its_logs_are_kept(
    backends: list[NoBackend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_once(_: object, folder: Path, seed: int, faults: int, stop: threading.Event) -> chaos.Outcome:
        return ran(folder, seed, "another" if seed == 2 else "same", faults=faults)

    monkeypatch.setattr(chaos, "run_once", run_once)
    assert chaos.chaos(faults=400, seed=1, to=tmp_path / "found.json") == 1
    last = json.loads((tmp_path / "found.json").read_text())["runs"][-1]
    kept = Path(last["problem"].rpartition(" ")[2])
    try:
        assert last["problem"].startswith("another digest than without faults")
        assert {path.name for path in kept.iterdir()} == {"run", "logs"}
    finally:
        shutil.rmtree(kept)


def test_an_interruption_stops_the_other_runs_and_closes_every_backend(
    backends: list[NoBackend], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stopped = []
    both_run = threading.Barrier(3)

    def run_once(_: object, folder: Path, seed: int, faults: int, stop: threading.Event) -> chaos.Outcome:
        if faults:
            both_run.wait(60.0)
            stopped.append(stop.wait(60.0))
        return ran(folder, seed, "same", faults=faults)

    def interrupted(*_: object) -> None:
        both_run.wait(60.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos, "run_once", run_once)
    monkeypatch.setattr(chaos, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chaos.chaos(faults=40, seed=1, at_once=2)
    assert stopped == [True, True]
    assert [backend.closed for backend in backends] == [True, True]
