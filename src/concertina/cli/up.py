"""`concertina up` and `concertina down`: a cluster on this machine, from start to a tidy end."""

import contextlib
import os
import signal
import threading
import time
import webbrowser
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from concertina.cli.client import Client
from concertina.cli.job_words import is_over, summary
from concertina.cli.places import DEFAULT_HOST, DEFAULT_PORT, TOKEN, URL, state_dir
from concertina.cli.serve import Serving, UpSettings
from concertina.cli.shared import AsJson, Url, console, say_json, teach
from concertina.core.errors import ConcertinaError, RequestRefused, UsageError

LINE_SECONDS = 1.0
DOWN_SECONDS = 60.0  # workers reach a step boundary and write their checkpoints
DEMO_SLOTS = 4

UP_HELP = teach(
    "Start a cluster on this machine: controller, REST, dashboard.",
    "Finds its GPUs (or takes shares of its CPUs) and keeps its state in a folder of yours. Ctrl-C suspends all jobs "
    "with their state kept; the next `up` goes on.",
    {
        "concertina up --demo": "with some real jobs, to look around: growing, shrinking, a refusal, a kept deadline",
        "concertina up": "then, in another terminal: concertina submit train.py",
        "concertina up --slots 4 --port 8500 --state ./cluster": "four places for workers; everything in one folder",
        "concertina up --host 0.0.0.0": "for others, too; asks for tokens, and makes the first one",
        "concertina up --port 0 --json": "for a script: the address (and the first token) as JSON",
    },
    end="Environment: CONCERTINA_STATE names the state folder; CONCERTINA_URL and CONCERTINA_TOKEN name the cluster "
    "that the other commands talk to.",
)
DOWN_HELP = teach(
    "End the cluster; its jobs are suspended with their state kept.",
    "They go on with the next `concertina up`.",
    {"concertina down": "all is kept", "concertina down --cancel": "cancel the jobs that have not ended"},
)

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="State folder. Default: $CONCERTINA_STATE or ~/.local/state/concertina."
    ),
]
Slots = Annotated[
    int, typer.Option("--slots", min=0, help="Places for workers. Default: one per GPU, else one per CPU core.")
]
StoreAddress = Annotated[
    str, typer.Option("--store", metavar="ADDR", help="sqlite:PATH or etcd://HOST:PORT/PREFIX. Default: in the folder.")
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on. Any but a loopback one needs tokens.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any that is free.")]
PolicyName = Annotated[str, typer.Option("--policy", help="See `concertina policies`.")]
BackendName = Annotated[str, typer.Option("--backend", help="local: this machine. ray: the machines of a Ray cluster.")]
KeepJobs = Annotated[
    int, typer.Option("--keep-jobs", min=0, help="Jobs that have ended to remember, the newest; 0: all.")
]
Demo = Annotated[bool, typer.Option("--demo", help=f"Start with some real jobs, on {DEMO_SLOTS} slots.")]
UpJson = Annotated[
    bool,
    typer.Option("--json", help="When it is up, print where as one line of JSON; all else goes to standard error."),
]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the dashboard in a browser.")]


def up(
    slots: Slots = 0,
    state: StateDir = None,
    store: StoreAddress = "",
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    policy: PolicyName = "concertina",
    backend: BackendName = "local",
    keep_jobs: KeepJobs = 1000,
    demo: Demo = False,
    browse: Open = False,
    as_json: UpJson = False,
) -> None:
    settings = read_settings(slots, state, store, host, port, policy, backend, keep_jobs, demo)
    screen = Console(stderr=True, highlight=False) if as_json else console()
    asked = _on_signals()
    serving = Serving(settings)
    with screen.status("starting"):
        serving.start()
    try:
        made = _first_token(serving) if settings.token_needed else None
        if as_json:
            say_json(facts(serving, made))
        else:
            _greet(serving, screen)
            if settings.token_needed:
                _tell_token(serving, made, screen)
        token = made or os.environ.get(TOKEN, "")
        if browse:
            webbrowser.open(serving.url)
        if demo:
            _start_demo(serving, token, screen)
        _stay(serving, asked, screen)
        _go_down(serving, asked, screen)
    finally:
        serving.close()


def read_settings(
    slots: int,
    state: Path | None,
    store: str,
    host: str,
    port: int,
    policy: str,
    backend: str,
    keep_jobs: int,
    demo: bool,
) -> UpSettings:
    from concertina.policies.registry import policy_named

    policy_named(policy)
    if backend not in ("local", "ray"):
        raise UsageError(f"--backend {backend}: needs local or ray")
    if slots and backend == "ray":
        raise UsageError(
            f"--slots {slots} is for this machine alone: with --backend ray leave it out, Ray knows the slots"
        )
    folder = state_dir(state)
    return UpSettings(
        state=folder,
        store=store or f"sqlite:{folder / 'cluster.db'}",
        host=host,
        port=port,
        slots=slots or (DEMO_SLOTS if demo else 0),
        policy=policy,
        backend=backend,
        keep_jobs=keep_jobs,
        token_needed=not _is_loopback(host),
    )


def _is_loopback(host: str) -> bool:
    from concertina.server.auth import is_loopback

    return is_loopback(host)


class Asked:
    """How often Ctrl-C was pressed, or the process was told to end."""

    def __init__(self) -> None:
        self.times = 0
        self.event = threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.event.set()


def _on_signals() -> Asked:
    asked = Asked()
    signal.signal(signal.SIGINT, asked)
    signal.signal(signal.SIGTERM, asked)
    return asked


def _greet(serving: Serving, screen: Console) -> None:
    nodes = serving.mirror.nodes()
    total = sum(node.slots for node in nodes)
    kinds = ", ".join(sorted({node.device_type for node in nodes})) or "none"
    lines = [
        f"[bold]concertina[/bold] is up: [link={serving.url}]{serving.url}[/link]",
        f"  slots      {total} ({escape(kinds)})",
        f"  policy     {serving.settings.policy}",
        f"  state      {escape(str(serving.settings.state))}",
        "  submit     concertina submit --deadline 2h train.py",
        "  look       concertina jobs --watch",
        "  end        Ctrl-C here, or concertina down: jobs are suspended with their state kept",
    ]
    if way := way_here(serving.settings.state, serving.url):
        lines.insert(4, f"  elsewhere  {way}")
    for line in lines:
        screen.print(line, soft_wrap=True)


def way_here(state: Path, url: str) -> str:
    """What to say first in another terminal, where commands do not find the cluster by themselves."""
    return "" if state == state_dir() else f"export {URL}={url}"


def facts(serving: Serving, token: str | None) -> dict[str, Any]:
    """What a program wants to know of a cluster that is up. `token`: of the first admin, when one was made just now."""
    settings = serving.settings
    return {
        "url": serving.url,
        "pid": os.getpid(),
        "state": str(settings.state),
        "policy": settings.policy,
        "token_needed": settings.token_needed,
        "token": token,
    }


def _first_token(serving: Serving) -> str | None:
    from concertina.server.auth import first_admin, local_user

    return first_admin(serving.store, local_user())


def _tell_token(serving: Serving, token: str | None, screen: Console) -> None:
    from concertina.server.auth import local_user

    if token is None:
        screen.print("  tokens     needed; `concertina users add NAME` makes one")
        return
    screen.print(f"  token      [bold]{token}[/bold] (admin {escape(local_user())})", soft_wrap=True)
    screen.print(
        f"             shown this once; its hash is in {escape(serving.settings.store)}. Use it as {TOKEN}=..., "
        f"with {URL}={serving.url}",
        soft_wrap=True,
    )


def _start_demo(serving: Serving, token: str, screen: Console) -> None:
    from concertina.cli.demo import Demo as DemoJobs

    DemoJobs.find().start(serving.url, token, lambda text: screen.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True))


def _stay(serving: Serving, asked: Asked, screen: Console) -> None:
    """Until somebody wants an end: here, or with `concertina down`."""
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        while not asked.event.wait(LINE_SECONDS):
            if is_going_down(serving):
                return
            if screen.is_terminal:
                live.update(status_line(serving), refresh=True)


def is_going_down(serving: Serving) -> bool:
    """Whether that was asked for since we are here. What the record says from before, our controller takes back in its
    first turn, which may take a while."""
    cluster, before = serving.mirror.cluster, serving.controller.down_before
    return cluster is not None and cluster.going_down and before is not None and cluster.down_s != before


def status_line(serving: Serving) -> Text:
    states = [job.state for job in serving.mirror.jobs()]
    jobs = [{"phase": one.phase.value, "profiling": one.profiling, "slots": one.slots} for one in states]
    nodes = serving.mirror.nodes()
    text = summary(jobs, sum(node.slots for node in nodes), sum(len(node.lent) for node in nodes))
    cluster = serving.mirror.cluster
    if serving.mirror.stale_since is not None:
        return Text("the store does not answer; jobs go on, decisions wait", style="yellow")
    if cluster is not None and cluster.error:
        return Text(f"{text}; the last round could not decide: {cluster.error}", style="yellow")
    return Text(text, style="dim")


def _go_down(serving: Serving, asked: Asked, screen: Console) -> None:
    """All jobs suspended, their state kept; asked a second time, at once."""
    asked.event.clear()
    if not serving.controller.in_office.is_set() and not is_going_down(serving):
        screen.print("down. Another server is in office: jobs go on.")
        return
    live = [job.id for job in serving.mirror.jobs() if job.keeper is not None]
    if live:
        whose = "1 job; its" if len(live) == 1 else f"{len(live)} jobs; their"
        screen.print(f"suspending {whose} state is kept. Ctrl-C again ends at once.")
    _ask_down(serving)
    ends = time.monotonic() + DOWN_SECONDS
    while time.monotonic() < ends and not asked.event.wait(0.1):
        if not any(job.keeper is not None for job in serving.mirror.jobs()):
            screen.print("down. `concertina up` goes on where it was.")
            return
    left = [job.id for job in serving.mirror.jobs() if job.keeper is not None]
    screen.print(f"down; still at work, and found again by the next `up`: {', '.join(left)}")


def _ask_down(serving: Serving) -> None:
    from concertina.cluster import keys
    from concertina.cluster.codec import dump
    from concertina.cluster.records import Ask, Op
    from concertina.server.auth import local_user

    if not is_going_down(serving):
        ask = Ask(id=f"down-{time.time_ns():x}", op=Op.DOWN, user=local_user(), at_s=time.time())
        serving.store.put(keys.ASKS + ask.id, dump(ask))


def down(
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel all jobs instead of keeping their state.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    with Client.find(url) as client:
        if cancel:
            _cancel_all(client)
        answer = client.post("/cluster/down")
        gone = _until_gone(client)
    if as_json:
        say_json(answer)
    else:
        console().print(escape("down" if gone else f"going down: {answer['reason']}"), soft_wrap=True)


def _cancel_all(client: Client) -> None:
    for job in client.jobs():
        if not is_over(job):
            with contextlib.suppress(RequestRefused):  # it has ended meanwhile
                client.delete(f"/jobs/{job['id']}")


def _until_gone(client: Client) -> bool:
    ends = time.monotonic() + DOWN_SECONDS + 10.0
    while time.monotonic() < ends:
        try:
            client.get("/cluster")
        except ConcertinaError:
            return True
        time.sleep(0.3)
    return False
