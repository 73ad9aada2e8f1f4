"""The REST interface as clients meet it: a real server on a loopback port, real sockets, a store in memory."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rest_server import LIMIT_SECONDS, Interface, Stub, interface

from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.records import Activity, Change, JobRequest, JobSeen, JobState, Op, Spent
from concertina.core.job import JobPhase
from concertina.store.lease import leader_key
from concertina.store.memory import MemoryStore
from concertina.store.sqlite import SqliteStore


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('a training script')\n")
    return path


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Interface]:
    """Without any controller."""
    with interface(tmp_path / "state") as found:
        yield found


@pytest.fixture
def led(tmp_path: Path) -> Iterator[tuple[Interface, Stub]]:
    store = MemoryStore()
    with interface(tmp_path / "state", store) as found, Stub(store) as stub:
        assert found.mirror.wait_until(lambda: found.mirror.cluster is not None, LIMIT_SECONDS)
        yield found, stub


def events(lines: Iterator[str]) -> Iterator[tuple[str, int | None, Any]]:
    """(name, id, data) of each event of a stream."""
    seen: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            seen[name] = value
        elif not line and "event" in seen:
            yield seen["event"], int(seen["id"]) if "id" in seen else None, json.loads(seen["data"])
            seen = {}


# -- submitting ------------------------------------------------------------------------------------------------------


def test_a_job_can_be_submitted_listed_and_described_without_a_controller(alone: Interface, script: Path) -> None:
    answer = alone.http.post("/api/v1/jobs", json={"script": str(script), "name": "My.Run", "steps": 7})
    assert answer.status_code == 202, "written down, nobody has answered"
    job = answer.json()
    assert job["phase"] == "submitted"
    assert job["name"] == "My.Run"
    assert job["id"].startswith("my-run-")
    assert job["cwd"] == str(script.parent)
    listed = alone.http.get("/api/v1/jobs").json()
    assert (listed["total"], listed["next"], listed["items"][0]["id"]) == (1, None, job["id"])
    assert alone.http.get(f"/api/v1/jobs/{job['id']}").json() == job


def test_without_a_controller_nothing_can_be_changed_and_nothing_is_left_to_be_done(
    alone: Interface, script: Path
) -> None:
    job = alone.submit(script)
    before = alone.store.list_prefix("").revision
    asked = [
        alone.http.delete(f"/api/v1/jobs/{job['id']}"),
        alone.http.post(f"/api/v1/jobs/{job['id']}/resize", json={"workers": 1}),
        alone.http.post("/api/v1/cluster/reclaim", json={"slots": 1}),
        alone.http.post("/api/v1/cluster/down", json={}),
    ]
    assert [(a.status_code, a.json()["error"]["code"]) for a in asked] == [(503, "no_controller")] * 4
    assert alone.store.list_prefix("").revision == before


def test_a_controller_that_says_nothing_leaves_no_ask_behind(tmp_path: Path, script: Path) -> None:
    with interface(tmp_path, answer_s=0.3) as it:
        job = it.submit(script)
        revision = it.store.put(leader_key(keys.CONTROLLER), b"deaf")
        assert it.mirror.wait_until(lambda: it.mirror.revision >= revision, LIMIT_SECONDS)
        answer = it.http.delete(f"/api/v1/jobs/{job['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_answer"), "it may be busy with it"
        assert it.store.list_prefix(keys.ASKS).entries == ()


def test_an_answer_is_taken_or_refused_with_the_earliest_deadline(led: tuple[Interface, Stub], script: Path) -> None:
    it, _ = led
    taken = it.http.post("/api/v1/jobs", json={"script": str(script)})
    assert (taken.status_code, taken.json()["phase"]) == (201, "waiting")
    refused = it.http.post(
        "/api/v1/jobs", json={"script": str(script), "name": "refuse", "deadline": "2030-01-01T00:00:00+00:00"}
    )
    assert refused.status_code == 201, "a refusal is an answer, not an error"
    assert refused.json()["phase"] == "rejected"
    assert refused.json()["reason"] == "too late: 4 slots are not enough"
    assert refused.json()["earliest_s"] > time.time()
    assert refused.json()["deadline_s"] == 1893456000.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can not be read"),
        ("def broken(:\n", "no Python"),
        ("x = 1\0", "can not be compiled"),
    ],
)
def test_a_script_that_could_not_run_is_refused_at_once(
    alone: Interface, tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "odd.py"
    if text is not None:
        path.write_text(text)
    answer = alone.http.post("/api/v1/jobs", json={"script": str(path)})
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"] or "no Python" in answer.json()["error"]["message"]
    assert alone.store.list_prefix(keys.REQUESTS).entries == ()


def test_an_idempotency_key_gives_the_same_job_however_often_it_is_sent(
    led: tuple[Interface, Stub], script: Path
) -> None:
    it, _ = led
    send = {"json": {"script": str(script)}, "headers": {"Idempotency-Key": "abc-1"}}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: it.http.post("/api/v1/jobs", **send), range(8)))  # type: ignore[arg-type]
    assert {answer.status_code for answer in found} <= {201, 202}
    assert len({answer.json()["id"] for answer in found}) == 1
    assert it.http.get("/api/v1/jobs").json()["total"] == 1
    other = it.http.post("/api/v1/jobs", json={"script": str(script), "steps": 9}, headers={"Idempotency-Key": "abc-1"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "key_reused")


def test_a_submission_that_broke_off_half_way_is_finished_by_the_next(alone: Interface, script: Path) -> None:
    """The key was noted, and then the server died before it wrote the job."""
    send: dict[str, Any] = {"json": {"script": str(script)}, "headers": {"Idempotency-Key": "k"}}
    job_id = alone.http.post("/api/v1/jobs", **send).json()["id"]
    alone.store.delete(keys.REQUESTS + job_id)
    assert alone.mirror.wait_until(lambda: alone.mirror.job(job_id) is None, LIMIT_SECONDS)
    assert alone.http.post("/api/v1/jobs", **send).json()["id"] == job_id
    assert alone.store.get(keys.REQUESTS + job_id) is not None


# -- lists -----------------------------------------------------------------------------------------------------------


def put_jobs(it: Interface, count: int) -> list[str]:
    for i in range(count):
        it.put(keys.REQUESTS + f"j{i}", JobRequest(id=f"j{i}", name="n", user=f"u{i % 2}", script="/s", submitted_s=i))
        if i % 2:
            it.put(keys.STATES + f"j{i}", JobState(id=f"j{i}", phase=JobPhase.RUNNING))
    return [f"j{i}" for i in range(count)]


def pages(it: Interface, **params: Any) -> list[list[str]]:
    found, after = [], None
    while True:
        page = it.http.get("/api/v1/jobs", params={**params, **({"after": after} if after else {})}).json()
        found.append([job["id"] for job in page["items"]])
        after = page["next"]
        if after is None:
            return found


def test_pages_show_every_job_once_in_either_order_and_by_phase_and_user(alone: Interface) -> None:
    ids = put_jobs(alone, 7)
    assert pages(alone, limit=3, order="oldest") == [ids[:3], ids[3:6], ids[6:]]
    assert pages(alone, limit=3) == [["j6", "j5", "j4"], ["j3", "j2", "j1"], ["j0"]]
    assert pages(alone, phase="running", limit=2, order="oldest") == [["j1", "j3"], ["j5"]]
    assert pages(alone, phase=["running", "submitted"], user="u0", order="oldest") == [["j0", "j2", "j4", "j6"]]
    assert pages(alone, limit=7) == [ids[::-1]], "a page that fits exactly has no successor"
    assert alone.http.get("/api/v1/jobs", params={"after": "nobody"}).status_code == 404


def test_what_a_keeper_sees_is_in_the_job(alone: Interface) -> None:
    request = JobRequest(id="a", name="a", user="u", script="/s", virtual=4, steps=100, deadline_s=5000.0)
    state = JobState(id="a", phase=JobPhase.RUNNING, slots=("n/0", "n/1"), promised_s=4000.0)
    seen = JobSeen(
        id="a", attempt=1, activity=Activity.TRAINING, workers=2, step=50, speeds={1: 1.0, 2: 2.0}, at_s=1000.0,
        values={"loss": float("nan")}, slots=("n/0", "n/1"),
    )  # fmt: skip
    alone.put(keys.REQUESTS + "a", request)
    alone.put(keys.STATES + "a", state)
    alone.put(keys.SEEN + "a", seen)
    job = alone.http.get("/api/v1/jobs/a").json()
    assert (job["progress"], job["steps_per_s"], job["eta_s"], job["slack_s"]) == (0.5, 2.0, 1025.0, 2975.0)
    assert (job["workers"], job["values"]) == (2, {"loss": None})


# -- asking for something ------------------------------------------------------------------------------------------


def test_cancel_resize_drain_reclaim_and_down_reach_the_controller(led: tuple[Interface, Stub], script: Path) -> None:
    it, stub = led
    job = it.submit(script, virtual=4)
    assert it.http.post(f"/api/v1/jobs/{job['id']}/resize", json={"workers": 2}).json()["pinned"] == 2
    too_many = it.http.post(f"/api/v1/jobs/{job['id']}/resize", json={"workers": 5})
    assert (too_many.status_code, too_many.json()["error"]["code"]) == (409, "out_of_range")
    assert it.http.delete(f"/api/v1/jobs/{job['id']}").json()["phase"] == "cancelled"
    assert it.http.delete(f"/api/v1/jobs/{job['id']}").status_code == 200, "cancelling twice is no error"
    assert it.http.post("/api/v1/nodes/here/drain", json={}).json() == {"accepted": True, "reason": "done"}
    assert it.http.post("/api/v1/nodes/here/drain", json={"undrain": True}).status_code == 200
    assert it.http.post("/api/v1/nodes/nowhere/drain", json={}).status_code == 404
    assert it.http.post("/api/v1/cluster/reclaim", json={"slots": 2}).status_code == 200
    refused = it.http.post("/api/v1/cluster/reclaim", json={"slots": 9})
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "there are 4 slots")
    assert it.http.post("/api/v1/cluster/reclaim", json={"return": True}).status_code == 200
    nothing = it.http.post("/api/v1/cluster/prune", json={"older_s": 86_400}).json()
    assert nothing == {"accepted": True, "reason": "nothing was removed", "jobs": []}
    assert it.http.post("/api/v1/cluster/prune", json={"older_s": 3600}).status_code == 422
    assert it.http.post("/api/v1/cluster/down", json={}).status_code == 200
    ops = [Op.RESIZE, Op.CANCEL, Op.DRAIN, Op.UNDRAIN, Op.RECLAIM, Op.RECLAIM, Op.RETURN, Op.DOWN]
    assert [ask.op for ask in stub.asks] == ops
    assert stub.asks[0].number == 2
    assert it.store.list_prefix(keys.ASKS).entries == ()


def test_old_jobs_are_named_before_they_are_forgotten(led: tuple[Interface, Stub], script: Path) -> None:
    it, stub = led
    job = it.submit(script)
    long_ago = JobState(id=job["id"], phase=JobPhase.FINISHED, ended_s=time.time() - 3 * 86_400)
    revision = it.store.put(keys.STATES + job["id"], dump(long_ago))
    assert it.mirror.wait_until(lambda: it.mirror.revision >= revision, 10.0)
    dry = it.http.post("/api/v1/cluster/prune", json={"older_s": 86_400, "dry_run": True}).json()
    assert (dry["jobs"], stub.asks) == ([job["id"]], [])
    done = it.http.post("/api/v1/cluster/prune", json={"older_s": 86_400}).json()
    assert (done["jobs"], [(ask.op, ask.number) for ask in stub.asks]) == ([job["id"]], [(Op.PRUNE, 86_400)])


def test_a_job_that_has_ended_can_not_be_changed(led: tuple[Interface, Stub], script: Path) -> None:
    it, stub = led
    job = it.submit(script, name="refuse")
    answers = [
        it.http.delete(f"/api/v1/jobs/{job['id']}"),
        it.http.post(f"/api/v1/jobs/{job['id']}/resize", json={"workers": 1}),
    ]
    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(409, "ended")] * 2
    assert stub.asks == []


# -- events ----------------------------------------------------------------------------------------------------------


def test_a_watcher_hears_of_a_job_and_one_that_was_away_gets_what_it_missed_once(
    alone: Interface, script: Path
) -> None:
    with alone.http.stream("GET", "/api/v1/events") as stream:
        heard = events(stream.iter_lines())
        assert next(heard)[0] == "hello"
        first = alone.submit(script)
        kind, seen, job = next(heard)
        assert (kind, job) == ("job", {**first, "history": []})
    ids = {alone.submit(script)["id"] for _ in range(3)}
    for _ in range(4):  # four changes of one job are one event for whoever was away
        alone.put(keys.STATES + first["id"], JobState(id=first["id"], phase=JobPhase.WAITING))
    assert seen is not None
    with alone.http.stream("GET", "/api/v1/events", headers={"Last-Event-ID": str(seen)}) as stream:
        missed = take_until_cluster(events(stream.iter_lines()))
    jobs = [data["id"] for kind, _, data in missed if kind == "job"]
    assert sorted(jobs) == sorted([*ids, first["id"]])
    assert jobs[-1] == first["id"], "in the order of their last change"
    assert all(revision > seen for kind, revision, _ in missed if kind == "job" and revision)


def take_until_cluster(heard: Iterator[tuple[str, int | None, Any]]) -> list[tuple[str, int | None, Any]]:
    found = []
    for event in heard:
        found.append(event)
        if event[0] in ("cluster", "reset"):
            break
    return found


def test_a_watcher_goes_on_with_a_server_that_was_started_anew(tmp_path: Path, script: Path) -> None:
    path = tmp_path / "cluster.db"
    with interface(tmp_path, SqliteStore.open(path)) as before:
        with before.http.stream("GET", "/api/v1/events") as stream:
            assert next(events(stream.iter_lines()))[0] == "hello"
        seen = before.mirror.revision
        job = before.submit(script)
    with (
        interface(tmp_path, SqliteStore.open(path)) as after,
        after.http.stream("GET", "/api/v1/events", headers={"Last-Event-ID": str(seen)}) as stream,
    ):
        missed = take_until_cluster(events(stream.iter_lines()))
    assert [(kind, data.get("id")) for kind, _, data in missed if kind == "job"] == [("job", job["id"])]


@pytest.mark.parametrize("seen", [1, 10**12])
def test_a_watcher_whose_past_is_gone_is_told_to_load_again(tmp_path: Path, seen: int) -> None:
    store = MemoryStore(keep_changes=4)
    for i in range(20):
        store.put(keys.CURVES + f"{i}", b'{"key":"x","speeds":{}}')
    with (
        interface(tmp_path, store) as it,
        it.http.stream("GET", "/api/v1/events", params={"after": seen}) as stream,
    ):
        kind, at, _ = take_until_cluster(events(stream.iter_lines()))[-1]
    assert (kind, at) == ("reset", 20)


def test_a_client_that_reads_nothing_misses_nothing_and_holds_nobody_up(alone: Interface) -> None:
    put_jobs(alone, 1)
    with alone.http.stream("GET", "/api/v1/events") as stream:
        heard = events(stream.iter_lines())
        assert next(heard)[0] == "hello"
        for step in range(1, 3001):
            alone.store.put(keys.SEEN + "j0", json.dumps({"id": "j0", "attempt": 1, "step": step}).encode())
        assert alone.mirror.wait_until(lambda: alone.mirror.revision >= 3001, LIMIT_SECONDS)
        assert alone.http.get("/api/v1/jobs/j0").json()["step"] == 3000
        steps = [0]
        while steps[-1] < 3000:
            kind, _, data = next(heard)
            steps += [data["step"]] if kind == "job" else []
    assert steps == sorted(steps)


def test_the_server_ends_at_once_though_somebody_watches(tmp_path: Path) -> None:
    with interface(tmp_path) as it:
        client = httpx.Client(base_url=it.url, trust_env=False, timeout=LIMIT_SECONDS)
        stream = client.send(client.build_request("GET", "/api/v1/events"), stream=True)
        heard = events(stream.iter_lines())
        assert next(heard)[0] == "hello"
    assert list(heard) == [], "it came to a proper end"
    stream.close()
    client.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("interface", "concertina-"))]


# -- a job's own files -----------------------------------------------------------------------------------------------


def write_events(it: Interface, job_id: str, lines: list[dict[str, Any]]) -> Path:
    path = it.state / "jobs" / job_id / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_a_jobs_stream_has_its_lines_and_states_and_ends_with_the_job(alone: Interface) -> None:
    put_jobs(alone, 2)
    path = write_events(alone, "j1", [{"event": "step", "step": n, "time": 1.0} for n in (1, 2)])
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # not whole yet
    with alone.http.stream("GET", "/api/v1/jobs/j1/events") as stream:
        heard = events(stream.iter_lines())
        found = [next(heard) for _ in range(3)]
        assert [(kind, data.get("phase") or data.get("step")) for kind, _, data in found] == [
            ("state", "running"),
            ("line", 1),
            ("line", 2),
        ]
        with path.open("a") as file:
            file.write('ep": 3}\n')
        alone.put(keys.STATES + "j1", JobState(id="j1", phase=JobPhase.FINISHED, reason="all steps made"))
        rest = list(heard)
    assert [data["step"] for kind, _, data in rest if kind == "line"] == [3]
    assert rest[-1] == ("end", None, {"phase": "finished", "reason": "all steps made"})
    resumed = alone.http.get("/api/v1/jobs/j1/events", headers={"Last-Event-ID": str(found[1][1])})
    lines = [data["step"] for kind, _, data in events(iter(resumed.text.split("\n"))) if kind == "line"]
    assert lines == [2, 3]


def test_a_jobs_events_can_be_read_page_by_page(alone: Interface) -> None:
    put_jobs(alone, 1)
    write_events(alone, "j0", [{"event": "step", "step": n, "log": {"loss": float("nan")}} for n in range(5)])
    first = alone.http.get("/api/v1/jobs/j0/events", params={"follow": 0, "limit": 3}).json()
    assert [event["step"] for event in first["items"]] == [0, 1, 2]
    assert first["items"][0]["log"] == {"loss": None}
    rest = alone.http.get("/api/v1/jobs/j0/events", params={"follow": 0, "after": first["next"]}).json()
    assert [event["step"] for event in rest["items"]] == [3, 4]
    assert rest["ended"] is False


def test_logs_show_the_newest_lines_and_go_on_from_there(alone: Interface) -> None:
    put_jobs(alone, 1)
    empty = alone.http.get("/api/v1/jobs/j0/logs").json()
    assert empty == {"worker": None, "workers": [], "lines": [], "next": 0, "ended": False}
    folder = alone.state / "jobs" / "j0" / "logs"
    folder.mkdir(parents=True)
    (folder / "worker-0.log").write_text("".join(f"line {n}\n" for n in range(10)) + "half a li")
    (folder / "worker-10.log").write_bytes(b"\xff bytes\n")
    (folder / "worker-2.log").write_text("")
    (folder / "secret.txt").write_text("no log")
    page = alone.http.get("/api/v1/jobs/j0/logs", params={"limit": 3}).json()
    assert (page["worker"], page["workers"], page["lines"]) == ("0", ["0", "2", "10"], ["line 7", "line 8", "line 9"])
    with (folder / "worker-0.log").open("a") as file:
        file.write("ne\n")
    more = alone.http.get("/api/v1/jobs/j0/logs", params={"after": page["next"], "worker": "0"}).json()
    assert more["lines"] == ["half a line"]
    assert alone.http.get("/api/v1/jobs/j0/logs", params={"worker": "10"}).json()["lines"] == ["\ufffd bytes"]
    assert alone.http.get("/api/v1/jobs/j0/logs", params={"worker": "7"}).status_code == 404


def test_charts_have_few_points_for_many_steps_and_follow_the_generations(alone: Interface) -> None:
    put_jobs(alone, 1)
    started = {"event": "generation_started", "generation": 0, "workers": 2, "members": [0], "step": 0, "reason": "r"}
    said = [
        {"event": "master_started", "time": 99.0, "at": 0.0, "worker": -1},
        {"time": 100.0, **started},
        {"event": "worker_started", "time": 103.0, "at": 4.0, "worker": 0},
        {"event": "joined", "time": 105.0, "at": 6.0, "worker": 0},
    ]
    write_events(alone, "j0", said)
    steps = [
        {"event": "step", "time": 110 + n / 10, "at": 11 + n / 10, "worker": 0, "step": n, "log": {"loss": 1 / n}}
        for n in range(1, 5001)
    ]
    write_events(alone, "j0", steps)
    chart = alone.http.get("/api/v1/jobs/j0/metrics").json()
    assert 500 <= len(chart["points"]) <= 1000
    last = chart["points"][-1]
    assert (last["workers"], round(last["steps_per_s"])) == (2, 10)
    assert last["values"]["loss"] == pytest.approx(1 / last["step"])
    assert [(g["generation"], g["workers"], g["at_s"]) for g in chart["generations"]] == [(0, 2, 100.0)]
    assert chart["generations"][0]["phases"] == {"start": 3.0, "import": 2.0}
    assert chart["complete"]


# -- the cluster -----------------------------------------------------------------------------------------------------


def test_the_cluster_shows_slots_by_job_and_over_time(led: tuple[Interface, Stub]) -> None:
    it, _ = led
    now = time.time()
    story = (Change(at_s=now - 60, workers=1, reason="start"), Change(at_s=now - 30, workers=2, reason="grow"))
    it.put(keys.REQUESTS + "a", JobRequest(id="a", name="a", user="u", script="/s"))
    it.put(keys.STATES + "a", JobState(id="a", phase=JobPhase.RUNNING, slots=("here/0",), history=story))
    it.put(keys.SEEN + "a", JobSeen(id="a", attempt=1, slots=("here/0", "here/1")))
    cluster = it.http.get("/api/v1/cluster").json()
    assert cluster["slots"] == {"total": 4, "free": 2, "busy": 2, "lent": 0, "away": 0}
    assert [(s["state"], s["job"]) for s in cluster["placement"]][:3] == [
        ("busy", "a"),
        ("leaving", "a"),
        ("free", None),
    ]
    assert it.http.get("/api/v1/nodes").json()["items"][0]["busy"] == 2
    history = it.http.get("/api/v1/cluster/history", params={"seconds": 45}).json()
    (series,) = history["series"]
    assert [workers for _, workers in series["points"]] == [1, 2]
    assert series["points"][0][0] == history["from_s"]


def test_health_says_whether_somebody_decides(alone: Interface) -> None:
    assert (alone.http.get("/healthz").status_code, alone.http.get("/healthz").json()["leader"]) == (503, False)
    revision = alone.store.put(leader_key(keys.CONTROLLER), b"x")
    assert alone.mirror.wait_until(lambda: alone.mirror.revision >= revision, LIMIT_SECONDS)
    assert (alone.http.get("/healthz").status_code, alone.http.get("/healthz").json()["ok"]) == (200, True)


def test_prometheus_can_read_the_metrics(led: tuple[Interface, Stub], script: Path) -> None:
    it, _ = led
    it.submit(script)
    text = it.http.get("/metrics").text
    found = {
        s.name: s
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.labels.get("phase")
    }
    waiting = [s for f in text_string_to_metric_families(text) for s in f.samples if s.labels.get("phase") == "waiting"]
    assert waiting[0].value == 1
    assert found["concertina_controller_leader"].value == 1
    assert "concertina_http_requests_total" in found


def test_slot_seconds_count_on_when_jobs_are_forgotten(alone: Interface, script: Path) -> None:
    def counted() -> float:
        families = text_string_to_metric_families(alone.http.get("/metrics").text)
        return next(s.value for f in families for s in f.samples if s.name == "concertina_slot_seconds_total")

    job = alone.submit(script)["id"]
    alone.put(keys.STATES + job, JobState(id=job, phase=JobPhase.FINISHED, service_s=7.0))
    assert counted() == 7.0
    alone.put(keys.SPENT + "u", Spent(user="u", service_s=7.0, jobs=(job,)))
    assert counted() == 7.0, "in the middle of forgetting it"
    alone.store.delete(keys.REQUESTS + job)
    assert alone.mirror.wait_until(lambda: alone.mirror.job(job) is None, LIMIT_SECONDS)
    assert counted() == 7.0


def test_requests_are_noted_as_json_lines_without_what_is_secret(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with interface(tmp_path, access_log=log) as it:
        it.http.get("/api/v1/jobs", params={"user": "x"}, headers={"Authorization": "Bearer secret"})
        it.http.get("/healthz")
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]  # the first is that of `interface` itself
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/api/v1/jobs", 401),
        ("GET", "/healthz", 503),
    ]
    assert "secret" not in log.read_text()


def test_the_page_and_its_charts_come_from_here(alone: Interface) -> None:
    page = alone.http.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    plotly = alone.http.get("/static/plotly.min.js")
    assert plotly.status_code == 200
    again = alone.http.get("/static/plotly.min.js", headers={"If-None-Match": plotly.headers["etag"]})
    assert again.status_code == 304


def test_the_openapi_names_every_way_out(alone: Interface) -> None:
    paths = alone.http.get("/api/v1/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert "401" in operation["responses"] or path == "/healthz", (method, path)
            for status, answer in operation["responses"].items():
                if status.startswith("4"):
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (method, path, status)


def test_a_record_that_is_in_the_store_is_what_was_asked(alone: Interface, script: Path) -> None:
    job = alone.submit(script, args=["--lr", "0.1"], virtual=8, min_workers=2, max_workers=6, soft=True, deadline_s=2e9)
    entry = alone.store.get(keys.REQUESTS + job["id"])
    assert entry is not None
    kept = load(JobRequest, entry.value)
    assert (kept.args, kept.virtual, kept.min_workers, kept.max_workers) == (("--lr", "0.1"), 8, 2, 6)
    assert (kept.soft, kept.deadline_s, kept.scaling, kept.level) == (True, 2e9, "consistent", "D1")


def test_the_last_words_of_an_ended_job_are_shown_also_without_an_end_of_line(alone: Interface) -> None:
    put_jobs(alone, 1)
    path = alone.state / "jobs" / "j0" / "logs" / "worker-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("epoch 1\naccuracy 0.98")
    logs = "/api/v1/jobs/j0/logs"
    page = alone.http.get(logs).json()
    assert (page["lines"], page["ended"]) == (["epoch 1"], False), "more of that line may come"
    alone.put(keys.STATES + "j0", JobState(id="j0", phase=JobPhase.FINISHED))
    more = alone.http.get(logs, params={"after": page["next"]}).json()
    assert (more["lines"], more["ended"]) == (["accuracy 0.98"], True)
    last = alone.http.get(logs, params={"after": more["next"]}).json()
    assert (last["lines"], last["ended"]) == ([], True)
    assert alone.http.get(logs).json()["lines"] == ["epoch 1", "accuracy 0.98"]


def test_whoever_follows_a_job_goes_on_when_the_server_is_started_anew(tmp_path: Path, script: Path) -> None:
    store = tmp_path / "cluster.db"
    with interface(tmp_path, SqliteStore.open(store)) as before:
        job, url = before.submit(script)["id"], before.url
        folder = tmp_path / "jobs" / job / "logs"
        folder.mkdir(parents=True)
        (folder / "worker-0.log").write_text("before\n")
        command = [sys.executable, "-m", "concertina", "logs", "-f", job, "--url", url]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "before\n"
    time.sleep(2.0)  # it asks and nobody answers
    with interface(tmp_path, SqliteStore.open(store), port=int(url.rpartition(":")[2])) as after:
        (folder / "worker-0.log").write_text("before\nafter\n")
        after.put(keys.STATES + job, JobState(id=job, phase=JobPhase.FINISHED))
        said, complained = reader.communicate(timeout=LIMIT_SECONDS)
    assert (said, complained, reader.returncode) == ("after\n", "", 0)


def test_an_argument_that_would_command_a_terminal_is_refused(alone: Interface, script: Path) -> None:
    for bad in ("\x1b[2J", "\x9b2J", "two\nlines"):
        answer = alone.http.post("/api/v1/jobs", json={"script": str(script), "args": [bad]})
        assert (answer.status_code, "control characters" in answer.text) == (422, True)


def test_an_argument_with_half_a_character_is_refused(alone: Interface, script: Path) -> None:
    body = f'{{"script": "{script}", "args": ["\\ud800"]}}'
    for path in ("/api/v1/jobs", "/api/v1/quote"):
        answer = alone.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert "lone surrogate" in answer.json()["error"]["message"]


def test_slots_are_reclaimed_once_however_often_the_same_request_comes(led: tuple[Interface, Stub]) -> None:
    it, stub = led
    key = {"Idempotency-Key": "k1"}
    for _ in range(2):
        answer = it.http.post("/api/v1/cluster/reclaim", json={"slots": 1}, headers=key)
        assert (answer.status_code, answer.json()["reason"]) == (200, "done")
    assert it.http.post("/api/v1/cluster/reclaim", json={"slots": 2}, headers=key).status_code == 200
    assert it.http.post("/api/v1/cluster/reclaim", json={"slots": 1}).status_code == 200
    assert [ask.number for ask in stub.asks] == [1, 2, 1]
