"""Every way in that must be shut: without a token, with a wrong one or another's, from other pages, too large."""

import hashlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rest_server import LIMIT_SECONDS, Interface, Stub, interface
from typer.testing import CliRunner

from concertina.cli import app as cli
from concertina.cluster import keys
from concertina.cluster.codec import dump, load
from concertina.cluster.records import Change, JobRequest, JobState, User
from concertina.core.job import JobPhase
from concertina.questions import Band, QuestionError, Quote
from concertina.server.auth import add_user, first_admin, is_loopback, remove_user
from concertina.server.oracle import Offer, Why
from concertina.store.memory import MemoryStore

ENTRANCES = [  # all that the OpenAPI knows must be here: see the test below
    ("GET", "/api/v1/jobs"),
    ("POST", "/api/v1/jobs"),
    ("GET", "/api/v1/jobs/{job_id}"),
    ("DELETE", "/api/v1/jobs/{job_id}"),
    ("POST", "/api/v1/jobs/{job_id}/resize"),
    ("GET", "/api/v1/jobs/{job_id}/events"),
    ("GET", "/api/v1/jobs/{job_id}/logs"),
    ("GET", "/api/v1/jobs/{job_id}/metrics"),
    ("GET", "/api/v1/jobs/{job_id}/why"),
    ("POST", "/api/v1/quote"),
    ("GET", "/api/v1/cluster"),
    ("GET", "/api/v1/cluster/history"),
    ("POST", "/api/v1/cluster/reclaim"),
    ("POST", "/api/v1/cluster/prune"),
    ("POST", "/api/v1/cluster/down"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/nodes"),
    ("POST", "/api/v1/nodes/{node_id}/drain"),
    ("GET", "/api/v1/session"),
    ("GET", "/api/v1/users"),
    ("POST", "/api/v1/users"),
    ("DELETE", "/api/v1/users/{name}"),
    ("GET", "/metrics"),
]
OF_A_JOB = [entrance for entrance in ENTRANCES if "{job_id}" in entrance[1]]
OF_ADMINS = [
    ("POST", "/api/v1/cluster/reclaim", {"slots": 1}),
    ("POST", "/api/v1/cluster/prune", {}),
    ("POST", "/api/v1/cluster/down", {}),
    ("POST", "/api/v1/nodes/here/drain", {}),
    ("GET", "/api/v1/users", None),
    ("POST", "/api/v1/users", {"name": "mallory", "admin": True}),
    ("DELETE", "/api/v1/users/bob", None),
    ("GET", "/metrics", None),
]


class Town:
    """An interface that needs tokens, a controller, an admin, and two users with a job each."""

    def __init__(self, it: Interface, stub: Stub, script: Path) -> None:
        self.it, self.stub, self.script = it, stub, script
        self.tokens = {
            "root": add_user(it.store, User(name="root", token="", admin=True)),
            "alice": add_user(it.store, User(name="alice", token="")),
            "bob": add_user(it.store, User(name="bob", token="")),
        }
        assert it.mirror.wait_until(lambda: len(it.mirror._tables[keys.USERS]) == 3, LIMIT_SECONDS)
        self.jobs = {name: self.submit(name)["id"] for name in ("alice", "bob")}

    def ask(self, who: str | None, method: str, path: str, **more: Any) -> httpx.Response:
        token = self.tokens.get(who, who) if who else None
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **more.pop("headers", {})}
        return self.it.http.request(method, path, headers=headers, **more)

    def submit(self, who: str, **more: Any) -> dict[str, Any]:
        answer = self.ask(who, "POST", "/api/v1/jobs", json={"script": str(self.script), **more})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    script = folder / "train.py"
    script.write_text("print('hello')\n")
    store = MemoryStore()
    with interface(folder / "state", store, token_needed=True) as it, Stub(store) as stub:
        yield Town(it, stub, script)


def path_of(path: str, job: str) -> str:
    return path.format(job_id=job, node_id="here", name="bob")


def body_of(method: str) -> dict[str, Any]:
    return {"json": {}} if method == "POST" else {}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_every_entrance_is_in_the_list(town: Town) -> None:
    paths = town.ask("root", "GET", "/api/v1/openapi.json").json()["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found - {("GET", "/healthz")} == set(ENTRANCES)


@pytest.mark.parametrize(("method", "path"), [*ENTRANCES, ("GET", "/api/v1/openapi.json"), ("GET", "/nowhere")])
def test_without_a_token_nothing_is_said(town: Town, method: str, path: str) -> None:
    answer = town.ask(None, method, path_of(path, town.jobs["alice"]), **body_of(method))
    assert code(answer) == (401, "token_needed")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "alice" not in answer.text


def forged(town: Town) -> list[str]:
    good = town.tokens["alice"]
    entry = town.it.store.get(keys.USERS + "alice")
    assert entry is not None
    return [
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        good[:-1],
        good + "A",
        good.upper(),
        load(User, entry.value).token,  # what the store keeps is no key
        hashlib.sha256(b"").hexdigest(),
        "alice",
        "x" * 5000,
    ]


def test_a_forged_token_opens_nothing(town: Town) -> None:
    for token in forged(town):
        answer = town.it.http.get("/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
        assert code(answer) == (401, "wrong_token"), token


@pytest.mark.parametrize("header", ["Basic YWxpY2U6", "Bearer", "bearer\tx", "Token x", "", "Bearer \xff"])
def test_a_mangled_header_opens_nothing(town: Town, header: str) -> None:
    answer = town.it.http.get("/api/v1/jobs", headers=[(b"Authorization", header.encode("latin-1"))])
    assert answer.status_code == 401


@pytest.mark.parametrize("form", ["Basic {}", "Token {}", "{}", "Bearer{}", "Bearer: {}", "Bearer x {}"])
def test_a_token_in_another_form_opens_nothing(town: Town, form: str) -> None:
    answer = town.it.http.get("/api/v1/jobs", headers={"Authorization": form.format(town.tokens["alice"])})
    assert code(answer) == (401, "wrong_token")


def test_the_store_keeps_no_token(town: Town) -> None:
    everything = b"".join(entry.value for entry in town.it.store.list_prefix("").entries)
    for token in town.tokens.values():
        assert token.encode() not in everything


@pytest.mark.parametrize(("method", "path"), OF_A_JOB)
def test_another_users_job_is_not_there(town: Town, method: str, path: str) -> None:
    """The same answer as for a job that never was: not even its name can be found out."""
    send = {"json": {"workers": 1}} if method == "POST" else {}
    asks = len(town.stub.asks)
    theirs = town.ask("bob", method, path_of(path, town.jobs["alice"]), **send)
    nobodys = town.ask("bob", method, path_of(path, "nobodys"), **send)
    assert code(theirs) == code(nobodys) == (404, "no_such_job")
    assert theirs.text.replace(town.jobs["alice"], "nobodys") == nobodys.text
    assert len(town.stub.asks) == asks


def test_users_list_their_own_jobs_and_admins_all(town: Town) -> None:
    def ids(who: str, **params: str) -> set[str]:
        return {job["id"] for job in town.ask(who, "GET", "/api/v1/jobs", params=params).json()["items"]}

    assert ids("alice") >= {town.jobs["alice"]}
    assert town.jobs["bob"] not in ids("alice")
    assert ids("alice", user="bob") == set()
    assert ids("root") >= set(town.jobs.values())
    assert town.jobs["bob"] in ids("root", user="bob")
    assert town.jobs["alice"] not in ids("root", user="bob")
    after = town.ask("alice", "GET", "/api/v1/jobs", params={"after": town.jobs["bob"]})
    assert code(after) == (404, "no_such_job")


def test_events_slots_and_history_do_not_name_other_users_jobs(town: Town) -> None:
    it, job = town.it, town.jobs["alice"]
    it.put(keys.STATES + job, JobState(id=job, phase=JobPhase.RUNNING, slots=("here/0",)))
    placed = town.ask("bob", "GET", "/api/v1/cluster").json()["placement"][0]
    assert placed == {"slot": "here/0", "node": "here", "state": "busy", "job": None}
    assert town.ask("alice", "GET", "/api/v1/cluster").json()["placement"][0]["job"] == job
    assert "alice" not in town.ask("bob", "GET", "/api/v1/cluster/history").text
    seen = it.mirror.revision
    it.put(keys.STATES + town.jobs["bob"], JobState(id=town.jobs["bob"], phase=JobPhase.WAITING, reason="x"))
    it.put(keys.STATES + job, JobState(id=job, phase=JobPhase.WAITING))
    headers = {"Authorization": f"Bearer {town.tokens['bob']}", "Last-Event-ID": str(seen - 1)}
    heard = ""
    with it.http.stream("GET", "/api/v1/events", headers=headers) as stream:
        for line in stream.iter_lines():
            heard += line + "\n"
            if line.startswith('data: {"id":') and town.jobs["bob"] in line and '"reason":"x"' in line:
                break
    assert job not in heard


def test_in_the_terminal_a_slot_is_not_free_that_somebody_else_or_a_measured_job_has(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, theirs, mine = town.it, town.jobs["alice"], town.submit("bob", name="measured")["id"]
    it.put(keys.STATES + theirs, JobState(id=theirs, phase=JobPhase.RUNNING, slots=("here/0",)))
    it.put(keys.STATES + mine, JobState(id=mine, profiling=True, slots=("here/1",)))
    monkeypatch.setenv("CONCERTINA_TOKEN", town.tokens["bob"])
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(cli, ["nodes", "--url", it.url])
    assert shown.exit_code == 0, shown.output
    assert f"0: somebody else's job, 1: {mine}, 2: free, 3: free" in shown.output
    it.put(keys.STATES + theirs, JobState(id=theirs, phase=JobPhase.CANCELLED))
    it.put(keys.STATES + mine, JobState(id=mine, phase=JobPhase.CANCELLED))


def test_no_reason_names_another_users_job(town: Town) -> None:
    """Reasons say who is in the way; whose that is, is the business of admins and of its owner."""
    it, theirs, mine = town.it, town.jobs["alice"], town.submit("bob", name="patient")["id"]
    reason = f"it waits behind {theirs} (2), as {mine} does"
    line = Change(at_s=1.0, workers=0, reason=reason)
    it.put(keys.STATES + mine, JobState(id=mine, phase=JobPhase.WAITING, reason=reason, history=(line,)))
    seen = it.mirror.revision
    at = f"/api/v1/jobs/{mine}"
    for path in (at, "/api/v1/jobs"):
        assert theirs not in (heard := town.ask("bob", "GET", path).text), path
        assert f"it waits behind somebody else's job (2), as {mine} does" in heard, path
        assert reason in town.ask("root", "GET", path).text, path
    headers = {"Authorization": f"Bearer {town.tokens['bob']}"}
    for path in (f"/api/v1/events?after={seen - 1}", f"{at}/events"):
        with it.http.stream("GET", path, headers=headers) as stream:
            heard = next(line for line in stream.iter_lines() if line.startswith('data: {"id":') and mine in line)
        assert "behind somebody else's job" in heard, path
        assert theirs not in heard, path
    it.put(keys.STATES + mine, JobState(id=mine, phase=JobPhase.CANCELLED, reason=reason))
    with it.http.stream("GET", f"{at}/events", headers=headers) as stream:
        assert theirs not in "".join(stream.iter_lines())


def test_no_answer_about_the_future_names_another_users_job(tmp_path: Path) -> None:
    class Gossip:
        def why(self, job_id: str) -> Why:
            return Why(sentence="the others are held by hers-1 (4)", eta=None)

        def quote(self, request: JobRequest) -> Offer:
            if request.name == "odd":
                raise QuestionError("hers-1 can not be reckoned with")
            band = Band(low_s=None, expected_s=None, high_s=None)
            reason = "hers-1 has all the slots"
            found = Quote(
                job_id=request.id, taken=False, earliest_s=None, start=band, end=band, delays=(), runs=1, reason=reason
            )
            return Offer(quote=found, profiled=True)

    (script := tmp_path / "train.py").write_text("")
    with interface(tmp_path, token_needed=True, oracle=Gossip()) as it:
        http = {"Authorization": f"Bearer {add_user(it.store, User(name='bob', token=''))}"}
        assert it.mirror.wait_until(lambda: "bob" in it.mirror.users_by_name, LIMIT_SECONDS)
        for job, user in (("hers-1", "alice"), ("his-1", "bob")):
            it.put(keys.REQUESTS + job, JobRequest(id=job, name=job, user=user, script=str(script)))
        ask = {"script": str(script)}
        said = [
            it.http.get("/api/v1/jobs/his-1/why", headers=http),
            it.http.post("/api/v1/quote", json=ask, headers=http),
            it.http.post("/api/v1/quote", json={**ask, "name": "odd"}, headers=http),
        ]
        assert [answer.status_code for answer in said] == [200, 200, 409]
        assert [answer.text.count("somebody else's job") for answer in said] == [1, 1, 1]
        assert not [answer.text for answer in said if "hers-1" in answer.text]


@pytest.mark.parametrize(("method", "path", "send"), OF_ADMINS)
def test_only_admins_may_touch_the_cluster_and_its_users(town: Town, method: str, path: str, send: Any) -> None:
    before = town.it.store.list_prefix(keys.USERS).entries, len(town.stub.asks)
    assert code(town.ask("alice", method, path, json=send)) == (403, "admin_needed")
    assert (town.it.store.list_prefix(keys.USERS).entries, len(town.stub.asks)) == before


def test_nobody_submits_for_somebody_else_but_an_admin(town: Town) -> None:
    send = {"script": str(town.script), "user": "bob"}
    assert code(town.ask("alice", "POST", "/api/v1/jobs", json=send)) == (403, "admin_needed")
    assert code(town.ask("alice", "POST", "/api/v1/quote", json=send)) == (403, "admin_needed")
    job = town.submit("root", user="bob")
    assert job["user"] == "bob"
    assert town.ask("bob", "DELETE", f"/api/v1/jobs/{job['id']}").json()["phase"] == "cancelled"


def test_an_idempotency_key_belongs_to_its_user(town: Town) -> None:
    send: dict[str, Any] = {"json": {"script": str(town.script)}, "headers": {"Idempotency-Key": "same"}}
    first, second = (town.ask(who, "POST", "/api/v1/jobs", **send).json() for who in ("alice", "bob"))
    assert first["id"] != second["id"]
    assert (first["user"], second["user"]) == ("alice", "bob")


def test_a_new_token_and_a_removed_user_void_the_old_token(town: Town) -> None:
    made = town.ask("root", "POST", "/api/v1/users", json={"name": "carol"})
    assert made.status_code == 201
    old = made.json()["token"]
    assert town.it.mirror.wait_until(lambda: "carol" in town.it.mirror._tables[keys.USERS], LIMIT_SECONDS)
    assert town.ask(old, "GET", "/api/v1/session").json()["user"] == "carol"
    new = town.ask("root", "POST", "/api/v1/users", json={"name": "carol", "max_jobs": 2}).json()["token"]
    assert town.it.mirror.wait_until(lambda: town.it.mirror._tables[keys.USERS]["carol"].max_jobs == 2, LIMIT_SECONDS)
    assert town.ask(old, "GET", "/api/v1/session").status_code == 401
    assert town.ask(new, "GET", "/api/v1/session").json()["max_jobs"] == 2
    assert remove_user(town.it.store, "carol")
    assert town.it.mirror.wait_until(lambda: "carol" not in town.it.mirror._tables[keys.USERS], LIMIT_SECONDS)
    assert town.ask(new, "GET", "/api/v1/session").status_code == 401


def test_a_new_token_alone_voids_no_limit_and_takes_no_right_away(town: Town) -> None:
    def renewed(**said: object) -> dict[str, Any]:
        found: dict[str, Any] = town.ask("root", "POST", "/api/v1/users", json={"name": "dora", **said}).json()
        return {name: value for name, value in found.items() if name not in ("name", "token")}

    limits = {"admin": True, "max_jobs": 3, "max_slots": 0, "max_gpu_hours": 2.5}
    assert renewed(**limits) == limits
    assert renewed(max_slots=4) == {**limits, "max_slots": 4}
    assert renewed() == {**limits, "max_slots": 4}
    assert renewed(admin=False, max_jobs=0) == {**limits, "admin": False, "max_jobs": 0, "max_slots": 4}
    assert remove_user(town.it.store, "dora")


@pytest.mark.parametrize("path", ["/api/v1/events", "/api/v1/jobs/{job_id}/events"])
@pytest.mark.parametrize("how", ["removed", "another token"])
def test_a_stream_ends_with_the_token_that_opened_it(town: Town, path: str, how: str) -> None:
    name = f"eve-{how[0]}-{'job' if 'job_id' in path else 'all'}"
    token = add_user(town.it.store, User(name=name, token=""))
    assert town.it.mirror.wait_until(lambda: name in town.it.mirror.users_by_name, LIMIT_SECONDS)
    job = town.submit(token)["id"]
    headers = {"Authorization": f"Bearer {token}"}
    with town.it.http.stream("GET", path.format(job_id=job), headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        if how == "removed":
            remove_user(town.it.store, name)
        else:
            add_user(town.it.store, User(name=name, token=""))
        secret = town.it.store.put(keys.STATES + job, dump(JobState(id=job, reason="a secret")))
        assert town.it.mirror.wait_until(lambda: town.it.mirror.revision >= secret, LIMIT_SECONDS)
        assert "a secret" not in "".join(lines), "it ends, and without a word of what came later"


def test_the_first_admin_is_made_once() -> None:
    with MemoryStore() as store:
        token = first_admin(store, "root")
        assert token is not None
        assert first_admin(store, "mallory") is None


def test_only_loopback_goes_without_tokens() -> None:
    assert [h for h in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8") if not is_loopback(h)] == []
    assert [
        h for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org", "") if is_loopback(h)
    ] == []


def test_any_other_address_needs_tokens(tmp_path: Path) -> None:
    with interface(tmp_path, host="0.0.0.0") as it:
        assert it.http.get("/api/v1/jobs").status_code == 401
        assert it.http.get("/healthz").status_code == 503, "whether it is well may be known to all"


def test_behind_a_proxy_that_speaks_https_the_own_page_is_let_in_and_others_are_not(town: Town) -> None:
    host = town.it.url.removeprefix("http://")
    found = [
        town.ask("alice", "GET", "/api/v1/jobs", headers={"Origin": origin}).status_code
        for origin in (f"https://{host}", f"http://{host}", "https://evil.example", "null", host)
    ]
    assert found == [200, 200, 403, 403, 403]


def test_one_user_does_not_take_all_the_watchers_places(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.server.streams.MOST_EACH", 1)

    def watch(who: str) -> Any:
        headers = {"Authorization": f"Bearer {town.tokens[who]}"}
        return town.it.http.stream("GET", "/api/v1/events", headers=headers)

    with watch("alice") as first, watch("bob") as other, watch("root") as one, watch("root") as two:
        assert [stream.status_code for stream in (first, other, one, two)] == [200] * 4
        lines = first.iter_lines()
        assert next(lines).startswith("retry"), "it is counted now"
        with watch("alice") as second:
            assert second.status_code == 429


@pytest.mark.parametrize("said", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: y"])
def test_connections_without_a_request_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("concertina.server.serve.MOST_CONNECTIONS", 8)
    monkeypatch.setattr("concertina.server.serve.QUIET_SECONDS", 2.0)
    with interface(tmp_path) as it, it.http.stream("GET", "/api/v1/events") as stream, ExitStack() as stack:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        host, _, port = it.url.removeprefix("http://").partition(":")
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for connection in idle:
            connection.sendall(said)
        for connection in idle:
            connection.settimeout(LIMIT_SECONDS)
            assert connection.recv(1) == b"", "it was closed"
        assert httpx.get(f"{it.url}/api/v1/jobs", trust_env=False).status_code == 200
        it.put(keys.REQUESTS + "j", JobRequest(id="j", name="j", user="u", script="/s"))
        assert any('"id":"j"' in line for line in lines), "who gets an answer stays"


LONG_ANSWER = b"GET /static/plotly.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize("requests", [1, 2])
def test_answers_that_nobody_reads_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    monkeypatch.setattr("concertina.server.serve.MOST_CONNECTIONS", 8)
    monkeypatch.setattr("concertina.server.serve.QUIET_SECONDS", 1.0)
    with interface(tmp_path) as it, ExitStack() as stack:
        it.http.get("/healthz", headers={"Connection": "close"})
        for _ in range(7):
            deaf = stack.enter_context(narrow(it))
            deaf.sendall(LONG_ANSWER * requests)
            assert deaf.recv(12) == b"HTTP/1.1 200"
        until, status = time.monotonic() + LIMIT_SECONDS, 503
        while status == 503 and time.monotonic() < until:
            time.sleep(0.2)
            status = httpx.get(f"{it.url}/api/v1/jobs", trust_env=False).status_code
        assert status == 200


def test_a_slow_reader_of_a_long_answer_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.server.serve.QUIET_SECONDS", 1.0)
    with interface(tmp_path) as it, narrow(it) as reader:
        begun, size = time.monotonic(), 0
        reader.sendall(LONG_ANSWER)
        while piece := reader.recv(1 << 18):
            size += len(piece)
            time.sleep(0.2 if time.monotonic() < begun + 4.0 else 0.0)
        whole = httpx.get(f"{it.url}/static/plotly.min.js", trust_env=False)
        assert size > len(whole.content)


def narrow(it: Interface) -> socket.socket:
    """A connection that takes in little by itself."""
    host, _, port = it.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(LIMIT_SECONDS)
    connection.connect((host, int(port)))
    return connection


def test_too_many_watchers_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.server.streams.MOST_STREAMS", 1)
    with interface(tmp_path) as it, it.http.stream("GET", "/api/v1/events") as stream:
        lines = stream.iter_lines()  # kept: without it the stream would be closed
        assert next(lines).startswith("retry")
        assert code(it.http.get("/api/v1/events")) == (503, "too_many")


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_quotas_are_kept_also_by_many_requests_at_once(town: Town) -> None:
    token = add_user(town.it.store, User(name="dave", token="", max_jobs=3, max_slots=8))
    assert town.it.mirror.wait_until(lambda: "dave" in town.it.mirror._tables[keys.USERS], LIMIT_SECONDS)

    def one(_: int) -> httpx.Response:
        return town.ask(token, "POST", "/api/v1/jobs", json={"script": str(town.script), "virtual": 2})

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(one, range(10)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 7
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["message"] == "user dave has 3 jobs not ended yet and may have 3"
    jobs = [answer.json()["id"] for answer in answers if answer.status_code == 201]
    assert town.ask(token, "DELETE", f"/api/v1/jobs/{jobs[0]}").status_code == 200
    wide = town.ask(token, "POST", "/api/v1/jobs", json={"script": str(town.script), "virtual": 9})
    assert (wide.status_code, wide.json()["error"]["hint"]) == (403, "submit it with max_workers 8 or less (--max)")
    much = town.ask(token, "POST", "/api/v1/jobs", json={"script": str(town.script), "virtual": 5})
    assert (much.status_code, much.json()["error"]["hint"].partition(", or ")[2]) == (
        429,
        "submit it with max_workers 4 or less (--max)",
    )
    assert one(0).status_code == 201


def test_used_up_gpu_hours_are_a_refusal(town: Town) -> None:
    token = add_user(town.it.store, User(name="erin", token="", max_gpu_hours=1.5))
    assert town.it.mirror.wait_until(lambda: "erin" in town.it.mirror._tables[keys.USERS], LIMIT_SECONDS)
    town.it.put(keys.REQUESTS + "old", JobRequest(id="old", name="old", user="erin", script="/s"))
    town.it.put(keys.STATES + "old", JobState(id="old", phase=JobPhase.FINISHED, service_s=2 * 3600.0))
    answer = town.ask(token, "POST", "/api/v1/jobs", json={"script": str(town.script)})
    assert code(answer) == (403, "quota")
    assert answer.json()["error"]["message"] == "user erin has used 2.0 of 1.5 GPU-hours"


# -- odd bodies and names --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interface]:
    """On loopback, without tokens."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "train.py").write_text("print('hello')\n")
    with interface(folder) as it:
        yield it


def raw(it: Interface, request: bytes) -> bytes:
    """What comes back for exactly these bytes."""
    port = int(it.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as sock:
        sock.sendall(request)
        answer = b""
        while b"}}" not in answer and (piece := sock.recv(65536)):
            answer += piece
    return answer


def test_a_body_that_is_too_large_is_refused_by_its_header_before_it_is_sent(local: Interface) -> None:
    head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw(local, head + b"Content-Length: 300000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"too_large" in answer


def test_a_body_that_is_too_large_is_refused_while_it_comes(local: Interface) -> None:
    """In pieces, without saying how many."""

    def pieces() -> Iterator[bytes]:
        yield b'{"script": "'
        for _ in range(300):
            yield b"x" * 1024
        yield b'"}'

    try:
        answer = local.http.post("/api/v1/jobs", content=pieces(), headers={"Content-Type": "application/json"})
    except httpx.TransportError:
        return  # it hung up on us: that will do too
    assert code(answer) == (413, "too_large")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"\x80\x04K\x01.",  # a pickle
        b'{"script": 1}',
        b'{"script": null}',
        b'{"script": "/x", "script2": 1}',
        b'{"script": "/x.py", "virtual": 1e400}',
        b'{"script": "/x.py", "virtual": true}',
        b'{"script": "/x.py", "virtual": "4"}',
        b'{"script": "/x.py", "virtual": -1}',
        b'{"script": "/x.py", "deadline_s": NaN}',
        b'{"script": "/x.py", "deadline_s": Infinity}',
        b'{"script": "/x.py", "deadline": "0001-01-01T00:00:00+14:00"}',
        b'{"script": "/x.py", "deadline": "tomorrow"}',
        b'{"script": "/x.py", "args": ["a\\u0000b"]}',
        b'{"script": "/x.py", "args": ["\\ud800"]}',
        b'{"script": "/x.py", "min_workers": 5, "virtual": 4}',
        b'{"script": "/x.py", "soft": true}',
        b'{"script": "/x.py", "virtual": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 30_000,
    ],
)
def test_a_malformed_body_is_a_clear_refusal(local: Interface, body: bytes) -> None:
    for path in ("/api/v1/jobs", "/api/v1/quote"):
        answer = local.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["error"]["message"]
    assert local.store.list_prefix(keys.REQUESTS).entries == ()


BAD_NAMES = [
    "..",
    "../x",
    "a/b",
    "a..b",
    ".hidden",
    "-x",
    "a\nb",
    "a\x00b",
    "a b",
    "",
    "x" * 64,
    "é",
    "a;rm",
    "$(id)",
    "a.",
]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("field", ["name", "user"])
def test_an_odd_name_is_refused(local: Interface, field: str, name: str) -> None:
    script = str(local.state / "train.py")
    answer = local.http.post("/api/v1/jobs", json={"script": script, field: name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")
    assert field in answer.json()["error"]["message"]
    assert "pattern" not in answer.json()["error"]["message"]  # a sentence for people


@pytest.mark.parametrize(
    "script",
    ["train.py", "/tmp/../etc/passwd", "/etc/..", "/x\n.py", "/x\x00.py", "", "/", "/dev/zero", "/dev/stdin", "/etc"],
)
def test_an_odd_script_is_refused(local: Interface, script: str) -> None:
    answer = local.http.post("/api/v1/jobs", json={"script": script})
    assert answer.status_code == 422
    assert local.store.list_prefix(keys.REQUESTS).entries == ()


def test_a_good_script_by_a_crooked_way_is_refused(local: Interface) -> None:
    for way in (
        f"{local.state}/../{local.state.name}/train.py",
        f"/..{local.state}/train.py",
        "train.py",
        "./train.py",
    ):
        answer = local.http.post("/api/v1/jobs", json={"script": way})
        assert code(answer) == (422, "invalid")
        assert "absolute path without '..'" in answer.json()["error"]["message"]


def test_scripts_may_be_held_under_a_folder_also_through_links(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "train.py").write_text("pass\n")
    (inside / "link.py").symlink_to(outside / "train.py")
    with interface(tmp_path, script_roots=(inside,)) as it:
        found = [
            it.http.post("/api/v1/jobs", json={"script": str(path)}).status_code
            for path in (inside / "train.py", outside / "train.py", inside / "link.py")
        ]
    assert found == [202, 422, 422]


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/jobs/..",
        "/api/v1/jobs/%2e%2e",
        "/api/v1/jobs/%2e%2e%2fetc",
        "/api/v1/jobs/..%2f..%2fstates",
        "/api/v1/jobs/a%00b",
        "/api/v1/jobs/A",
        "/api/v1/jobs/" + "a" * 81,
        "/api/v1/jobs/x/logs/../../secret",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/../app.py",
        "/static/..",
        "/static/.hidden",
        "/static/app.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_a_path_with_dots_leads_nowhere(local: Interface, path: str) -> None:
    """Sent as it is: clients that mean well tidy paths up."""
    connection = http.client.HTTPConnection(local.url.removeprefix("http://"), timeout=LIMIT_SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status in (404, 422), body
    assert "error" in json.loads(body)


@pytest.mark.parametrize("worker", ["..", "../keeper", "0/../0", "%2e%2e", "0\x00", "0.log", "", "../../../secret"])
def test_a_log_with_dots_is_refused(local: Interface, worker: str) -> None:
    local.put(keys.REQUESTS + "j", JobRequest(id="j", name="j", user="u", script="/s"))
    (local.state / "secret.log").write_text("secret\n")
    (local.state / "jobs" / "j" / "logs").mkdir(parents=True, exist_ok=True)
    answer = local.http.get("/api/v1/jobs/j/logs", params={"worker": worker})
    local.store.delete(keys.REQUESTS + "j")
    assert answer.status_code == 422
    assert "secret" not in answer.text.replace(worker, "")


# -- other pages in the user's own browser ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8400", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_bent_to_this_machine_is_refused(local: Interface, host: str) -> None:
    for path in ("/api/v1/jobs", "/", "/healthz", "/metrics"):
        assert code(local.http.get(path, headers={"Host": host})) == (403, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:8400", "LOCALHOST:1", "[::1]:8400"])
def test_own_names_are_let_in(local: Interface, host: str) -> None:
    assert local.http.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Origin": "http://evil.example"},
    ],
)
def test_another_pages_request_is_refused(local: Interface, headers: dict[str, str]) -> None:
    send = {"script": str(local.state / "train.py")}
    assert code(local.http.post("/api/v1/jobs", json=send, headers=headers)) == (403, "cross_origin")
    assert code(local.http.get("/api/v1/jobs", headers=headers)) == (403, "cross_origin")
    assert code(local.http.delete("/api/v1/jobs/x", headers=headers)) == (403, "cross_origin")
    assert local.store.list_prefix(keys.REQUESTS).entries == ()


def test_the_own_page_is_let_in_and_no_answer_invites_others(local: Interface) -> None:
    answer = local.http.get("/api/v1/jobs", headers={"Origin": local.url, "Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    link = local.http.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert link.status_code == 200, "following a link from elsewhere is fine"
    assert link.headers["x-frame-options"] == "DENY"
    assert local.http.options("/api/v1/jobs").status_code == 405


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonx"]
)
def test_what_changes_something_must_be_json(local: Interface, kind: str) -> None:
    body = json.dumps({"script": str(local.state / "train.py")})
    headers = {"Content-Type": kind} if kind else {}
    assert code(local.http.post("/api/v1/jobs", content=body.encode(), headers=headers)) == (415, "json_needed")
    assert local.store.list_prefix(keys.REQUESTS).entries == ()
