"""Gavel (OSDI 2020) and Shockwave (NSDI 2023): jobs as steps of a model, speeds in a table per device type.

Some of Gavel's (model, batch, devices) triples have no speed in its table; whoever joins the two leaves
those jobs out and counts them. Reinforcement learning and CycleGAN have no batch size: they are read as 1,
here and in the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, only_rows
from concertina.simulator.readers.row import Row

_MODES = ("static", "accordion", "gns")


def batch_size(row: Row) -> int:
    """The batch size; 1 for models that have none."""
    return row.count_of("batch_size") if row.optional("batch_size") else 1


def _parse_gavel(row: Row) -> JobSpec:
    return JobSpec(
        id=str(row.number),
        submit_s=row.number_of("arrival_s"),
        gpus=row.count_of("num_gpus"),
        user=row.text("vc"),
        model=row.text("model"),
        batch_size=batch_size(row),
        work=row.above_zero("total_steps", unit="steps"),
    )


def _parse_shockwave(row: Row) -> JobSpec:
    mode = row.text("adaptation_mode")
    if mode not in _MODES:
        row.bad("adaptation_mode", repr(mode), "static, accordion or gns")
    return JobSpec(
        id=str(row.number),
        name=f"{row.text('model')}-{mode}",
        submit_s=row.number_of("arrival_s"),
        gpus=row.count_of("num_gpus"),
        model=row.text("model"),
        batch_size=batch_size(row),
        work=row.above_zero("total_steps", unit="steps"),
        duration_s=row.above_zero("isolated_duration_s"),
    )


def _shockwave_cluster(jobs: Sequence[JobSpec]) -> str:
    """32, 128 and 256 devices for 120, 460 and 900 jobs, as in the paper's runs, in nodes of four."""
    nodes = next((n for most, n in ((120, 8), (460, 32)) if len(jobs) <= most), 64)
    return f"{nodes}x4:V100"


GAVEL = TraceFormat(
    name="gavel",
    about="Philly virtual clusters as steps of Gavel's models",
    required=("vc", "arrival_s", "model", "batch_size", "num_gpus", "total_steps"),
    parser=only_rows(_parse_gavel),
    gpus_column="num_gpus",
    select_by=("vc",),
    must_select=True,
    cluster=lambda _jobs: "9x4:V100,9x4:P100,9x4:K80",
    throughput=("throughput_isolated_simulation.csv", "../gavel/throughput_isolated_simulation.csv"),
)

SHOCKWAVE = TraceFormat(
    name="shockwave",
    about="Shockwave's synthetic traces with batch sizes that adapt",
    required=(
        "trace",
        "arrival_s",
        "model",
        "batch_size",
        "num_gpus",
        "total_steps",
        "adaptation_mode",
        "priority_weight",
        "isolated_duration_s",
    ),
    parser=only_rows(_parse_shockwave),
    gpus_column="num_gpus",
    select_by=("trace",),
    must_select=True,
    cluster=_shockwave_cluster,
)
