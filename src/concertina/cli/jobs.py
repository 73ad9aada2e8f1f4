"""`concertina jobs`, `describe`, `why`, `logs`, `resize` and `cancel`: look at jobs and say what becomes of them."""

import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from concertina.cli.client import Client
from concertina.cli.job_words import facts, is_over, jobs_table, phase_named, reasons, story, summary, why_lines
from concertina.cli.places import local_now
from concertina.cli.shared import AsJson, JobName, Url, console, say_json, teach
from concertina.core.errors import ClusterUnreachable

WATCH_SECONDS, FOLLOW_SECONDS = 1.0, 0.5
LINES = 5000  # in a page
ENDED_SHOWN = 10  # without --all: as many that have ended, the newest

JOBS_HELP = teach(
    "List the jobs: progress, deadlines, and the reason of the last change.",
    "",
    {
        "concertina jobs": "what runs and waits, and the last few that ended",
        "concertina jobs --watch": "the same, live; Ctrl-C ends it",
        "concertina jobs --all --json | jq -r '.[].id'": "every job there ever was, for a script",
    },
)
DESCRIBE_HELP = teach(
    "Tell all about one job.",
    "Where it runs, how fast, when it will be done, and every change with its reason.",
    {"concertina describe digits": "any beginning of its id will do"},
)
WHY_HELP = teach(
    "Say why a job has the workers it has, or waits, or was refused.",
    "And when it is expected to start and to end.",
    {"concertina why digits": "any beginning of its id will do"},
)
LOGS_HELP = teach(
    "Print what a job's script has printed.",
    "",
    {
        "concertina logs digits --tail 20": "the last lines only; without it, all of them",
        "concertina logs digits -f": "go on as it prints, until the job ends",
        "concertina logs digits --worker 2": "another worker than the main one",
    },
)
RESIZE_HELP = teach(
    "Pin a job to N workers, while it trains.",
    "Whatever the policy thinks; 0 gives it back to the policy. The job does not stop for it.",
    {"concertina resize digits 2": "two, no more and no fewer", "concertina resize digits 0": "as the policy likes"},
)
CANCEL_HELP = teach(
    "End a job at once.",
    "Its checkpoints and logs stay in the state folder.",
    {"concertina cancel digits": "any beginning of its id will do"},
)


def jobs(
    phase: Annotated[str | None, typer.Option("--phase", help="Only those: running, waiting, finished, ...")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Only this user's.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All that have ended, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show what changes.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    phase = None if phase is None else phase_named(phase)
    with Client.find(url) as client:
        if as_json:
            say_json(_some(client.jobs(phase=phase, user=user), everything or phase is not None))
        elif watch:
            _watch(client, phase, user, everything)
        else:
            console().print(_picture(client, phase, user, everything, console()))


def _some(found: list[dict[str, Any]], everything: bool) -> list[dict[str, Any]]:
    """Live ones, and the last few that ended, in order of submission."""
    found = sorted(found, key=lambda job: (job["submitted_s"], job["id"]))
    if everything:
        return found
    ended = sorted((job for job in found if is_over(job)), key=lambda job: job["ended_s"] or job["submitted_s"])
    old = {job["id"] for job in ended[: max(0, len(ended) - ENDED_SHOWN)]}
    return [job for job in found if job["id"] not in old]


def _picture(client: Client, phase: str | None, user: str | None, everything: bool, screen: Console) -> Group:
    found, cluster = client.jobs(phase=phase, user=user), client.get("/cluster")
    shown = _some(found, everything or phase is not None)
    head = Text(summary(found, cluster["slots"]["total"], cluster["slots"]["lent"]), style="bold")
    if not shown and (phase or user):
        return Group(head, Text("no such job; leave --phase and --user out to see all"))
    if not shown:
        return Group(head, Text("no jobs yet: `concertina submit SCRIPT`, or `concertina quote SCRIPT` to ask first"))
    hidden = len(found) - len(shown)
    tail = [Text(f"and {hidden} that ended earlier: --all", style="dim")] if hidden else []
    return Group(head, jobs_table(shown, local_now(), screen.width), *tail, *reasons(shown, screen.width))


def _watch(client: Client, phase: str | None, user: str | None, everything: bool) -> None:
    screen = console()
    try:
        with Live(console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
            while True:
                try:
                    live.update(_picture(client, phase, user, everything, screen), refresh=True)
                except ClusterUnreachable as error:
                    live.update(Text(f"{error}", style="yellow"), refresh=True)
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        pass


def describe(job: JobName, url: Url = None, as_json: AsJson = False) -> None:
    with Client.find(url) as client:
        found = client.job(job)
    if as_json:
        say_json(found)
        return
    screen, now = console(), local_now()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for name, text in facts(found, now):
        table.add_row(name, escape(text))
    screen.print(table)
    if found["history"]:
        screen.print(story(found, now))


def why(job: JobName, url: Url = None, as_json: AsJson = False) -> None:
    with Client.find(url) as client:
        answer = client.get(f"/jobs/{quote(client.find_job(job), safe='')}/why")
    if as_json:
        say_json(answer)
        return
    for line in why_lines(answer, local_now()):
        console().print(escape(line), soft_wrap=True)


def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, until the job ends.")] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", "-n", min=1, max=LINES, help="Begin with the last N lines. Default: with the first."),
    ] = None,
    worker: Annotated[int | None, typer.Option("--worker", min=0, help="Which one. Default: the main one.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    with Client.find(url) as client:
        try:
            _print_logs(client, client.find_job(job), follow, tail, worker, as_json)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _print_logs(client: Client, job_id: str, follow: bool, tail: int | None, worker: int | None, as_json: bool) -> None:
    after, limit, printed = 0 if tail is None else None, tail or LINES, False
    while True:
        get = client.get_patiently if follow else client.get
        page = get(f"/jobs/{quote(job_id, safe='')}/logs", worker=worker, after=after, limit=limit)
        for line in page["lines"]:
            if as_json:
                say_json(line)
            else:
                sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        after, limit = page["next"], LINES
        printed = printed or bool(page["lines"])
        if not page["lines"]:
            if page["ended"] or not follow:
                if not printed:
                    print(_nothing(job_id, page), file=sys.stderr)
                return
            time.sleep(FOLLOW_SECONDS)


def _nothing(job_id: str, page: dict[str, Any]) -> str:
    if page["workers"]:
        return f"worker {page['worker']} of {job_id} has printed nothing"
    what = "never had a worker" if page["ended"] else "has no worker yet"
    return f"{job_id} {what}; concertina describe {job_id} says why"


def resize(
    job: JobName,
    workers: Annotated[int, typer.Argument(metavar="N", min=0, help="Workers; 0: as the policy likes.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    with Client.find(url) as client:
        found = client.post(f"/jobs/{quote(client.find_job(job), safe='')}/resize", {"workers": workers})
    wanted = (
        f"pinned to {workers} {'worker' if workers == 1 else 'workers'}" if workers else "as the policy likes again"
    )
    _say(found, as_json, f"{wanted}; it has {len(found['slots'])} now")


def cancel(job: JobName, url: Url = None, as_json: AsJson = False) -> None:
    with Client.find(url) as client:
        found = client.delete(f"/jobs/{quote(client.find_job(job), safe='')}")
    _say(found, as_json, found["reason"])


def _say(job: dict[str, Any], as_json: bool, words: str) -> None:
    if as_json:
        say_json(job)
    else:
        console().print(escape(f"{job['id']}: {words}"), soft_wrap=True)
