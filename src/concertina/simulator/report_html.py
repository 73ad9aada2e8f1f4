"""One self-contained page about a comparison: it opens from a disk, without a network, in any browser.

The page is `page/report.html` with its style, its script, plotly.js out of the installed wheel, and the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from concertina.core.errors import ConcertinaError
from concertina.simulator import report_data
from concertina.simulator.metrics import Result

COLOURS = 24
"""Job colours in the picture of the devices; the page has as many."""


class NoPlotlyError(ConcertinaError):
    """plotly is not installed."""

    def __init__(self) -> None:
        super().__init__("--html needs plotly, which is missing; try pip install 'concertina[simulator]'")


def render(results: Sequence[Result], *, notes: Mapping[str, Sequence[str]] | None = None) -> str:
    """The page about all results; `notes` are sentences by trace, such as what was skipped."""
    traces: dict[str, list[Result]] = {}
    for result in results:
        traces.setdefault(result.summary.trace, []).append(result)
    data = [_trace(name, found, (notes or {}).get(name, ())) for name, found in traces.items()]
    page = resources.files("concertina.simulator") / "page"
    text = (page / "report.html").read_text("utf-8")
    for mark, content in (
        ("/*STYLE*/", (page / "report.css").read_text("utf-8")),
        ("/*SCRIPT*/", (page / "report.js").read_text("utf-8")),
        ("/*DATA*/", _safe_json(data)),
        ("/*PLOTLY*/", _plotly()),  # last: nothing inside it is taken for a mark
    ):
        before, _, after = text.partition(mark)
        text = before + content + after
    return text


def write_html(path: Path, results: Sequence[Result], *, notes: Mapping[str, Sequence[str]] | None = None) -> None:
    """Write the page."""
    path.write_text(render(results, notes=notes), encoding="utf-8")


def _plotly() -> str:
    if find_spec("plotly") is None:
        raise NoPlotlyError
    script = resources.files("plotly") / "package_data" / "plotly.min.js"
    return script.read_text("utf-8").replace("</script", "<\\/script")


def _safe_json(data: object) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _trace(name: str, results: Sequence[Result], notes: Sequence[str]) -> dict[str, object]:
    jobs = [outcome.job_id for outcome in results[0].outcomes]
    number = {job: i for i, job in enumerate(jobs)}
    curve_axis = report_data.time_axis(results, report_data.BINS)
    grid_axis = report_data.time_axis(results, report_data.COLUMNS)
    cluster = results[0].cluster
    types = {kind: cluster.slots_of(kind) for kind in cluster.types}
    return {
        "name": name,
        "notes": list(notes),
        "cluster": " + ".join(f"{count} {kind}" for kind, count in types.items()),
        "nodes": len(cluster.nodes),
        "jobs": jobs,
        "colours": COLOURS,
        "start_s": curve_axis.start_s,
        "end_s": curve_axis.end_s,
        "busy_until_s": report_data.busy_until(results),
        "policies": [
            {
                "summary": _finite(result.summary.as_dict()),
                "load": report_data.load_curve(result.load, curve_axis),
                "jct": report_data.distribution(result.outcomes),
                "deadlines": report_data.deadlines(result.outcomes),
                "worst": report_data.worst(result.outcomes),
                "grid": _grid(result, number, grid_axis),
            }
            for result in results
        ],
    }


def _grid(result: Result, number: Mapping[str, int], axis: report_data.TimeAxis) -> report_data.Grid | None:
    return report_data.device_grid(result.cluster, result.spans, number, axis) if result.spans else None


def _finite(summary: Mapping[str, object]) -> dict[str, object]:
    """JSON knows no NaN: what there is no figure for is null."""
    return {
        key: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for key, value in summary.items()
    }
