"""What is said of others' jobs to those who may not know of them."""

from concertina.cluster.records import JobRequest
from concertina.server.auth import Caller
from concertina.server.discretion import discreet
from concertina.server.models import JobAsk
from concertina.server.submit import make_request

ALICE = Caller(name="alice")


def requested(name: str, user: str) -> JobRequest:
    return make_request(JobAsk(script="/s.py", name=name), user, 0.0, "")


def test_the_name_of_somebody_elses_job_stays_unsaid_also_when_that_job_is_forgotten() -> None:
    hers, his = requested("patient", "alice"), requested("top-secret", "bob")
    both, sentence = {hers.id: hers, his.id: his}, f"{hers.id} waits, since the promise to {his.id} could not be kept."
    assert discreet(sentence, ALICE, both) == sentence.replace(his.id, "somebody else's job")
    assert discreet(sentence, ALICE, {hers.id: hers}) == sentence.replace(his.id, "a forgotten job")
    assert discreet(sentence, Caller(name="root", admin=True), {}) == sentence


def test_what_a_script_ended_with_is_said_as_it_is() -> None:
    for error in ("no file /usr/lib/site-packages/x.py", "no file 'my-training.py'", "a non-existent key"):
        assert discreet(f"it failed: {error}", ALICE, {}) == f"it failed: {error}"
