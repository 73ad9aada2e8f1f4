"""Rubick (MLSys 2025): jobs with an execution plan. `steps` is the work; model and plan select a curve.

`duration` comes without a unit; steps times the measured iteration time says seconds. An SLA flag has no
time with it, so it makes no deadline; such jobs are told from the others by their user, `sla` against
`best-effort`.
"""

from __future__ import annotations

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, only_rows
from concertina.simulator.readers.row import Row


def curve_name(model: str, plan: str) -> str:
    """The name under which job and table meet."""
    return f"{model}/{plan}"


def _parse(row: Row) -> JobSpec:
    return JobSpec(
        id=row.text("name"),
        submit_s=row.number_of("submission_time"),
        gpus=row.count_of("num_gpus"),
        user="sla" if row.count_of("is_sla", least=0) else "best-effort",
        model=curve_name(row.text("application"), row.text("exec_plan")),
        batch_size=1,
        work=row.above_zero("steps", unit="steps"),
        duration_s=row.above_zero("duration"),
    )


RUBICK = TraceFormat(
    name="rubick",
    about="Alibaba Rubick: large models with execution plans",
    required=(
        "name",
        "submission_time",
        "duration",
        "application",
        "num_gpus",
        "num_cpus",
        "bandwidth",
        "exec_plan",
        "steps",
        "is_sla",
    ),
    parser=only_rows(_parse),
    id_column="name",
    gpus_column="num_gpus",
    cluster=lambda _jobs: "8x8:A800",
    throughput=("placements_a800.csv", "../rubick/placements_a800.csv"),
)
