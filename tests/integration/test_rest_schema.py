"""The interface against its own OpenAPI: whatever is sent, no 5xx, and every answer is as described."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from rest_server import Interface, Stub, interface

from concertina.cluster import keys
from concertina.cluster.mirror import Mirror
from concertina.cluster.records import JobRequest, JobState
from concertina.core.job import JobPhase
from concertina.questions import Band, Delay, Eta, Quote
from concertina.server.app import create_app
from concertina.server.oracle import Offer, Why
from concertina.server.parts import Parts
from concertina.store.memory import MemoryStore

REFUSALS = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 429]  # 413: too large counts as refused
CHECKS = {
    "negative_data_rejection": {"expected-statuses": REFUSALS},
    # A body may fit each field and yet make no sense as a whole, so refusing it is right.
    "positive_data_acceptance": {"enabled": False},
}


class Seer:
    """In place of the policy."""

    def why(self, job_id: str) -> Why:
        eta = Eta(job_id=job_id, start=BAND, end=BAND, runs=1, reason="")
        return Why(sentence="it waits", eta=eta)

    def quote(self, request: JobRequest) -> Offer:
        delays = (Delay(job_id="a", before_s=1.0, after_s=math.inf),)
        found = Quote(
            job_id=request.id, taken=True, earliest_s=1.0, start=BAND, end=None, delays=delays, runs=1, reason="r"
        )
        return Offer(quote=found, profiled=True)


BAND = Band(low_s=1.0, expected_s=2.0, high_s=math.inf)


def described() -> schemathesis.BaseSchema:
    store = MemoryStore()
    app = create_app(Parts(store=store, mirror=Mirror(store), state=Path("/nowhere")))
    config = schemathesis.Config.from_dict({"checks": CHECKS})
    schema = schemathesis.openapi.from_dict(app.openapi(), config=config)
    return schema.exclude(path="/api/v1/events")  # never ends: test_rest_api.py reads it


schema = described()
JOBS = itertools.cycle(["a", "b"])


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interface]:
    folder = tmp_path_factory.mktemp("schema")
    (folder / "train.py").write_text("pass\n")
    store = MemoryStore()
    with (
        pytest.MonkeyPatch.context() as patch,
        interface(folder, store, answer_s=1.0, oracle=Seer()) as found,
        Stub(store),
    ):
        patch.setattr("concertina.server.streams.LOOK_SECONDS", 0.02)  # streams of a job that has ended end at once
        found.put(keys.REQUESTS + "a", JobRequest(id="a", name="a", user="u", script="/s"))
        found.put(keys.STATES + "a", JobState(id="a", phase=JobPhase.FINISHED))
        found.put(keys.REQUESTS + "b", JobRequest(id="b", name="b", user="u", script="/s"))
        found.put(keys.STATES + "b", JobState(id="b", phase=JobPhase.WAITING))
        yield found


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as found:
        found.trust_env = False
        yield found


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_that_is_sent_breaks_it(case: schemathesis.Case, it: Interface, session: requests.Session) -> None:
    if isinstance(case.body, dict) and "script" in case.body and isinstance(case.body["script"], str):
        case.body["script"] = str(it.state / "train.py")
    if (case.path_parameters or {}).get("job_id") == "0":  # what is tried first: let it be a job that is there
        case.path_parameters["job_id"] = "a" if case.path.endswith("/events") else next(JOBS)
    case.call_and_validate(base_url=it.url, session=session, timeout=20)
