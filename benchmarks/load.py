"""The interface and the controller under load: `python -m benchmarks.load [SUBMISSIONS [WATCHERS]]`.

Starts a real cluster (`concertina up`, SQLite, four slots) and, beside it on the same machine, watchers of everything
(each a server-sent event stream, as a dashboard has), clients that submit jobs, and one that asks for the list of
jobs again and again. Jobs are real too; they wait as if for a GPU, so that the cluster and its clients are what
is measured. Writes docs/results/load.md with `--write`.
"""

import argparse
import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "live_paced.py"
ARGS = ["2.0", str(ROOT / "examples" / "digits.py")]
AT_ONCE = 8  # submissions
EVERY_SECONDS = 0.1  # between two lists
CALM_SECONDS = 20.0  # of lists after the last submission
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0
GOAL_MS = 100.0


@dataclass
class Found:
    """What was measured, in milliseconds unless it says otherwise."""

    submitted: list[float] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)  # phase or error -> submissions
    lists: list[float] = field(default_factory=list)  # while jobs are submitted
    calm_lists: list[float] = field(default_factory=list)  # afterwards
    rounds: dict[int, float] = field(default_factory=dict)  # number -> of the controller's round
    errors: list[str] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)  # events per watcher
    behind: int = 0  # watchers that did not have the newest job in the end
    submit_s: float = 0.0
    total: int = 0


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


async def watch(http: httpx.AsyncClient, found: Found, newest: asyncio.Future[str], ends: asyncio.Event) -> None:
    """One dashboard. Counts events; reads what the controller says of its rounds; ends when it has the newest job."""
    count, text = 0, ""
    try:
        async with http.stream("GET", "/api/v1/events", timeout=httpx.Timeout(30.0)) as stream:
            async for piece in stream.aiter_text():
                count += piece.count("\nevent: ")
                for rounds, took in re.findall(r'"rounds":(\d+),"round_ms":([0-9.e-]+)', piece):
                    found.rounds[int(rounds)] = float(took)
                text = text[-200_000:] + piece
                if newest.done() and f'"id":"{newest.result()}"' in text:
                    break
                if ends.is_set():
                    found.behind += 1
                    break
    except httpx.HTTPError as error:
        found.errors.append(f"a watcher: {type(error).__name__}")
    found.heard.append(count)


async def submit(http: httpx.AsyncClient, found: Found, count: int) -> str:
    """The id of one of the last."""
    numbers = iter(range(count))
    last = ""

    async def one_by_one() -> None:
        nonlocal last
        for number in numbers:
            body = {"script": str(SCRIPT), "args": ARGS, "name": f"load-{number}", "virtual": 4, "steps": 200}
            began = time.perf_counter()
            try:
                answer = await http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": f"load-{number}"})
                said = str(answer.json().get("phase") or answer.json()["error"]["code"])
                if answer.status_code >= 400:
                    found.errors.append(f"submit: {answer.status_code} {said}")
                else:
                    last = answer.json()["id"]
            except httpx.HTTPError as error:
                said = type(error).__name__
                found.errors.append(f"submit: {said}")
            found.submitted.append((time.perf_counter() - began) * 1000)
            found.answers[said] = found.answers.get(said, 0) + 1

    began = time.perf_counter()
    await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))
    found.submit_s = time.perf_counter() - began
    return last


async def list_jobs(http: httpx.AsyncClient, found: Found, into: list[float], ends: asyncio.Event) -> None:
    """Page after page, as somebody does who scrolls through them."""
    after = None
    while not ends.is_set():
        began = time.perf_counter()
        try:
            answer = await http.get("/api/v1/jobs", params={"limit": 50, **({"after": after} if after else {})})
            into.append((time.perf_counter() - began) * 1000)
            answer.raise_for_status()
            after, found.total = answer.json()["next"], answer.json()["total"]
        except httpx.HTTPError as error:
            found.errors.append(f"list: {type(error).__name__}")
        await asyncio.sleep(EVERY_SECONDS)


async def measure_one(http: httpx.AsyncClient) -> None:
    """The first of its kind, which the controller measures before it can say anything about the others."""
    body = {"script": str(SCRIPT), "args": ARGS, "name": "first", "virtual": 4, "steps": 200}
    job = (await http.post("/api/v1/jobs", json=body)).json()
    ends = time.monotonic() + START_SECONDS
    while job["profiling"] or job["phase"] == "submitted":
        if time.monotonic() > ends:
            raise SystemExit(f"the first job was not taken within {START_SECONDS:.0f} s: {job['reason']}")
        await asyncio.sleep(0.5)
        job = (await http.get(f"/api/v1/jobs/{job['id']}")).json()


async def drive(url: str, count: int, watchers: int) -> Found:
    found, ends = Found(), asyncio.Event()
    newest: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False) as http:
        await measure_one(http)
        watching = [asyncio.create_task(watch(http, found, newest, ends)) for _ in range(watchers)]
        await asyncio.sleep(1.0)
        for into, work in ((found.lists, True), (found.calm_lists, False)):
            over = asyncio.Event()
            listing = asyncio.create_task(list_jobs(http, found, into, over))
            if work:
                last = await submit(http, found, count)
            else:
                await asyncio.sleep(CALM_SECONDS)
            over.set()
            await listing
        newest.set_result(last)
        # One more change of the newest job, so that every watcher hears of it.
        await http.delete(f"/api/v1/jobs/{last}")
        asyncio.get_running_loop().call_later(10.0, ends.set)
        await asyncio.gather(*watching)
    return found


def start(state: Path) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-c", "from concertina.cli import main; main()", "up", "--port", "0", "--slots", "4"]
    log = (state / "up.log").open("wb")
    process = subprocess.Popen([*command, "--state", str(state)], stdout=log, stderr=log, start_new_session=True)
    log.close()
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        place = state / "server.json"
        if place.exists():
            return process, str(json.loads(place.read_text())["url"])
        time.sleep(0.1)
    process.kill()
    raise SystemExit((state / "up.log").read_text())


def stop(process: subprocess.Popen[bytes], url: str) -> None:
    """Takes the jobs down too."""
    try:
        httpx.post(f"{url}/api/v1/cluster/down", json={}, timeout=30.0, trust_env=False)
        process.wait(60)
    except (httpx.HTTPError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(30)


def table(found: Found, count: int, watchers: int) -> str:
    rounds = list(found.rounds.values())

    def row(name: str, values: Sequence[float], goal: str = "") -> str:
        figures = " | ".join(
            f"{value:.0f}" for value in (*(quantile(values, p) for p in (0.5, 0.95, 0.99)), max(values))
        )
        return f"| {name} | {len(values)} | {figures} | {goal} |"

    lines = [
        "| milliseconds | number | p50 | p95 | p99 | max | goal |",
        "|---|---|---|---|---|---|---|",
        row("`GET /jobs` (50 of them), while jobs are submitted", found.lists, "p99 < 100"),
        row(f"`GET /jobs`, with {found.total} jobs", found.calm_lists, "p99 < 100"),
        row("`POST /jobs`, with its answer", found.submitted),
        row("controller's round", rounds or [math.nan], "< 100"),
        "",
        f"{count} submissions by {AT_ONCE} clients in {found.submit_s:.0f} s ({count / found.submit_s:.0f} a second): "
        + ", ".join(f"{number} {said}" for said, number in sorted(found.answers.items()))
        + f". Errors: {len(found.errors)}. {watchers} watchers heard {min(found.heard)} to {max(found.heard)} events "
        f"each; {found.behind} of them did not have the newest change ten seconds after it.",
    ]
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("submissions", nargs="?", type=int, default=2000)
    parser.add_argument("watchers", nargs="?", type=int, default=50)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(given)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder))
        try:
            found = asyncio.run(drive(url, asked.submissions, asked.watchers))
        finally:
            stop(process, url)
    shown = table(found, asked.submissions, asked.watchers)
    print(shown)
    print(f"\nLoad of the machine before it began: {load:.1f} on {os.cpu_count()} cores.")
    for error in sorted(set(found.errors)):
        print(f"{found.errors.count(error)} x {error}")
    return 1 if found.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
