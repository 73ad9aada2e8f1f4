"""Tiresias (NSDI 2019): the 60-job trace of its simulator."""

from __future__ import annotations

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, only_rows
from concertina.simulator.readers.row import Row


def _parse(row: Row) -> JobSpec:
    return JobSpec(
        id=row.text("job_id"),
        submit_s=row.number_of("submit_time"),
        gpus=row.count_of("num_gpu"),
        model=row.text("model_name"),
        duration_s=row.above_zero("duration"),
    )


TIRESIAS = TraceFormat(
    name="tiresias",
    about="the trace of the Tiresias simulator",
    required=("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"),
    parser=only_rows(_parse),
    id_column="job_id",
    cluster=lambda _jobs: "15x4:P100",
)
