"""`concertina up --demo` tells its story in order."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from concertina.cli import demo
from concertina.cli.demo import Demo


class FakeClient:
    """A cluster whose one job has ended, and is said to have ended a moment after the list of jobs says it."""

    listed = threading.Event()

    def __init__(self, url: str, token: str) -> None:
        self.ended: dict[str, Any] = {"id": "mlp-1", "name": "mlp", "phase": "finished", "deadline_s": None}
        self.ended.update(promised_s=None, reason="all its work is done", error="", earliest_s=None)

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *failed: object) -> None:
        pass

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.ended

    def jobs(self) -> list[dict[str, Any]]:
        self.listed.set()
        return [self.ended]

    def get_job(self, job_id: str) -> dict[str, Any]:
        assert self.listed.wait(10.0)
        time.sleep(0.05)  # so that without waiting for it the last word would come first
        return self.ended


def test_the_last_word_comes_after_the_end_of_every_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("concertina.cli.client.Client", FakeClient)
    monkeypatch.setattr(demo, "JOBS", demo.JOBS[:1])
    said: list[str] = []
    Demo(examples=tmp_path)._run("http://127.0.0.1:1", "", said.append)
    assert "demo: mlp-1 finished" in said
    assert said[-1].startswith("demo: all of its jobs have ended")
