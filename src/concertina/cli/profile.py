"""`concertina profile`: how fast a script runs on how many workers."""

import glob
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from concertina.cli.run import _slots
from concertina.cli.run_options import DEFAULT_VIRTUAL
from concertina.cli.shared import Script
from concertina.core.errors import UsageError
from concertina.profile import Plan, Profile, measure_batch, measure_curve, powers_up_to
from concertina.runner import Listener, RunSettings
from concertina.verify.experiment import parse_workers

EXAMPLES = """

[bold]Examples[/bold]

concertina profile train.py                        [dim]# 1, 2, 4, ... workers, as many as there are GPUs or cores[/dim]

concertina profile -P 8 --workers "2,3,8" --measure 50 train.py --data cifar

concertina profile --batch train.py                [dim]# also the largest batch that the device takes[/dim]

concertina profile --json train.py | jq '.points[] | [.workers, .samples_per_s]'
"""


def profile(
    context: typer.Context,
    script: Script,
    virtual: Annotated[
        int, typer.Option("--virtual", "-P", help="Virtual workers, as you will train with.")
    ] = DEFAULT_VIRTUAL,
    most: Annotated[
        int | None,
        typer.Option("--max", min=1, help="Largest number of workers. Default: one per GPU or core, at most P."),
    ] = None,
    workers: Annotated[
        str, typer.Option(help='Worker counts to measure, in this order: "1,2,4". Default: powers of two up to --max.')
    ] = "",
    warm: Annotated[int, typer.Option(help="Steps to leave out after every change.")] = 5,
    measure: Annotated[int, typer.Option(help="Steps to measure at every count.")] = 20,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch",
            help="Also find the largest batch per virtual worker: on a GPU by trying, in processes of their own; "
            "without one, an estimate from the memory that two sizes take.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(help="torch threads per worker, as for `concertina run`.")] = 1,
    as_data: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
) -> None:
    """Measure how fast a script trains on 1, 2, 4, ... workers: one running job, resized on the way, never restarted.

    At every count some steps are left out and the next ones measured; after the last count the job is stopped.
    Speedup is against the first count, efficiency is speedup per worker. The global batch stays the same, so a
    curve that flattens says that further workers are not worth their devices.

    The script really trains, and must last for (warm + measure) steps at every count, and meanwhile for the seconds in
    which new workers start: files that it writes, it writes. Measure on a machine, or on devices, with nothing else to
    do.
    """
    if workers and most is not None:
        raise UsageError("--workers and --max: give one of them")
    counts = parse_workers(workers) or powers_up_to(max(1, min(virtual, _slots()) if most is None else most))
    plan = Plan(workers=counts, warm=warm, measured=measure)
    settings = RunSettings(script=script, args=context.args, virtual=virtual, threads=threads)
    with _progress() as tell:
        found = measure_curve(settings, plan, tell, paced=bool(glob.glob("/dev/nvidia[0-9]*")))
        if batch:
            found = replace(found, batch=measure_batch(settings, tell))
    if as_data:
        print(json.dumps(found.to_json(), indent=1))
    else:
        _show(found, plan)


_PARAGRAPHS = inspect.cleandoc(profile.__doc__ or "").split("\n\n")
profile.__doc__ = "\n\n".join(" ".join(part.split()) for part in _PARAGRAPHS) + EXAMPLES  # typer keeps line ends


def _show(found: Profile, plan: Plan) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{found.script}, {found.virtual} virtual workers")
    for title in ("workers", "ms per step", "slowest", "samples/s", "speedup", "efficiency"):
        table.add_column(title, justify="right")
    for row in found.to_json()["points"]:
        speed = row["samples_per_s"]
        table.add_row(
            str(row["workers"]),
            f"{1000 * row['mean_s']:.1f}",
            f"{1000 * row['slowest_s']:.1f}",
            "-" if speed is None else f"{speed:,.1f}",
            f"{row['speedup']:.2f}",
            f"{row['efficiency']:.0%}",
        )
    console.print(table)
    if found.missing:
        console.print(
            f"The script ended after {found.steps} steps, before {', '.join(map(str, found.missing))} workers were "
            f"measured: each count needs {plan.warm + plan.measured + 1} steps, and more pass in the seconds in which "
            "new workers start. Let it train for longer.",
            soft_wrap=True,
        )
    if found.batch is not None:
        largest = "not known" if found.batch.largest is None else f"{found.batch.largest}"
        console.print(
            f"Largest batch per virtual worker: {largest} (the script uses {found.batch.script_batch}); "
            f"{found.batch.reason}.",
            soft_wrap=True,
        )


@contextmanager
def _progress() -> Iterator[Listener]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting")

        def tell(event: Mapping[str, Any]) -> None:
            if event["event"] == "generation_started":
                bar.update(task, description=f"{event['workers']} worker{'s' * (event['workers'] != 1)}")
            elif event["event"] == "step":
                bar.update(task, description=f"step {event['step']}")

        yield tell
