"""Microsoft Philly (ATC 2019), the 82,247 jobs that the AdaptDL authors kept, with their virtual clusters."""

from __future__ import annotations

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, nodes_of_eight, only_rows
from concertina.simulator.readers.row import Row


def _parse(row: Row) -> JobSpec:
    return JobSpec(
        id=str(row.number),
        submit_s=row.number_of("submit_s"),
        gpus=row.count_of("num_gpus"),
        duration_s=row.above_zero("duration_s"),
        user=row.text("vc"),
    )


PHILLY = TraceFormat(
    name="philly",
    about="Microsoft Philly: arrivals, devices, durations, virtual clusters",
    required=("submit_s", "num_gpus", "duration_s", "vc"),
    parser=only_rows(_parse),
    gpus_column="num_gpus",
    select_by=("vc",),
    cluster=lambda jobs: nodes_of_eight(jobs, "P100"),
)
