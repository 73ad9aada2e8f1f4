"""The command, also as `python -m concertina`. Loads the command line, which takes a moment: a Ctrl-C then is none too
early."""

import sys


def main() -> None:
    try:
        from concertina.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
