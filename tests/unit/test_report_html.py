"""The page carries everything it needs, and nothing in a name can break out of it."""

from __future__ import annotations

import json
import re

import pytest

from concertina.core.cluster import Cluster
from concertina.core.job import JobSpec
from concertina.simulator import report_html
from concertina.simulator.metrics import Result
from concertina.simulator.recorder import Record
from concertina.simulator.report_html import NoPlotlyError, render
from concertina.simulator.run import simulate


def _result(policy: str = "fifo", *, trace: str = "t", job: str = "a", record: bool = True) -> Result:
    jobs = [
        JobSpec(id=job, submit_s=0, gpus=2, duration_s=50, deadline_s=60),
        JobSpec(id="b", submit_s=1, gpus=2, duration_s=50, deadline_s=60),
    ]
    keep = Record(spans=record, load=record)
    return simulate(jobs, cluster=Cluster.parse("1x2"), policy=policy, trace=trace, record=keep)


def _data(page: str) -> list[dict[str, object]]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    data: list[dict[str, object]] = json.loads(found[1])
    return data


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = render([_result()])
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page) == []
    assert "@import" not in page[: page.index("</style>")]
    assert "Plotly" in page
    assert len(page) > 3_000_000  # plotly.js is inside


def test_traces_and_policies_are_all_there() -> None:
    data = _data(render([_result("fifo"), _result("tiresias"), _result("fifo", trace="u")], notes={"u": ["n"]}))
    assert [trace["name"] for trace in data] == ["t", "u"]
    assert data[1]["notes"] == ["n"]
    policies = data[0]["policies"]
    assert isinstance(policies, list)
    assert [policy["summary"]["policy"] for policy in policies] == ["fifo", "tiresias"]
    assert policies[0]["deadlines"] == {"met": 1, "late": 1, "rejected": 0, "unfinished": 0, "none": 0}


def test_a_name_can_not_break_out_of_the_data() -> None:
    name = "</script><script>alert(1)</script>/*PLOTLY*/"
    page = render([_result(job=name)])
    assert "<script>alert" not in page
    jobs = _data(page)[0]["jobs"]
    assert isinstance(jobs, list)
    assert name in jobs


def test_a_result_without_pictures_still_makes_a_page() -> None:
    policies = _data(render([_result(record=False)]))[0]["policies"]
    assert isinstance(policies, list)
    assert policies[0]["grid"] is None


def test_without_plotly_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_html, "find_spec", lambda _name: None)
    with pytest.raises(NoPlotlyError, match=r"pip install 'concertina\[simulator\]'"):
        render([_result()])
