"""`concertina verify`: is this script bitwise elastic?"""

import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from concertina.backends.local import LocalBackend
from concertina.cli.shared import Script
from concertina.report import Report
from concertina.runner import Listener, RunSettings, run
from concertina.verify.answer import as_json, in_words
from concertina.verify.experiment import Experiment, Launch, VerifySettings, parse_workers
from concertina.verify.experiment import Progress as Tell

EXAMPLES = """

[bold]Examples[/bold]

concertina verify train.py                 [dim]# 4 virtual workers, 12 steps[/dim]

concertina verify -P 8 --workers "1,3,8" train.py --data cifar

concertina verify --changes "5=4,9=2" train.py

concertina verify --json train.py | jq .cause
"""


def verify(
    context: typer.Context,
    script: Script,
    virtual: Annotated[int, typer.Option("--virtual", "-P", help="Virtual workers, as you will train with.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare in every run.")] = 12,
    workers: Annotated[
        str, typer.Option(help='Worker counts to compare, "1,2,4"; the first is run twice. Default: 1, 2 and P.')
    ] = "",
    changes: Annotated[
        str | None,
        typer.Option(
            help='The run that changes its number of workers: "STEP=N,STEP=N", or "none". Default: through P, 2 and 3.',
            metavar="PLAN",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A value given to session.log() that may differ. Repeatable.")
    ] = None,
    level: Annotated[str, typer.Option(help="Determinism level, as for `concertina run`.")] = "D1",
    threads: Annotated[int, typer.Option(help="torch threads per worker, as for `concertina run`.")] = 1,
    as_data: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
) -> None:
    """Find out whether a script gives the same bits at any number of workers, and if not, where and why.

    Runs the first steps of the script at several numbers of workers, and once with changes in between. Compares
    batches, the output of every layer, losses, gradients, buffers, random states and parameters, and names step,
    virtual worker, tensor, layer and likely cause of the first difference. Exit code 0: bitwise elastic; 1: not.

    The script really runs, several times: files that it writes, it writes each time.
    """
    settings = VerifySettings(
        script=script,
        args=context.args,
        virtual=virtual,
        steps=steps,
        workers=parse_workers(workers),
        changes="" if changes == "none" else changes,
        ignore=frozenset(ignore or ()),
        threads=threads,
        level=level,
    )
    with tempfile.TemporaryDirectory(prefix="concertina-verify-") as folder, launcher(Path(folder), threads) as launch:
        with _progress() as tell:
            verdict = Experiment(settings, launch, Path(folder), tell).verdict()
        print(json.dumps(as_json(verdict), indent=1) if as_data else in_words(verdict))
    raise typer.Exit(0 if verdict.elastic else 1)


_PARAGRAPHS = inspect.cleandoc(verify.__doc__ or "").split("\n\n")
verify.__doc__ = "\n\n".join(" ".join(part.split()) for part in _PARAGRAPHS) + EXAMPLES  # typer keeps line ends


@contextmanager
def launcher(folder: Path, threads: int) -> Iterator[Launch]:
    """Runs share one nursery, so that torch is imported once; a fresh run gets a nursery of its own."""
    with ExitStack() as stack:
        opened: list[LocalBackend] = []

        def launch(settings: RunSettings, listener: Listener, fresh: bool) -> Report:
            if fresh:
                return run(settings, listener)
            if not opened:
                opened.append(LocalBackend.open(folder / "logs", threads))
                stack.callback(opened[0].close)
            return run(settings, listener, opened[0])

        yield launch


@contextmanager
def _progress() -> Iterator[Tell]:
    console = Console(stderr=True)
    columns = (TextColumn("verify"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell
