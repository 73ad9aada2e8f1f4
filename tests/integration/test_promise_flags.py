"""`concertina simulate --reserve-nodes` and `--quota` from the outside."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from concertina.cli import app

TRACE = "synthetic:jobs=60,gpus=32,load=2.0,deadlines=1.0,users=2"


def call(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", TRACE, "-j", "1", "--json", *words])


def refused(*words: str) -> int:
    result = call("-p", "elasticflow", *words)
    assert result.exit_code == 0, result.output
    found: int = json.loads(result.stdout)["rejected"]
    return found


def test_a_reserve_and_quotas_lead_to_more_refusals() -> None:
    freely = refused()
    assert refused("--reserve-nodes", "2") > freely
    assert refused("--quota", "*=2") > freely
    assert refused("--quota", "*=2", "--quota", "team-0=32") < refused("--quota", "*=2")


def test_it_is_said_where_they_change_nothing() -> None:
    result = call("-p", "fifo", "--quota", "nobody=3")
    assert result.exit_code == 0
    assert "change nothing for fifo: no deadline is promised there" in result.stderr
    assert "--quota 'nobody' is nobody's here; the users are 'team-0', 'team-1'" in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--quota", "ann"], "--quota 'ann': needed USER=GPUS with a whole number"),
        (["--quota", "ann=-1"], "--quota 'ann=-1': needed USER=GPUS with a whole number"),
        (["--quota", "ann=1", "--quota", "ann=2"], "--quota 'ann' is 1 and 2; needed one number"),
        (["--reserve-nodes", "4"], "a reserve of 4 nodes on a cluster of 4: needed 0 to 3"),
    ],
)
def test_what_can_not_be_meant_is_one_sentence(words: list[str], sentence: str) -> None:
    result = call("-p", "elasticflow", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
