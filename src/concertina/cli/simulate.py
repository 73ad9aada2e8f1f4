"""`concertina simulate` and `concertina policies`: settings in, the simulator's answer out.

Input that can not be used ends with one sentence and exit code 2, an interrupted run with 130.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from concertina.core.errors import ConcertinaError, SimulationError, UnknownNameError, UsageError
from concertina.policies.admission import makes_promises, on_terms
from concertina.policies.base import Policy
from concertina.policies.registry import POLICIES, policy_named
from concertina.policies.terms import EVERYBODY, reserve_of
from concertina.simulator import report_table
from concertina.simulator.batch import Task, run_all
from concertina.simulator.metrics import Result
from concertina.simulator.noise import Noise
from concertina.simulator.overhead import OVERHEADS, overhead_named
from concertina.simulator.readers import write_trace
from concertina.simulator.recorder import Record
from concertina.simulator.report_html import write_html
from concertina.simulator.scenario import Scenario, load_scenarios

BAD_INPUT, INTERRUPTED = 2, 130
DEFAULT_POLICY = "concertina" if "concertina" in POLICIES else "fifo"
_NAMED = 5
"""Names in a note; the rest is left out."""
PLACEMENTS = ("best-fit", "buddy", "count")

_EXAMPLES = {
    "No files at hand? Two policies on 500 synthetic jobs": ("synthetic:jobs=500,load=0.9 -p fifo -p tiresias"),
    "A real trace on a cluster of your choice, as a page with pictures": (
        "195job.csv.gz --cluster 16x8:A100 --html page.html"
    ),
    "One virtual cluster of many; its first 1,000 jobs of at most 64 devices": (
        "'philly_jobs.csv.gz#vc=b436b2,first=1000,max_gpus=64'"
    ),
    "All eight workloads of a load, one JSON object for each": ("'workloads.csv.gz#load=1.0,workload=*' --json"),
    "Promised deadlines that survive the loss of a node, and no team with more than 32 promised devices": (
        "synthetic:jobs=500 -p elasticflow --reserve-nodes 1 --quota '*=32'"
    ),
    "Why did a job wait? Every decision with its reason": "trace.csv -p backfill --log decisions.jsonl",
}
_ABOUT = """
TRACE is a file in any known format (told by its columns, plain or gzip), a part of one behind a #, or a
recipe for a synthetic trace. The format implies a cluster, and a throughput table that lies near the trace
is used; what was assumed is said. `concertina policies` lists the policies.
"""
_FORMATS = """
A synthetic trace takes jobs, seed, load, gpus, like (philly, itp, modelarts), arrivals (poisson, diurnal),
deadlines, soft, tight, loose, users. Our own format is a CSV with id, submit_s, gpus, duration_s and, where
wanted, deadline_s, soft, user, model, batch_size, work.
"""
HELP = "\n\n".join(
    (
        "Replay job traces under one policy or several, and compare how the jobs fared.",
        " ".join(_ABOUT.split()),
        "[bold]Examples[/bold]",
        *(f"{why}:\n[cyan]concertina simulate {how}[/cyan]" for why, how in _EXAMPLES.items()),
        " ".join(_FORMATS.split()),
    )
)

Traces = Annotated[
    list[str],
    typer.Argument(metavar="TRACE", help="FILE, FILE#column=value,... or synthetic:key=value,..."),
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option("--policy", "-p", help=f"Policy to try; repeatable, or `all`. Default: {DEFAULT_POLICY}."),
]
ClusterText = Annotated[
    str | None,
    typer.Option("--cluster", help="NODESxDEVICES[:TYPE], comma separated: 16x8:A100,4x4:T4. Default: the trace's."),
]
ThroughputFile = Annotated[
    Path | None,
    typer.Option("--throughput", help="Table of measured speeds. Default: the one near the trace, if any."),
]
Overhead = Annotated[
    str,
    typer.Option("--overhead", help=f"Cost of a change of devices: {', '.join(OVERHEADS)}, or seconds."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object for each trace and policy, one per line.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="Write a page with pictures; it opens without a network.")
]
LogFile = Annotated[
    Path | None, typer.Option("--log", help="Write every decision with its reason, one JSON object per line.")
]
Seed = Annotated[int, typer.Option("--seed", help="For whatever is left to chance: the same seed, the same result.")]
SkipBadRows = Annotated[
    bool,
    typer.Option("--skip-bad-rows", help="Leave rows that can not be used out and count them; else they stop."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Processes at the same time. Default: one for each core."),
]
NoiseShare = Annotated[
    float,
    typer.Option("--noise", min=0.0, help="Variation of step times: 0.1 is 10 %, a coefficient of variation."),
]
Gap = Annotated[float, typer.Option("--gap", min=0.0, help="Least seconds between two rounds of the scheduler.")]
Tick = Annotated[float, typer.Option("--tick", min=0.0, help="Rounds only at multiples of so many seconds.")]
PlacementName = Annotated[str, typer.Option("--placement", help=f"How jobs are placed: {', '.join(PLACEMENTS)}.")]
ReserveNodes = Annotated[
    int,
    typer.Option(
        "--reserve-nodes",
        min=0,
        help="Nodes that promised deadlines may not rely on: so many can be lost. Other jobs still use them.",
    ),
]
Quotas = Annotated[
    list[str] | None,
    typer.Option(
        "--quota",
        metavar="USER=GPUS",
        help="Most devices that jobs of USER with a promised deadline may ask for at a time; repeatable. "
        "`*=GPUS` is for every user not named. A job beyond it is refused; one without a deadline never is.",
    ),
]
SaveTrace = Annotated[
    Path | None, typer.Option("--save-trace", help="Write the jobs of the one trace in our own CSV format.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command(name="simulate", help=HELP, rich_help_panel="The simulator")(simulate)
    app.command(name="policies", rich_help_panel="The simulator")(policies)


def simulate(
    traces: Traces,
    policy: PolicyNames = None,
    cluster: ClusterText = None,
    throughput: ThroughputFile = None,
    overhead: Overhead = "instant",
    as_json: AsJson = False,
    html: HtmlFile = None,
    log: LogFile = None,
    seed: Seed = 0,
    skip_bad_rows: SkipBadRows = False,
    jobs: Jobs = None,
    noise: NoiseShare = 0.0,
    gap: Gap = 0.0,
    tick: Tick = 0.0,
    placement: PlacementName = "best-fit",
    reserve_nodes: ReserveNodes = 0,
    quota: Quotas = None,
    save_trace: SaveTrace = None,
) -> None:
    """Replay job traces; the help is in `HELP`."""
    screen = Console(stderr=True)
    with _one_sentence(screen):
        overhead_named(overhead)
        names = _policy_names(policy)
        quotas = _quotas(quota or ())
        _check_placement(placement)
        for path in (html, log, save_trace):
            _check_writable(path)
        scenarios = load_scenarios(traces, cluster=cluster, throughput=throughput, skip_bad_rows=skip_bad_rows)
        _save(save_trace, scenarios)
        _say_notes(screen, scenarios)
        if reserve_nodes or quotas:
            _say_who_promises(screen, names)
            _say_unknown_users(screen, scenarios, quotas)
        record = Record(spans=html is not None, load=html is not None, decisions=log is not None)
        tasks = [
            Task(
                scenario=scenario,
                policy=_on_terms(name, scenario, reserve_nodes, quotas),
                overhead=overhead,
                seed=seed,
                noise=Noise(step_time=noise),
                gap_s=gap,
                tick_s=tick,
                placement=placement,
                record=record,
            )
            for scenario in scenarios
            for name in names
        ]
        results = _run(tasks, jobs or os.cpu_count() or 1, screen, as_json=as_json)
        if not as_json:
            _print_tables(results)
        if log is not None:
            _write_log(log, results)
        if html is not None:
            write_html(html, results, notes={scenario.name: scenario.notes for scenario in scenarios})


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each, one per line.")] = False,
) -> None:
    """List the policies, each with the paper it comes from."""
    if as_json:
        for name, policy in POLICIES.items():
            typer.echo(json.dumps({"name": name, "paper": policy.paper, "admission": policy.admission}))
        return
    table = Table()
    for title in ("policy", "comes from", "admission"):
        table.add_column(title)
    for name, policy in POLICIES.items():
        table.add_row(name + (" (default)" if name == DEFAULT_POLICY else ""), policy.paper, policy.admission)
    Console().print(table)


class UnwritableError(ConcertinaError):
    """A file that was asked for can not be written; found out before the work is done."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} can not be written: {why}; needed a place for a file")


@contextmanager
def _one_sentence(screen: Console) -> Iterator[None]:
    """Turn what goes wrong into one sentence and an exit code."""
    try:
        yield
    except SimulationError as error:
        screen.print(f"[red]concertina simulate:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except ConcertinaError as error:
        screen.print(f"[red]concertina simulate:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        screen.print("concertina simulate: stopped; nothing is left running")
        raise typer.Exit(INTERRUPTED) from None


def _policy_names(given: Sequence[str] | None) -> list[str]:
    names = list(dict.fromkeys(given or [DEFAULT_POLICY]))
    if "all" in names:
        return list(POLICIES)
    for name in names:
        policy_named(name)
    return names


def _quotas(given: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """USER=GPUS, each user once."""
    found: dict[str, int] = {}
    for text in given:
        user, equals, count = text.rpartition("=")
        if not (equals and count.strip().isdecimal()):
            raise UsageError(f"--quota {text!r}: needed USER=GPUS with a whole number, such as team-1=32 or '*=32'")
        if found.setdefault(user.strip(), int(count)) != int(count):
            raise UsageError(f"--quota {user.strip()!r} is {found[user.strip()]} and {int(count)}; needed one number")
    return tuple(found.items())


def _on_terms(name: str, scenario: Scenario, reserve_nodes: int, quotas: tuple[tuple[str, int], ...]) -> str | Policy:
    """The policy, with the terms that were asked for where it makes promises."""
    if not (reserve_nodes or quotas):
        return name
    return on_terms(policy_named(name), reserve=reserve_of(scenario.cluster, reserve_nodes), quotas=quotas)


def _say_who_promises(screen: Console, names: Sequence[str]) -> None:
    others = [name for name in names if not makes_promises(policy_named(name))]
    if others:
        what = f"--reserve-nodes and --quota change nothing for {', '.join(others)}: no deadline is promised there"
        screen.print(f"[dim]{escape(what)}[/dim]", soft_wrap=True, highlight=False)


def _say_unknown_users(screen: Console, scenarios: Sequence[Scenario], quotas: tuple[tuple[str, int], ...]) -> None:
    users = sorted({job.user for scenario in scenarios for job in scenario.jobs})
    for user, _ in quotas:
        if user not in (EVERYBODY, *users):
            some = ", ".join(repr(name) for name in users[:_NAMED]) + (", ..." if len(users) > _NAMED else "")
            what = f"--quota {user!r} is nobody's here; the users are {some}"
            screen.print(f"[dim]{escape(what)}[/dim]", soft_wrap=True, highlight=False)


def _check_placement(name: str) -> None:
    if name not in PLACEMENTS:
        raise UnknownNameError(kind="placement", seen=name, known=PLACEMENTS)


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UnwritableError(path, "it is a folder")
    if not path.resolve().parent.is_dir():
        raise UnwritableError(path, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise UnwritableError(path, "permission denied")


def _save(path: Path | None, scenarios: Sequence[Scenario]) -> None:
    if path is None:
        return
    if len(scenarios) != 1:
        raise UnwritableError(path, f"it would hold {len(scenarios)} traces")
    path.write_text(write_trace(scenarios[0].jobs), encoding="utf-8")


def _say_notes(screen: Console, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        for note in scenario.notes:
            screen.print(f"[dim]{escape(scenario.name)}: {escape(note)}[/dim]", soft_wrap=True, highlight=False)


def _run(tasks: Sequence[Task], processes: int, screen: Console, *, as_json: bool) -> list[Result]:
    """All results in the order of the tasks; their JSON is printed as soon as that order allows."""
    done: dict[int, Result] = {}
    printed = 0
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as progress:
        bar = progress.add_task("simulating", total=len(tasks))
        for index, result in run_all(tasks, processes=processes):
            done[index] = result
            progress.update(bar, advance=1, description=f"{result.summary.trace}, {result.summary.policy}")
            while as_json and printed in done:
                typer.echo(report_table.as_json(done[printed].summary))
                printed += 1
    return [done[index] for index in range(len(tasks))]


def _print_tables(results: Sequence[Result]) -> None:
    out = Console()
    for table in report_table.tables(results, width=out.width):
        out.print(table)
    out.print(f"[dim]{report_table.LEGEND}[/dim]", highlight=False)


def _write_log(path: Path, results: Sequence[Result]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for result in results:
            head = {"trace": result.summary.trace, "policy": result.summary.policy}
            for decision in result.decisions:
                line = {
                    **head,
                    "time_s": decision.time_s,
                    "job": decision.job_id,
                    "action": decision.action,
                    "before": decision.before,
                    "after": decision.after,
                    "reason": decision.reason,
                }
                file.write(json.dumps(line) + "\n")
