"""`concertina users`: who may use a cluster that others can reach. Works on its store, also while it is up."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from concertina.cli.places import TOKEN, state_dir
from concertina.cli.shared import PANEL, AsJson, console, say_json
from concertina.core.errors import UsageError

if TYPE_CHECKING:
    from concertina.cluster.records import User
    from concertina.store.protocol import Store

app = typer.Typer(
    name="users", help="Make tokens for a cluster that others can reach.", no_args_is_help=True, rich_markup_mode="rich"
)

StateDir = Annotated[Path | None, typer.Option("--state", metavar="DIR", help="The cluster's state folder.")]
StoreAddress = Annotated[str, typer.Option("--store", metavar="ADDR", help="Its store, if that is not in the folder.")]
UserName = Annotated[str, typer.Argument(metavar="NAME")]


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, rich_help_panel=PANEL)


@contextmanager
def _store(state: Path | None, address: str) -> Iterator["Store"]:
    from concertina.store.address import open_store

    folder = state_dir(state)
    if not address and not (folder / "cluster.db").is_file():
        raise UsageError(f"there is no cluster in {folder}; `concertina up` makes one, --state names another folder")
    store = open_store(address or f"sqlite:{folder / 'cluster.db'}")
    try:
        yield store
    finally:
        store.close()


@app.command()
def add(
    name: UserName,
    admin: Annotated[bool | None, typer.Option("--admin/--no-admin", help="Sees and touches everybody's jobs.")] = None,
    max_jobs: Annotated[int | None, typer.Option(min=0, help="Jobs that have not ended, at once; 0: no limit.")] = None,
    max_slots: Annotated[
        int | None, typer.Option(min=0, help="Slots that these could have together; 0: no limit.")
    ] = None,
    max_gpu_hours: Annotated[float | None, typer.Option(min=0.0, help="Slot-hours for all time; 0: no limit.")] = None,
    state: StateDir = None,
    store: StoreAddress = "",
    as_json: AsJson = False,
) -> None:
    """Make a user, or a new token for one. The token is shown this once; what is not said again stays as it was."""
    from concertina.server.auth import renew_user

    with _store(state, store) as opened:
        user, token = renew_user(
            opened, name, admin=admin, max_jobs=max_jobs, max_slots=max_slots, max_gpu_hours=max_gpu_hours
        )
    if as_json:
        say_json({"name": name, "token": token, "admin": user.admin})
        return
    screen = console()
    screen.print(f"{escape(name)}: [bold]{token}[/bold]", soft_wrap=True)
    screen.print(f"shown this once; only its hash is kept. {escape(name)} sets {TOKEN} to it.", soft_wrap=True)


@app.command("list")
def list_users(state: StateDir = None, store: StoreAddress = "", as_json: AsJson = False) -> None:
    """List the users and their limits."""
    with _store(state, store) as opened:
        found = _users(opened)
    if as_json:
        say_json([_plain(user) for user in found])
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("NAME", "ADMIN", "JOBS", "SLOTS", "SLOT-HOURS"):
        table.add_column(heading)
    for user in found:
        limits = (user.max_jobs, user.max_slots, user.max_gpu_hours)
        table.add_row(escape(user.name), "yes" if user.admin else "", *(str(limit or "any") for limit in limits))
    console().print(table if found else "no users: on a loopback address nobody needs a token")


@app.command()
def remove(name: UserName, state: StateDir = None, store: StoreAddress = "") -> None:
    """Void a user's token at once; their jobs stay."""
    from concertina.server.auth import remove_user

    with _store(state, store) as opened:
        if not remove_user(opened, name):
            raise UsageError(f"there is no user {name!r}; `concertina users list` names them")
    console().print(f"{escape(name)}'s token is void")


def _users(store: "Store") -> list["User"]:
    from concertina.cluster import keys
    from concertina.cluster.codec import load
    from concertina.cluster.records import User

    return [load(User, entry.value) for entry in store.list_prefix(keys.USERS).entries]


def _plain(user: "User") -> dict[str, object]:
    """Without the token's hash: nobody needs to see it."""
    return {
        "name": user.name,
        "admin": user.admin,
        "max_jobs": user.max_jobs,
        "max_slots": user.max_slots,
        "max_gpu_hours": user.max_gpu_hours,
    }
