"""What the name of a user or a job may be, and which text can be kept and sent at all."""

import re

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$"  # dots stand alone: no `..`, and no hidden file
NAME_WORDS = "letters a to z, digits, - and _, and single dots between them, with a letter or a digit first"
MOST_NAME = 63  # characters


def is_name(text: str) -> bool:
    return len(text) <= MOST_NAME and re.fullmatch(NAME, text) is not None


def is_unicode(text: str) -> bool:
    """Not where it has half of a character: arguments of the command line and JSON may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
