"""Writing and reading the state of a job.

One worker writes: it gathers the others' virtual workers as finished file contents, so nothing that came over the
network is ever interpreted. Files hold tensors and plain values only and are read with torch's restricted loader.
"""

import io
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from concertina.core.checkpoints import MANIFEST, NAME, SHARED, Manifest, context_file, file_entry, read_manifest
from concertina.core.errors import CheckpointError, UsageError


def to_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(plain(state), buffer)
    return buffer.getvalue()


def plain(state: Any) -> Any:
    """NumPy's scalars as Python's, anywhere in a state; a learning rate computed with NumPy is one."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) in (dict, OrderedDict):
        return type(state)((key, plain(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(plain(value) for value in state)
    return state


def require_readable(data: bytes) -> None:
    """Finds out when a checkpoint is written, not when it is needed, that something in it cannot be read back."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        found = re.search(r"(?:GLOBAL|global:?) ([\w.]+)", str(error))
        what = f"a {found.group(1)}" if found else "something"
        raise UsageError(
            f"a checkpoint would hold {what} that is no tensor, number, text or container, and could not be read back; "
            "keep such values out of the state of optimizers, schedulers and registered things"
        ) from None


def load_file(path: Path) -> Any:
    """Loads to the CPU, executing nothing."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): use another checkpoint"
        ) from error


def write_checkpoint(folder: Path, shared: Any, contexts: Mapping[int, bytes], manifest: Manifest) -> None:
    """Returns when the checkpoint is complete on disk; `contexts` are finished file contents."""
    files = {context_file(v): data for v, data in contexts.items()}
    files[SHARED] = to_bytes(shared)
    require_readable(files[SHARED])
    _write_folder(folder, files, manifest)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """The same checkpoint under another name."""
    manifest = read_manifest(source)
    _write_folder(folder, {name: (source / name).read_bytes() for name in manifest.files}, manifest)


def _write_folder(folder: Path, files: Mapping[str, bytes], manifest: Manifest) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    if NAME.fullmatch(folder.name):
        _clear_away_what_was_never_finished(folder.parent)
    unfinished.mkdir()
    for name, data in files.items():
        _write_file(unfinished / name, data)
    entries = {name: file_entry(unfinished / name) for name in files}
    complete = Manifest(
        step=manifest.step,
        epoch=manifest.epoch,
        virtual=manifest.virtual,
        environment=manifest.environment,
        files=entries,
    )
    _write_file(unfinished / MANIFEST, complete.to_json().encode())
    _sync_folder(unfinished)
    former = folder.with_name(f".{folder.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():  # the same step again, after going back to an older checkpoint
        folder.rename(former)  # deleting takes longer, and whoever is killed meanwhile would have neither
    unfinished.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    _sync_folder(folder.parent)


def _clear_away_what_was_never_finished(folder: Path) -> None:
    """Its writer was killed; only one writes into a job's folder at a time."""
    for path in folder.glob(".step-*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def pack_parts(parts: Mapping[int, bytes]) -> bytes:
    """Virtual worker number and length before each part, eight bytes each."""
    return b"".join(v.to_bytes(8, "big") + len(data).to_bytes(8, "big") + data for v, data in parts.items())


def unpack_parts(packed: bytes) -> dict[int, bytes]:
    parts, at = {}, 0
    while at < len(packed):
        v, size = int.from_bytes(packed[at : at + 8], "big"), int.from_bytes(packed[at + 8 : at + 16], "big")
        parts[v] = packed[at + 16 : at + 16 + size]
        at += 16 + size
    return parts


def read_checkpoint(
    folder: Path, virtual_workers: tuple[int, ...], virtual: int
) -> tuple[Manifest, Any, dict[int, Any]]:
    """Manifest, shared state, and the contexts of the given virtual workers."""
    manifest = read_manifest(folder)
    if manifest.virtual != virtual:
        raise CheckpointError(
            f"{folder} was made with {manifest.virtual} virtual workers, the job has {virtual}: "
            f"use --virtual {manifest.virtual}"
        )
    contexts = {v: load_file(folder / context_file(v)) for v in virtual_workers}
    return manifest, load_file(folder / SHARED), contexts
