"""Whether what a command is to write can be written, asked before hours of work and not after them."""

import os
from pathlib import Path

from concertina.core.errors import UsageError


def check_output_file(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; give the name of a file")
    _check_writable(option, path, path if path.exists() else path.parent)


def check_two_files(option: str, path: Path | None, other: str, there: Path | None) -> None:
    """A terminal or a pipe may take both."""
    same = path is not None and there is not None and path.resolve() == there.resolve()
    if same and path is not None and (path.is_file() or not path.exists()):
        raise UsageError(f"{option} and {other} are both {path}: the one would overwrite the other; give two files")


def check_output_folder(option: str, path: Path | None) -> None:
    """A folder that is there already, or that can be made."""
    if path is not None:
        _check_writable(option, path, path)
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option} {path}: this is a file; give the name of a folder")


def _check_writable(option: str, path: Path, needed: Path) -> None:
    there = needed.absolute()
    while not there.exists():
        there = there.parent
    if there != needed.absolute() and not there.is_dir():
        raise UsageError(f"{option} {path}: {there} is a file, and a folder is needed there; choose another path")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{option} {path}: {there} may not be written to; choose another path")
