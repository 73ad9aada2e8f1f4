"""`concertina prune`: forget jobs that ended long ago."""

from typing import Annotated

import typer
from rich.markup import escape

from concertina.cli.client import Client
from concertina.cli.shared import AsJson, Url, console, say_json, teach
from concertina.cli.times import DAY, lasting, parse_duration
from concertina.core.errors import UsageError

SHOWN = 10
PRUNE_HELP = teach(
    "Forget jobs that ended long ago: their records, logs and checkpoints.",
    "The cluster does that by itself with all but the newest (`concertina up --keep-jobs`). Jobs that have not ended "
    "are never touched, and nobody's quota changes.",
    {
        "concertina prune --dry-run": "which would go",
        "concertina prune --older 7d": "those that ended more than a week ago",
    },
)


def prune(
    older: Annotated[str, typer.Option("--older", metavar="TIME", help="Ended so long ago: 30d, 36h.")] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    seconds = parse_duration(older)
    if seconds < DAY:
        raise UsageError(f"--older {older}: needs 1d or more, since a submission may be sent again within a day")
    with Client.find(url) as client:
        answer = client.post("/cluster/prune", {"older_s": int(seconds), "dry_run": dry_run})
    if as_json:
        say_json(answer)
        return
    for line in words(answer["jobs"], answer["reason"], seconds, dry_run):
        console().print(escape(line), soft_wrap=True)


def words(jobs: list[str], reason: str, seconds: float, dry_run: bool) -> list[str]:
    if not jobs:
        return [f"no job ended more than {lasting(seconds)} ago: nothing to forget"]
    counted = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    more = [f"and {len(jobs) - SHOWN} more"] if len(jobs) > SHOWN else []
    return [f"{counted} would be forgotten" if dry_run else f"{counted}: {reason}", *jobs[:SHOWN], *more]
