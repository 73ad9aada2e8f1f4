"""A script's text, for whoever must not stand still: what is no file of a sensible size is not read."""

import errno
import os
import stat

MOST_BYTES = 4 << 20


def read_script(path: str) -> bytes:
    """Raises OSError. Never waits for a pipe, and never reads a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", path)
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes", path)
    return found
