"""Chronus (SoCC 2021): Philly jobs with strict, soft or no deadlines.

The repository states no unit; the values fit minutes, and are read as such. `expect_time_list` is relative
to the submission. A soft job lists falling values for several times: the first, at full value, is taken as
its soft deadline. A job that asks for no device at all (about 200 of 30,940) is nothing for a scheduler of
devices.
"""

from __future__ import annotations

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, nodes_of_eight, only_rows
from concertina.simulator.readers.row import Row

_MINUTE = 60.0
_KINDS = ("strict", "soft", "best")


def _parse(row: Row) -> JobSpec:
    submit = row.number_of("submit_time", unit="min") * _MINUTE
    gpus = row.count_of("num_gpu", least=0)
    if gpus == 0:
        row.unusable("num_gpu", "0 devices", "1 or more")
    kind = row.text("job_type")
    if kind not in _KINDS:
        row.bad("job_type", repr(kind), "strict, soft or best")
    return JobSpec(
        id=row.text("job_id"),
        submit_s=submit,
        gpus=gpus,
        user=row.text("user"),
        model=row.text("model_name"),
        duration_s=row.above_zero("duration", unit="min") * _MINUTE,
        deadline_s=None if kind == "best" else submit + _expected(row) * _MINUTE,
        soft=kind == "soft",
    )


def _expected(row: Row) -> float:
    text = row.text("expect_time_list")
    try:
        first = float(text.split("-")[0])
    except ValueError:
        first = float("nan")
    return first if 0 <= first < float("inf") else row.bad("expect_time_list", repr(text), "minutes joined by -")


CHRONUS = TraceFormat(
    name="chronus",
    about="Philly with strict, soft and no deadlines, in minutes",
    required=(
        "job_id",
        "user",
        "num_gpu",
        "submit_time",
        "iterations",
        "model_name",
        "duration",
        "interval",
        "expect_time_list",
        "expect_value_list",
        "best_effort",
        "job_type",
    ),
    parser=only_rows(_parse),
    id_column="job_id",
    select_by=("user", "job_type"),
    cluster=lambda jobs: nodes_of_eight(jobs, "V100"),
)
