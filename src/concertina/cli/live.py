"""The live cluster's commands, put on the command line. What they need beyond it is imported when they run."""

from typing import Any

import typer

from concertina.cli import jobs, nodes, prune, submit, up, users
from concertina.cli.shared import PANEL


def register(app: typer.Typer, for_the_script: dict[str, Any]) -> None:
    """Add the commands to an application, in the order in which a newcomer needs them."""

    def add(command: Any, text: str, **how: Any) -> None:
        app.command(help=text, rich_help_panel=PANEL, **how)(command)

    add(up.up, up.UP_HELP)
    add(submit.submit, submit.SUBMIT_HELP, context_settings=for_the_script)
    add(submit.quote, submit.QUOTE_HELP, context_settings=for_the_script)
    add(jobs.jobs, jobs.JOBS_HELP)
    add(jobs.describe, jobs.DESCRIBE_HELP)
    add(jobs.why, jobs.WHY_HELP)
    add(jobs.logs, jobs.LOGS_HELP)
    add(jobs.resize, jobs.RESIZE_HELP)
    add(jobs.cancel, jobs.CANCEL_HELP)
    add(nodes.nodes, nodes.NODES_HELP)
    add(nodes.drain, nodes.DRAIN_HELP)
    add(nodes.reclaim, nodes.RECLAIM_HELP)
    add(prune.prune, prune.PRUNE_HELP)
    add(up.down, up.DOWN_HELP)
    users.register(app)
