"""The cluster's REST interface as the commands use it: every wait is bounded, every failure is one sentence.

httpx is imported when the first request is made, so that `concertina --help` stays light.
"""

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from concertina.cli.places import TOKEN, URL, server_url
from concertina.core.errors import ClusterUnreachable, RequestRefused, TokenRefused, UsageError

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 15.0
AWAY_SECONDS, AGAIN_SECONDS = 60.0, 0.5  # that a server may be away while a job is followed
TRIES = 3  # of a request that may be repeated without harm
PAGE = 200
MOST_JOBS = 10_000

Plain = dict[str, Any]


class Client:
    """Use as a context manager."""

    def __init__(self, url: str, token: str = "", limit_s: float = ANSWER_SECONDS) -> None:
        import httpx

        self.url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=f"{url}/api/v1",
            headers=headers,
            timeout=httpx.Timeout(limit_s, connect=CONNECT_SECONDS),
            trust_env=not _is_loopback(url),  # a proxy of the company does not know our own machine
        )

    @classmethod
    def find(cls, url: str | None = None) -> "Client":
        """The cluster that the flag, the environment or the state folder names."""
        return cls(server_url(url), os.environ.get(TOKEN, ""))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: object) -> Any:
        return self._ask("GET", path, params={k: v for k, v in params.items() if v is not None}, tries=TRIES)

    def get_patiently(self, path: str, **params: object) -> Any:
        """For whoever follows a job: it goes on while the server is started anew, and so do they."""
        ends = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                return self.get(path, **params)
            except TokenRefused:
                raise
            except ClusterUnreachable:
                if time.monotonic() > ends:
                    raise
                time.sleep(AGAIN_SECONDS)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """With a key by which the server knows a repetition where one would do harm: so it may be tried again."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return self._ask("POST", path, json=dict(body or {}), headers=headers, tries=TRIES)

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path, tries=TRIES)

    def _ask(self, method: str, path: str, *, tries: int, **how: Any) -> Any:
        import httpx

        for left in reversed(range(tries)):
            try:
                response = self._http.request(method, path, **how)
            except httpx.ConnectError:
                raise nobody_there(self.url) from None
            except httpx.TransportError as error:
                if not left:
                    raise ClusterUnreachable(
                        f"the cluster at {self.url} gave no answer ({type(error).__name__}); "
                        "look at the output of `concertina up`, and try again"
                    ) from None
                continue
            return _answer(response, self.url)
        raise AssertionError("no tries")

    def events(self, path: str, **params: str | int) -> Iterator[Plain]:
        """Server-sent events, parsed, until the server closes the stream."""
        import httpx

        limits = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=60.0)  # a comment comes every few seconds
        try:
            with self._http.stream("GET", path, params=params, timeout=limits) as response:
                if response.status_code >= 400:
                    response.read()
                    _answer(response, self.url)
                yield from parse_events(response.iter_lines())
        except httpx.TransportError:
            raise ClusterUnreachable(f"the cluster at {self.url} went away; it may be starting again") from None

    def answers(self) -> bool:
        """Whether a server is there, well or not."""
        import httpx

        try:
            self._http.get(f"{self.url}/healthz", timeout=CONNECT_SECONDS)
        except httpx.TransportError:
            return False
        return True

    # -- jobs --------------------------------------------------------------------------------------------------------

    def jobs(self, **params: object) -> list[Plain]:
        """All of them, page by page."""
        found: list[Plain] = []
        after: object = None
        while len(found) < MOST_JOBS:
            page = self.get("/jobs", limit=PAGE, after=after, **params)
            found += page["items"]
            after = page.get("next")
            if not after:
                break
        return found

    def job(self, name: str) -> Plain:
        """By its id, by any prefix of it that fits one job only, or by the name it was given."""
        return self.get_job(self.find_job(name))

    def get_job(self, job_id: str) -> Plain:
        found: Plain = self.get(f"/jobs/{quote(job_id, safe='')}")
        return found

    def follow_job(self, job_id: str) -> Plain:
        found: Plain = self.get_patiently(f"/jobs/{quote(job_id, safe='')}")
        return found

    def find_job(self, name: str) -> str:
        return choose(name, self.jobs())


def choose(name: str, jobs: list[Plain]) -> str:
    """Which job is meant. A name that was used several times means the one that has not ended."""
    ids = [job["id"] for job in jobs]
    if name in ids:
        return name
    fits = [job for job in jobs if name and (job["name"] == name or job["id"].startswith(name))]
    live = [job for job in fits if job["ended_s"] is None]
    chosen = fits if len(fits) == 1 else live
    if len(chosen) == 1:
        return str(chosen[0]["id"])
    if not fits:
        raise UsageError(f"there is no job {name!r}; `concertina jobs --all` lists them")
    some = ", ".join(job["id"] for job in fits[-5:])
    raise UsageError(f"{name!r} fits {len(fits)} jobs ({some}); write more of the one that is meant")


def parse_events(lines: Iterator[str]) -> Iterator[Plain]:
    """The data of each event in a stream; comments and keep-alives are passed over."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield json.loads("\n".join(data))
            data = []


def _answer(response: "httpx.Response", url: str) -> Any:
    if response.status_code < 400:
        return response.json() if response.content else None
    try:
        problem = response.json()["error"]
        message, hint = str(problem["message"]), str(problem.get("hint") or "")
    except (ValueError, KeyError, TypeError):
        message, hint = f"{url} answered {response.status_code} {response.reason_phrase}", ""
    sentence = f"{message}; {hint}" if hint else message
    if response.status_code == 401:
        raise TokenRefused(f"{message}; set {TOKEN} to the token that `concertina up` or your admin gave you")
    if response.status_code in (403, 409, 429):
        raise RequestRefused(sentence)
    if response.status_code < 500:
        raise UsageError(sentence)
    raise ClusterUnreachable(sentence)


def nobody_there(url: str) -> ClusterUnreachable:
    return ClusterUnreachable(
        f"no cluster answers at {url}; start one with `concertina up`, or name another with --url or {URL}"
    )


def _is_loopback(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0]
    return host.startswith(("127.", "localhost", "[::1]"))
