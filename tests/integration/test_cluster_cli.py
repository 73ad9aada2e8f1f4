"""The live cluster from its command line, as a user has it: real servers, real jobs, every exit code."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.live_cluster import Up, ask, cluster, free_port, wait_for_server

from conftest import TRAIN, Script

EXAMPLES = Path(__file__).parents[2] / "examples"
PACED = ("--virtual", "2", EXAMPLES / "live_paced.py", "0.05", EXAMPLES / "mlp.py", "--epochs")
LIMIT_SECONDS = 120.0

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(concertina: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line, on a screen of a known width; nothing of the outside leads it elsewhere."""
    for name in ("CONCERTINA_URL", "CONCERTINA_TOKEN", "CONCERTINA_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return concertina


@contextmanager
def up(tmp_path: Path, *args: str) -> Iterator[Up]:
    with cluster(tmp_path / "state" / "concertina", free_port(), "--slots", "2", *args) as running:
        yield running


def asked(cli: Cli, *args: object) -> Any:
    done = cli(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(there: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT_SECONDS
    while not there():
        assert time.monotonic() < ends, "it did not come to that in time"
        time.sleep(0.2)


def test_a_script_that_starts_a_cluster_is_told_where_it_is(tmp_path: Path) -> None:
    words = ("up", "--json", "--port", "0", "--host", "0.0.0.0", "--slots", "2", "--state", tmp_path / "state")
    command = [sys.executable, "-m", "concertina", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["pid"] == process.pid
        assert (told["state"], told["token_needed"]) == (str(tmp_path / "state"), True)
        headers = {"Authorization": f"Bearer {told['token']}"}
        session = httpx.get(f"{told['url']}/api/v1/session", headers=headers, trust_env=False).json()
        assert session["admin"] is True
    finally:
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, rest) == (0, ""), said
    assert "down." in said
    assert told["token"] not in said


def test_a_newcomer_submits_looks_and_is_refused(cli: Cli, script: Script, tmp_path: Path) -> None:
    ending = "if session.is_main: print('line\\n' * 6000, end='trained to the end')"
    train = script(f"{TRAIN}\n{ending}", epochs=3)
    with up(tmp_path):
        assert "no jobs yet: `concertina submit SCRIPT`" in cli("jobs").stdout
        done = cli("submit", "--wait", "--name", "first", train)
        assert done.returncode == 0, done.stderr
        assert "taken as first-" in done.stdout
        assert "finished" in done.stdout
        assert "all its work is done" in done.stdout
        assert cli("logs", "first").stdout == "line\n" * 6000 + "trained to the end\n"
        assert cli("logs", "first", "--tail", 2).stdout == "line\n" * 2 + "trained to the end\n"
        (job,) = asked(cli, "jobs", "--all")
        assert (job["phase"], job["step"], job["name"]) == ("finished", 12, "first")
        assert asked(cli, "describe", job["id"][:-2])["id"] == job["id"]
        assert "step 12 of 12 (100%)" in cli("describe", "first").stdout
        refused = cli("submit", "--deadline", "1s", train)
        assert (refused.returncode, refused.stdout.partition(":")[0]) == (3, "refused"), refused.stderr
        assert "what could be promised now: --deadline" in refused.stdout
        (never,) = asked(cli, "jobs", "--all", "--phase", "refused")
        assert f"{never['id']} never had a worker" in cli("logs", never["id"]).stderr
        quoted = cli("quote", "--deadline", "10m", train)
        assert quoted.returncode == 0, quoted.stderr
        assert "would be taken:" in quoted.stdout
        assert "expected end:" in quoted.stdout
        assert "0: free, 1: free" in cli("nodes").stdout
        wrong = cli("describe", "nothing")
        assert (wrong.returncode, wrong.stderr) == (
            2,
            "concertina: there is no job 'nothing'; `concertina jobs --all` lists them\n",
        )


def test_a_job_is_resized_reclaimed_drained_and_cancelled(cli: Cli, tmp_path: Path) -> None:
    with up(tmp_path) as running:

        def job() -> Any:
            return ask(running.url, "GET", "/jobs?limit=1")["items"][0]

        assert cli("submit", "--name", "long", *PACED, "500").returncode == 0
        assert "pinned to 1 worker" in cli("resize", "long", "1").stdout
        until(lambda: len(job()["slots"]) == 1)
        assert cli("resize", "long", "0").returncode == 0
        until(lambda: job()["workers"] == 2)
        told = cli("reclaim", "1")
        assert told.returncode == 0, told.stderr
        until(lambda: job()["workers"] == 1)
        assert "reclaimed" in cli("nodes").stdout
        assert "it goes on with 1 slot" in cli("jobs").stdout
        assert "it runs on" in cli("why", "long").stdout
        assert cli("reclaim", "0", "--return").returncode == 0
        until(lambda: job()["workers"] == 2)
        node = asked(cli, "nodes")[0]["id"]
        assert cli("drain", node).returncode == 0
        until(lambda: job()["activity"] == "suspended")
        assert cli("drain", node, "--undo").returncode == 0
        until(lambda: job()["workers"] == 2)
        assert "cancelled it" in cli("cancel", "long").stdout
        until(lambda: not ask(running.url, "GET", "/cluster")["slots"]["busy"])
        assert cli("resize", "long", "1").returncode == 3  # it has ended
        assert cli("drain", "nowhere").returncode in (2, 3)


def test_ctrl_c_keeps_the_state_and_the_next_up_goes_on(cli: Cli, tmp_path: Path) -> None:
    with up(tmp_path) as first:

        def job() -> Any:
            return ask(first.url, "GET", "/jobs?limit=1")["items"][0]

        assert cli("submit", "--name", "kept", *PACED, "2").returncode == 0
        until(lambda: job()["step"] > 10)
        first.stop()
        told = (first.state / f"up-{first.port}.log").read_text()
        assert "suspending 1 job; its state is kept" in told
        assert told.endswith("down. `concertina up` goes on where it was.\n")
        gone = cli("jobs")
        assert gone.returncode == 1
        assert gone.stderr.startswith("concertina: no cluster answers at http://127.0.0.1:8400; start one with")
        first.start()
        wait_for_server(first.state, first.url)
        until(lambda: job()["phase"] == "finished")
        assert (job()["step"], job()["exit"]) == (126, 0)
        assert cli("down").stdout == "down\n"
        until(lambda: not first.alive)


def test_what_can_not_start_says_why_in_one_sentence(cli: Cli, tmp_path: Path) -> None:
    with up(tmp_path) as running:
        twice = cli("up", "--port", "0")
        assert twice.returncode == 2
        assert f"a cluster is already up at {running.url}" in twice.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = cli("up", "--port", port)
        assert (busy.returncode, busy.stderr.count("\n")) == (2, 1)
        assert f"port {port} of 127.0.0.1 is taken by another program; try --port {port + 1}" in busy.stderr
    for args, sentence in (
        (("--state", "/dev/null/x"), "the state folder /dev/null/x can not be used (not a directory)"),
        (("--policy", "magic"), "no policy named 'magic'"),
        (("--host", "203.0.113.7"), "--host 203.0.113.7 is no address of this machine"),
        (("--backend", "abacus"), "--backend abacus: needs local or ray"),
        (("--backend", "ray", "--slots", "4"), "--slots 4 is for this machine alone"),
        (("--store", "redis://x"), "redis://x"),
    ):
        wrong = cli("up", *args)
        assert wrong.returncode in (1, 2)
        assert sentence in wrong.stderr
        assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "state" / "concertina" / "server.json").exists()


def test_an_address_that_others_reach_needs_a_token(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with up(tmp_path, "--host", "0.0.0.0") as running:
        text = (running.state / f"up-{running.port}.log").read_text()
        found = re.search(r"ct_[\w-]{40,}", text)
        assert found is not None, text
        assert found[0].encode() not in (running.state / "cluster.db").read_bytes()
        locked = cli("jobs")
        assert locked.returncode == 1
        assert "set CONCERTINA_TOKEN" in locked.stderr
        monkeypatch.setenv("CONCERTINA_TOKEN", found[0])
        assert cli("jobs").returncode == 0
        made = asked(cli, "users", "add", "ada", "--max-jobs", "1")
        assert asked(cli, "users", "add", "ada")["token"] != made["token"]
        made = asked(cli, "users", "add", "ada", "--max-slots", "2")
        ada = next(user for user in asked(cli, "users", "list") if user["name"] == "ada")
        assert (ada["admin"], ada["max_jobs"], ada["max_slots"]) == (False, 1, 2), "a new token voids no limit"
        monkeypatch.setenv("CONCERTINA_TOKEN", made["token"])
        until(lambda: cli("jobs").returncode == 0)
        assert cli("down").returncode == 3  # not an admin
        assert cli("users", "remove", "ada").returncode == 0
        until(lambda: cli("jobs").returncode == 1)


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("submit", "missing.py"), 2, "missing.py is not a file"),
        (("submit", "--deadline", "30", "{}"), 2, "'30' has no unit"),
        (("submit", "--soft", "{}"), 2, "--soft needs --deadline TIME"),
        (("submit", "{}", os.fsdecode(b"caf\xe9")), 2, "'caf\\udce9' is no text in UTF-8"),
        (("submit", "--max", "9", "{}"), 2, "--max 9: needs 1 (--min) to 4 (--virtual)"),
        (("submit", "{}"), 1, "no cluster answers at http://127.0.0.1:1; start one with `concertina up`"),
        (("reclaim", "0"), 2, "say how many slots are wanted"),
        (("jobs", "--url", "ftp://x"), 2, "needs to begin with http://"),
        (("users", "list"), 2, "there is no cluster in"),
    ],
)
def test_a_slip_is_told_in_one_sentence(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int, sentence: str
) -> None:
    monkeypatch.setenv("CONCERTINA_URL", "http://127.0.0.1:1")
    train = str(script(TRAIN))
    done = cli(*(train if arg == "{}" else arg for arg in args))
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert sentence in done.stderr


def test_help_teaches_with_examples_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from concertina.cli import app\n"
        "out = CliRunner().invoke(app, ['submit', '--help']).output\n"
        "assert 'concertina submit --deadline 2h' in out and 'Exit codes' in out, out\n"
        "heavy = {'torch', 'fastapi', 'httpx', 'uvicorn', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
