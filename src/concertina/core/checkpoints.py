"""Checkpoint folders as anyone may read them, without torch: the manifest, and what makes a checkpoint whole.

    step-00000120/
        manifest.json      format, step, epoch, virtual workers, environment, size and hash of every other file
        shared.pt          what is equal on all workers
        virtual-0003.pt    what belongs to one virtual worker alone

A folder appears under its final name only when it is complete (it is written beside and renamed), so a torn one can
only come from damage later on; the hashes find that.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from concertina.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
SHARED = "shared.pt"
NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    epoch: int
    virtual: int
    environment: Mapping[str, str]
    files: Mapping[str, FileEntry]
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def context_file(virtual_worker: int) -> str:
    return f"virtual-{virtual_worker:04d}.pt"


def file_entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(bytes=path.stat().st_size, sha256=digest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, or a CheckpointError that says what is wrong with it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    try:
        raw = json.loads(path.read_text())
        if raw["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {raw['format']}, this version reads up to {FORMAT}: "
                "upgrade concertina, or resume from an older checkpoint"
            )
        files = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        return Manifest(**{**raw, "files": files})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): resume from an older checkpoint") from None


def check_whole(folder: Path) -> Manifest:
    """Reads every byte once; raises CheckpointError if the checkpoint is not what was written."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is torn: {name} is missing; resume from an older checkpoint")
        if path.stat().st_size != entry.bytes:
            raise CheckpointError(
                f"{folder} is torn: {name} has {path.stat().st_size} bytes instead of {entry.bytes}; "
                "resume from an older checkpoint"
            )
        if file_entry(path).sha256 != entry.sha256:
            raise CheckpointError(f"{folder} is damaged: {name} has another hash; resume from an older checkpoint")
    return manifest


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, newest first."""
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def newest_whole(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each newer one that is not.

    `folder` may also be a checkpoint itself; those inside it are then newer, since they were made from it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist: there is nothing to resume from")
    passed_over: list[str] = []
    itself = [folder] if (folder / MANIFEST).exists() else []
    for candidate in checkpoints_in(folder) + itself:
        try:
            check_whole(candidate)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        return candidate, passed_over
    if passed_over:
        raise CheckpointError(f"no usable checkpoint in {folder}: {passed_over[0]}")
    raise CheckpointError(f"{folder} holds no checkpoint: there is nothing to resume from")
