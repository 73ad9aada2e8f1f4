"""What the cluster's commands share: options, JSON output, and the one console for people."""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from concertina.core.errors import UsageError

PANEL = "The live cluster"

Url = Annotated[
    str | None,
    typer.Option("--url", help="Address of the cluster. Default: $CONCERTINA_URL, or the one started on this machine."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON instead of words.")]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Its id, any beginning of it that fits one job only, or its name.")
]

TAKEN, TROUBLE, REFUSED = 0, 1, 3
EXIT_CODES = "Exit codes: 0 done or taken, 3 refused by the cluster, 2 bad input, 1 trouble (no cluster, job failed)."


def teach(head: str, about: str, examples: dict[str, str], end: str = EXIT_CODES) -> str:
    """The help of a command: what it does in one line and in some, then how it is used."""
    shown = [f"[dim]{why}[/dim]\n[cyan]{how}[/cyan]" for how, why in examples.items()]
    return "\n\n".join(part for part in (head, about, "[bold]Examples[/bold]", *shown, end) if part)


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value))


def finish(answer: dict[str, Any], as_json: bool) -> None:
    """The cluster's word on something that was asked for; a refusal is an exit code of its own."""
    if as_json:
        say_json(answer)
    else:
        console().print(escape(answer["reason"]), soft_wrap=True)
    if not answer["accepted"]:
        raise typer.Exit(REFUSED)


def console() -> Console:
    return Console(highlight=False)


def no_option(context: typer.Context, script: Path) -> Path:
    """Options that nobody knows go to the script, but only after it: before it they are slips of the pen."""
    word = str(script).partition("=")[0]
    if not word.startswith("-"):
        return script
    known = [name for option in context.command.params for name in option.opts if name.startswith("--")]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "options of the script itself come after it"
    raise UsageError(f"no option {word}; {hint}")


Script = Annotated[
    Path,
    typer.Argument(
        callback=no_option,
        help="The training script. Options that concertina does not know go to it, and all that follows --.",
    ),
]
