"""Is this a script that could be run? Looks, never runs it. Touches the disk: call it from a thread."""

import os
import stat
from pathlib import Path

from concertina.server.errors import ApiError

MOST_SOURCE = 4 << 20  # bytes
MOST_COMPILED = 1000
Stamp = tuple[str, int, int, int]
_compiled: set[Stamp] = set()  # scripts that were looked at, as they were then


def check_script(path: str, roots: tuple[Path, ...]) -> None:
    """Raises ApiError 422 unless it is a readable Python file that compiles."""
    real = os.path.realpath(path)
    if roots and not any(Path(real).is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        raise _refuse(f"script {path!r} is not under {allowed}", "put it there")
    known = _stamp(real)
    if known is not None and known in _compiled:
        return
    source = _read(path)
    try:
        compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise _refuse(f"script {path!r} is no Python: {error.msg} (line {error.lineno})", "mend it first") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise _refuse(f"script {path!r} can not be compiled: {error}", "mend it first") from None
    if known is not None and _stamp(real) == known:
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled.add(known)


def _stamp(path: str) -> Stamp | None:
    """What changes when the file does; None: it is not there, or may not be read."""
    try:
        found = os.stat(path)
        readable = os.access(path, os.R_OK)
    except (OSError, ValueError):
        return None
    return (path, found.st_mtime_ns, found.st_size, found.st_ino) if readable else None


def check_folder(path: str) -> None:
    try:
        there = os.path.isdir(path)
    except (OSError, ValueError):
        there = False
    if not there:
        raise _refuse(f"there is no folder {path!r} to run in on this machine", "give one that is there")


def _read(path: str) -> bytes:
    """Not blocking on a pipe, not reading a device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "that is no path"
        raise _refuse(f"script {path!r} can not be read: {why}", "give the path of a file on this machine") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refuse(f"script {path!r} is not a file", "give the path of a Python file")
    with os.fdopen(fd, "rb") as file:
        source = file.read(MOST_SOURCE + 1)
    if len(source) > MOST_SOURCE:
        raise _refuse(f"script {path!r} has more than {MOST_SOURCE} bytes", "keep data in files of their own")
    return source


def _refuse(message: str, hint: str) -> ApiError:
    return ApiError(422, "unusable_script", message, hint)
