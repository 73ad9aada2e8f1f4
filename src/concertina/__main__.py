"""`python -m concertina`, the same as the command."""

from concertina.cli import main

if __name__ == "__main__":
    main()
