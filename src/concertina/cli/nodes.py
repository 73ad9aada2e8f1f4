"""`concertina nodes`, `drain` and `reclaim`: the places that jobs run on."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from concertina.cli.client import PAGE, Client
from concertina.cli.shared import AsJson, Url, console, finish, say_json, teach
from concertina.core.errors import UsageError

NODES_HELP = teach(
    "List the machines, their slots, and which job has which.",
    "",
    {"concertina nodes": "for people", "concertina nodes --json": "for a script"},
)
DRAIN_HELP = teach(
    "Take a machine out of service.",
    "Its jobs move away or are suspended with their state kept; nothing new comes.",
    {"concertina drain node1": "before maintenance", "concertina drain node1 --undo": "it is back"},
)
RECLAIM_HELP = teach(
    "Take N slots back for somebody else's service, within seconds.",
    "Jobs shrink, move or are suspended with their state kept; none fails, and none computes other numbers.",
    {
        "concertina reclaim 2": "two slots are free for something else within three seconds",
        "concertina reclaim 2 --return": "they may be used again",
        "concertina reclaim 0 --return": "all that were reclaimed",
    },
)


def nodes(url: Url = None, as_json: AsJson = False) -> None:
    with Client.find(url) as client:
        if as_json:
            say_json(client.get("/nodes", limit=PAGE)["items"])
            return
        cluster = client.get("/cluster")
    who = {slot["slot"]: slot_words(slot) for slot in cluster["placement"]}
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("NODE", "STATE", "KIND", "SLOTS", "JOBS"):
        table.add_column(heading)
    for node in cluster["nodes"]:
        table.add_row(*(escape(cell) for cell in node_row(node, who)))
    console().print(table)


def slot_words(slot: dict[str, Any]) -> str:
    """Who has it, or why nobody has."""
    state, job = str(slot["state"]), slot["job"] or "somebody else's job"
    return {"busy": job, "leaving": f"{job} (leaving)", "lent": "reclaimed"}.get(state, state)


def node_row(node: dict[str, Any], who: dict[str, str]) -> tuple[str, str, str, str, str]:
    names = [f"{node['id']}/{index}" for index in range(node["slots"])]
    lent = set(node["lent"])
    busy = ", ".join(
        f"{index}: {'reclaimed' if index in lent else who.get(name, 'free')}" for index, name in enumerate(names)
    )
    state = node["phase"] + (f" ({node['reason']})" if node.get("reason") else "")
    return str(node["id"]), state, str(node["device_type"]), str(node["slots"]), busy


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `concertina nodes` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="It is back in service.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    with Client.find(url) as client:
        answer = client.post(f"/nodes/{quote(node, safe='')}/drain", {"undrain": undo})
    finish(answer, as_json)


def reclaim(
    slots: Annotated[int, typer.Argument(metavar="N", min=0, help="How many slots; with --return, 0 means all.")],
    give_back: Annotated[bool, typer.Option("--return", help="Give slots again that were reclaimed.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    if not slots and not give_back:
        raise UsageError("reclaim 0: say how many slots are wanted, as in `concertina reclaim 2`")
    with Client.find(url) as client:
        answer = client.post("/cluster/reclaim", {"slots": slots, "return": give_back})
    finish(answer, as_json)
