"""What a keeper says in its log, and nothing else: it stays a keeper where the log can not be written."""

import contextlib
import sys


def complain(words: str) -> None:
    """Into keeper.log, which may be on a disk that is full."""
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)
