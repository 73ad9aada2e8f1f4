"""The command line: reads settings, picks the parts, wires them. No command imports torch into this process."""

import sys

import typer

from concertina import __version__
from concertina.cli import live, simulate
from concertina.cli.profile import profile
from concertina.cli.run import run
from concertina.cli.verify import verify
from concertina.core.errors import ConcertinaError, JobFailed, RequestRefused, UnknownNameError, UsageError

app = typer.Typer(
    name="concertina",
    help="Elastic deep-learning training that plays the same tune at any size.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

CLUSTER_PACKAGES = ("fastapi", "httpx", "prometheus_client", "psutil", "pydantic", "starlette", "uvicorn")

# Options that concertina does not know belong to the script; after `--` everything does.
FOR_THE_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(context_settings=FOR_THE_SCRIPT, rich_help_panel="One job")(run)
app.command(context_settings=FOR_THE_SCRIPT, rich_help_panel="One job")(verify)
app.command(context_settings=FOR_THE_SCRIPT, rich_help_panel="One job")(profile)
live.register(app, FOR_THE_SCRIPT)
simulate.register(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"concertina {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Elastic deep-learning training that plays the same tune at any size."""


def main() -> None:
    """Entry point: an error we foresaw is one sentence and an exit code, never a traceback."""
    try:
        app()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in CLUSTER_PACKAGES:
            raise
        print(f"concertina: the live cluster needs {missing.name}: pip install 'concertina[cluster]'", file=sys.stderr)
        sys.exit(1)
    except ConcertinaError as error:
        print(f"concertina: {error}", file=sys.stderr)
        if isinstance(error, JobFailed):
            sys.exit(error.exit_code)
        if isinstance(error, RequestRefused):
            sys.exit(3)
        sys.exit(2 if isinstance(error, UsageError | UnknownNameError) else 1)
