"""What a checkpoint leaves on disk, and what of one that was never finished."""

import os
from pathlib import Path

import pytest
import torch

from concertina.core.checkpoints import Manifest, check_whole, newest_whole
from concertina.runtime.checkpoint import write_checkpoint

STATE = {"weights": torch.arange(4.0)}


def manifest(step: int) -> Manifest:
    return Manifest(step=step, epoch=0, virtual=1, environment={}, files={})


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(fd: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"renamed to {target.name}")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write_checkpoint(tmp_path / "step-00000010", STATE, {0: b"context"}, manifest(10))
    assert done == [
        "virtual-0000.pt", "shared.pt", "manifest.json", ".step-00000010.unfinished", "renamed to step-00000010",
        tmp_path.name,
    ]  # fmt: skip


def test_what_a_killed_writer_left_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-00000010", STATE, {0: b"context"}, manifest(10))
    for name in (".step-00000015.unfinished", "notes", ".notes.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shared.pt").write_bytes(b"half")
    assert newest_whole(tmp_path)[0].name == "step-00000010"
    write_checkpoint(tmp_path / "step-00000020", STATE, {0: b"context"}, manifest(20))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".notes.unfinished", "notes", "step-00000010", "step-00000020",
    ]  # fmt: skip
    assert check_whole(tmp_path / "step-00000010").step == 10
