"""The interface and the controller under load: `python -m benchmarks.load [SUBMISSIONS [WATCHERS]]`.

Starts a real cluster (`concertina up`, SQLite, four slots) and, beside it on the same machine, watchers of everything
(each a server-sent event stream, as a dashboard has), clients that submit jobs, and one that asks for the list of
jobs again and again. Jobs are real too; they wait as if for a GPU, so that the cluster and its clients are what
is measured. The figures are kept in docs/results/load.md.
"""

import argparse
import asyncio
import http.client
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "live_paced.py"
ARGS = ["2.0", str(ROOT / "examples" / "digits.py")]
AT_ONCE = 8  # submissions
EVERY_SECONDS = 0.1  # between two lists
CALM_SECONDS = 20.0  # of lists after the last submission
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0


@dataclass
class Found:
    """What was measured, in milliseconds unless it says otherwise."""

    submitted: list[float] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)  # phase or error -> submissions
    lists: list[float] = field(default_factory=list)  # while jobs are submitted
    calm_lists: list[float] = field(default_factory=list)  # afterwards
    floor: list[float] = field(default_factory=list)  # an answer that costs nothing, beside each of the lists
    calm_floor: list[float] = field(default_factory=list)
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


async def watch(web: httpx.AsyncClient, found: Found, newest: asyncio.Future[str], ends: asyncio.Event) -> None:
    """One dashboard. Counts events; reads what the controller says of its rounds; ends when it has the newest job."""
    count, text = 0, ""
    try:
        async with web.stream("GET", "/api/v1/events", timeout=httpx.Timeout(30.0)) as stream:
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


async def submit(web: httpx.AsyncClient, found: Found, count: int) -> str:
    """The id of one of the last."""
    numbers = iter(range(count))
    last = ""

    async def one_by_one() -> None:
        nonlocal last
        for number in numbers:
            body = {"script": str(SCRIPT), "args": ARGS, "name": f"load-{number}", "virtual": 4, "steps": 200}
            began = time.perf_counter()
            try:
                answer = await web.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": f"load-{number}"})
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


def list_jobs(url: str) -> None:
    """Page after page, as somebody does who scrolls through them, until the input ends; in a process of its own, so
    that no other client is in the way. Beside each an answer that costs nothing: what the machine gives just then."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_SECONDS)
    after, total, out = None, 0, []

    def ask(path: str) -> tuple[float, bytes, int]:
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        return (time.perf_counter() - began) * 1000, body, answer.status

    while not select.select([sys.stdin], [], [], EVERY_SECONDS)[0]:
        floor, _, _ = ask("/healthz")
        took, body, status = ask("/api/v1/jobs?limit=50" + (f"&after={after}" if after else ""))
        out.append((time.time(), took, floor, status))
        if status == 200:
            page = json.loads(body)
            after, total = page["next"], page["total"]
    connection.close()
    print(json.dumps({"rows": out, "total": total}))


def take_lists(found: Found, listed: dict[str, Any], submitted_until: float) -> None:
    found.total = listed["total"]
    for at, took, floor, status in listed["rows"]:
        (found.lists if at < submitted_until else found.calm_lists).append(took)
        (found.floor if at < submitted_until else found.calm_floor).append(floor)
        if status != 200:
            found.errors.append(f"list: {status}")


async def measure_one(web: httpx.AsyncClient) -> None:
    """The first of its kind, which the controller measures before it can say anything about the others."""
    body = {"script": str(SCRIPT), "args": ARGS, "name": "first", "virtual": 4, "steps": 200}
    job = (await web.post("/api/v1/jobs", json=body)).json()
    ends = time.monotonic() + START_SECONDS
    while job["profiling"] or job["phase"] == "submitted":
        if time.monotonic() > ends:
            raise SystemExit(f"the first job was not taken within {START_SECONDS:.0f} s: {job['reason']}")
        await asyncio.sleep(0.5)
        job = (await web.get(f"/api/v1/jobs/{job['id']}")).json()


async def drive(url: str, count: int, watchers: int) -> Found:
    found, ends = Found(), asyncio.Event()
    newest: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False) as web:
        await measure_one(web)
        watching = [asyncio.create_task(watch(web, found, newest, ends)) for _ in range(watchers)]
        await asyncio.sleep(1.0)
        command = [sys.executable, "-m", "benchmarks.load", "--list", url]
        listing = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            await asyncio.sleep(2.0)
            last, until = await submit(web, found, count), time.time()
            await asyncio.sleep(CALM_SECONDS)
            answer, _ = await asyncio.to_thread(listing.communicate, b"end\n", ANSWER_SECONDS)
        finally:
            listing.kill()
        take_lists(found, json.loads(answer), until)
        newest.set_result(last)
        # One more change of the newest job, so that every watcher hears of it.
        await web.delete(f"/api/v1/jobs/{last}")
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
        row("`GET /healthz` at the same moments: what the machine gives", found.floor),
        row(f"`GET /jobs`, with {found.total} jobs and nobody who submits", found.calm_lists, "p99 < 100"),
        row("`GET /healthz` at the same moments", found.calm_floor),
        row("`POST /jobs`, with its answer", found.submitted),
        row("controller's round", rounds or [math.nan], "< 100"),
        "",
        f"{count} submissions by {AT_ONCE} clients in {found.submit_s:.0f} s ({count / found.submit_s:.0f} a second): "
        + ", ".join(f"{number} {said}" for said, number in sorted(found.answers.items()))
        + f". Errors: {len(found.errors)}. {watchers} watchers heard {min(found.heard)} to {max(found.heard)} events "
        f"each; {found.behind} of them did not have the newest change ten seconds after it.",
    ]
    return "\n".join(lines)


def cpu_per_request(jobs: int) -> str:
    """Processor time of the server alone, which does not depend on who else uses the machine. No controller."""
    from tests.integration.rest_server import interface

    from concertina.cluster import keys
    from concertina.cluster.codec import dump
    from concertina.cluster.records import JobRequest, JobState
    from concertina.core.job import JobPhase

    lines = ["| request | ms of processor time |", "|---|---|"]
    with tempfile.TemporaryDirectory() as folder, interface(Path(folder)) as it:
        for i in range(jobs):
            request = JobRequest(id=f"j{i}", name=f"j{i}", user="u", script="/train.py", submitted_s=float(i))
            it.store.put(keys.REQUESTS + request.id, dump(request))
            state = JobState(id=request.id, phase=JobPhase.WAITING, reason="it waits for devices that others hold")
            it.store.put(keys.STATES + request.id, dump(state))
        it.mirror.wait_until(lambda: it.mirror.revision >= 2 * jobs, START_SECONDS)
        for path in (
            "/healthz",
            "/api/v1/jobs",
            "/api/v1/jobs?limit=500",
            "/api/v1/jobs/j5",
            "/api/v1/cluster",
            "/metrics",
        ):
            it.http.get(path)
            code = f"import http.client as h;c=h.HTTPConnection({it.url[7:]!r})\nfor _ in range(200):\n "
            code += f"c.request('GET',{path!r});c.getresponse().read()"
            began = time.process_time()
            subprocess.run([sys.executable, "-S", "-c", code], check=True)
            lines.append(f"| `GET {path}` | {(time.process_time() - began) * 1000 / 200:.2f} |")
    return "\n".join(lines)


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("submissions", nargs="?", type=int, default=2000)
    parser.add_argument("watchers", nargs="?", type=int, default=50)
    parser.add_argument("--list", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help="processor time per request, and nothing else")
    asked = parser.parse_args(given)
    if asked.cpu:
        print(cpu_per_request(asked.submissions))
        return 0
    if asked.list:
        list_jobs(asked.list)
        return 0
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
