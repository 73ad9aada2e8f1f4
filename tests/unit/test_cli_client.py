"""What the command line makes of a server's answers, and of none."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from concertina.cli.client import AGAIN_SECONDS, Client
from concertina.core.errors import TokenRefused


@contextmanager
def told(*answers: httpx.Response) -> Iterator[Client]:
    """A client that gets these answers, one after the other."""
    left = iter(answers)
    with Client("http://127.0.0.1:1") as client:
        client._http.close()
        transport = httpx.MockTransport(lambda request: next(left))
        client._http = httpx.Client(base_url="http://127.0.0.1:1/api/v1", transport=transport)
        yield client


def test_who_follows_a_job_waits_for_a_server_and_hears_of_a_refused_token_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with told(httpx.Response(503), httpx.Response(200, json={"id": "j"})) as client:
        assert client.follow_job("j") == {"id": "j"}
    assert slept == [AGAIN_SECONDS]
    refused = httpx.Response(401, json={"error": {"message": "that token is void"}})
    with told(refused) as client, pytest.raises(TokenRefused, match="that token is void; set CONCERTINA_TOKEN"):
        client.follow_job("j")
    assert slept == [AGAIN_SECONDS]
