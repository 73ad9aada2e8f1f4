"""The command line: reads settings, picks the parts, wires them."""

from __future__ import annotations

import typer

from concertina.cli import simulate

app = typer.Typer(
    name="concertina",
    help="Elastic deep-learning training that plays the same tune at any size.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
simulate.register(app)


def main() -> None:
    """The `concertina` command."""
    app()
