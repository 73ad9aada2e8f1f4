"""`concertina submit` and `concertina quote`: ask for a job, and hear at once whether it is taken."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from concertina.cli.client import Client
from concertina.cli.job_words import band_words, is_over, over_words, state_words, verdict, when
from concertina.cli.places import local_now
from concertina.cli.shared import REFUSED, TAKEN, TROUBLE, AsJson, Script, Url, console, say_json, teach
from concertina.cli.times import FORMS, lasting, parse_time
from concertina.core.errors import UsageError
from concertina.core.names import is_unicode
from concertina.runner import check_script

DEFAULT_VIRTUAL = 4
POLL_SECONDS = 0.5
DECISION_SECONDS = 120.0  # an unknown job is measured first; after so long we say that it is not decided

SUBMIT_HELP = teach(
    "Hand a training script to the cluster: taken or refused, at once.",
    "Taken: then the deadline is kept. Refused: with the earliest deadline that could be promised. A script that the "
    "cluster has never seen is measured first, for some seconds, while it already trains.",
    {
        "concertina submit train.py": "no deadline: it runs on what is free",
        "concertina submit --deadline 2h --steps 5000 train.py --epochs 30": "done in two hours, or refused now",
        "concertina submit --deadline 18:00 --soft train.py": "wanted by then, but never refused for it",
        "concertina submit --max 2 --name night-run --wait train.py": "at most two workers; return when it has ended",
    },
)
QUOTE_HELP = teach(
    "Ask what would happen if a script were submitted; nothing is.",
    "Whether it would be taken, when it would start and end, the earliest deadline that could be promised, and who "
    "would end later because of it.",
    {
        "concertina quote train.py": "when would it be done?",
        "concertina quote --deadline 2h train.py": "could two hours be promised?",
    },
)

Deadline = Annotated[str | None, typer.Option("--deadline", "-d", metavar="TIME", help=f"{FORMS}.")]
Soft = Annotated[bool, typer.Option("--soft", help="The deadline is a wish: never refuse the job for it.")]
Virtual = Annotated[
    int,
    typer.Option("--virtual", "-P", min=1, help="Virtual workers: the DDP processes whose result you want."),
]
Min = Annotated[int, typer.Option("--min", min=1, help="Never fewer workers than this.")]
Max = Annotated[int, typer.Option("--max", min=0, help="Never more workers than this. Default: the virtual workers.")]
Steps = Annotated[int, typer.Option("--steps", min=0, help="Optimizer steps; 0: as many as the script makes.")]
Name = Annotated[str, typer.Option("--name", help="What to call it. Default: the script's name.")]
User = Annotated[str, typer.Option("--user", help="On whose behalf. Default: you.")]
Wait = Annotated[
    bool, typer.Option("--wait", "-w", help="Return when the job has ended: 0 if it finished, 1 if it failed.")
]


def submit(
    context: typer.Context,
    script: Script,
    deadline: Deadline = None,
    soft: Soft = False,
    virtual: Virtual = DEFAULT_VIRTUAL,
    minimum: Min = 1,
    maximum: Max = 0,
    steps: Steps = 0,
    name: Name = "",
    user: User = "",
    wait: Wait = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    body = request_body(script, context.args, deadline, soft, virtual, minimum, maximum, steps, name, user)
    screen = console()
    with Client.find(url) as client:
        job = client.post("/jobs", body)
        job = until_decided(client, job, screen, quiet=as_json)
        if not as_json:
            _say_verdict(job, screen)
        if wait and not is_over(job):
            job = until_over(client, job, screen, quiet=as_json)
            if not as_json:
                ended = f"{job['id']}: {state_words(job)}, {over_words(job, local_now())}"
                screen.print(escape(ended), soft_wrap=True)
    if as_json:
        say_json(job)
    raise typer.Exit(exit_code(job))


def quote(
    context: typer.Context,
    script: Script,
    deadline: Deadline = None,
    soft: Soft = False,
    virtual: Virtual = DEFAULT_VIRTUAL,
    minimum: Min = 1,
    maximum: Max = 0,
    steps: Steps = 0,
    user: User = "",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    body = request_body(script, context.args, deadline, soft, virtual, minimum, maximum, steps, "", user)
    with Client.find(url) as client:
        answer = client.post("/quote", body)
    if as_json:
        say_json(answer)
    else:
        for line in quote_lines(answer, local_now()):
            console().print(escape(line), soft_wrap=True)
    raise typer.Exit(TAKEN if answer["taken"] else REFUSED)


def request_body(
    script: Path,
    args: list[str],
    deadline: str | None,
    soft: bool,
    virtual: int,
    minimum: int,
    maximum: int,
    steps: int,
    name: str,
    user: str,
) -> dict[str, Any]:
    """Checked here, so that a slip is told before the cluster is asked."""
    check_script(script)
    if soft and deadline is None:
        raise UsageError("--soft needs --deadline TIME: there is no deadline to be soft about")
    if maximum and not minimum <= maximum <= virtual:
        raise UsageError(f"--max {maximum}: needs {minimum} (--min) to {virtual} (--virtual)")
    if minimum > virtual:
        raise UsageError(f"--min {minimum}: needs 1 to {virtual} (--virtual)")
    body: dict[str, Any] = {
        "script": str(script.resolve()),
        "args": list(args),
        "cwd": os.getcwd(),
        "virtual": virtual,
        "min_workers": minimum,
        "max_workers": maximum,
        "steps": steps,
        "soft": soft,
    }
    for text in (body["script"], body["cwd"], *body["args"]):
        if not is_unicode(text):
            raise UsageError(f"{text!a} is no text in UTF-8, which is all that a cluster can be told")
    if deadline is not None:
        body["deadline_s"] = parse_time(deadline, local_now())
    body |= {key: value for key, value in (("name", name), ("user", user)) if value}
    return body


def until_decided(client: Client, job: dict[str, Any], screen: Console, quiet: bool) -> dict[str, Any]:
    """Waits for admission's word; an unknown job is measured first."""
    ends = time.monotonic() + DECISION_SECONDS
    with only_waiting(job, screen), screen.status("asking the cluster", spinner="dots") as status:
        while job["phase"] == "submitted" and time.monotonic() < ends:
            if not quiet and job["reason"]:
                status.update(f"{escape(job['id'])}: {escape(job['reason'])}")
            time.sleep(POLL_SECONDS)
            job = client.follow_job(job["id"])
    return job


def until_over(client: Client, job: dict[str, Any], screen: Console, quiet: bool) -> dict[str, Any]:
    """As long as the job takes."""
    with only_waiting(job, screen), screen.status("", spinner="dots") as status:
        while not is_over(job):
            if not quiet:
                share = "" if job["progress"] is None else f", {job['progress']:.0%}"
                status.update(f"{escape(job['id'])}: {state_words(job)} on {job['workers']} workers{share}")
            time.sleep(POLL_SECONDS)
            job = client.follow_job(job["id"])
    return job


@contextmanager
def only_waiting(job: dict[str, Any], screen: Console) -> Iterator[None]:
    """Ctrl-C ends the waiting, not the job, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        name = job["id"]
        told = f"the job goes on; `concertina describe {name}` shows it, `concertina cancel {name}` ends it"
        screen.print(told, soft_wrap=True)
        raise typer.Exit(130) from None


def exit_code(job: dict[str, Any]) -> int:
    if job["phase"] == "rejected":
        return REFUSED
    return TROUBLE if job["phase"] in ("failed", "cancelled") else TAKEN


def _say_verdict(job: dict[str, Any], screen: Console) -> None:
    colour = {"rejected": "magenta", "failed": "red", "submitted": "yellow"}.get(job["phase"], "green")
    head, *rest = verdict_lines(job)
    screen.print(f"[{colour}]{escape(head)}[/{colour}]", soft_wrap=True)
    for line in rest:
        screen.print(escape(line), soft_wrap=True)


def verdict_lines(job: dict[str, Any]) -> list[str]:
    return verdict(job, local_now()).splitlines()


def quote_lines(answer: dict[str, Any], now: datetime) -> list[str]:
    """A quote in sentences. Times that are not known are left out."""
    lines = [("would be taken: " if answer["taken"] else "would be refused: ") + answer["reason"]]
    lines += [line for name in ("start", "end") if (line := band_words(f"expected {name}", answer[name], now))]
    if answer["earliest_s"] is not None:
        lines.append(f"earliest deadline that could be promised: {when(answer['earliest_s'], now)}")
    for delay in answer["delays"]:
        if delay["by_s"] is not None:
            lines.append(f"{delay['job'] or 'a job of somebody else'} would end {lasting(delay['by_s'])} later")
    if not answer["profiled"]:
        lines.append("such a job has not run here yet: these times rest on a guess, and a submission measures it first")
    return lines
