"""ElasticFlow (ASPLOS 2023): Microsoft's ITP clusters, raw and completed, and the artifact's own traces.

Deadlines, models and batch sizes of the completed ones were drawn at random by their authors; arrivals,
devices and durations are production data. `num_iteration` is `duration` times the A100 throughput table.
"""

from __future__ import annotations

from collections.abc import Sequence

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, only_rows
from concertina.simulator.readers.row import Row

_T4_MODELS = frozenset({"cifar10", "imagenet", "ncf", "yolov3"})
_TABLES = ("throughput.csv", "../elasticflow/throughput.csv")


def _itp_cluster(jobs: Sequence[JobSpec]) -> str:
    """As the paper and its artifact do it: more nodes for longer traces."""
    nodes = next((n for most, n in ((200, 16), (1_000, 32), (10_000, 64)) if len(jobs) <= most), 128)
    return f"{nodes}x8:A100"


def _artifact_cluster(jobs: Sequence[JobSpec]) -> str:
    """The T4 models are those of the comparison with Pollux (figure 8a); the rest ran on A100 (figure 8b)."""
    return "16x4:T4" if any(job.model in _T4_MODELS for job in jobs) else "32x8:A100"


def _parse_itp(row: Row) -> JobSpec:
    submit = row.number_of("submission_time")
    return JobSpec(
        id=row.text("job_id"),
        submit_s=submit,
        gpus=row.count_of("num_gpu"),
        model=row.text("model_name"),
        batch_size=row.count_of("batch_size"),
        work=row.above_zero("num_iteration", unit="iterations"),
        duration_s=row.above_zero("duration"),
        deadline_s=row.number_of("deadline", least=submit, unit="s, the time of submission,"),
    )


def _parse_itp_raw(row: Row) -> JobSpec:
    return JobSpec(
        id=row.text("job_id"),
        submit_s=row.number_of("submission_time"),
        gpus=row.count_of("num_gpu"),
        duration_s=row.above_zero("duration"),
    )


def _parse_artifact(row: Row) -> JobSpec:
    submit = row.number_of("submit_time")
    real = "real_" if "real_iteration" in row and "real_duration" in row else ""
    return JobSpec(
        id=row.text("job_id"),
        submit_s=submit,
        gpus=row.count_of("num_gpu"),
        model=row.text("model_name"),
        batch_size=row.count_of("batch_size"),
        work=row.above_zero(f"{real}iteration", unit="iterations"),
        duration_s=row.above_zero(f"{real}duration"),
        deadline_s=row.number_of("ddl", least=submit, unit="s, the time of submission,"),
    )


ITP = TraceFormat(
    name="elasticflow-itp",
    about="Microsoft ITP with models and deadlines drawn by the ElasticFlow authors",
    required=(
        "job_id",
        "submission_time",
        "num_iteration",
        "model_name",
        "deadline",
        "batch_size",
        "num_gpu",
        "duration",
    ),
    parser=only_rows(_parse_itp),
    id_column="job_id",
    cluster=_itp_cluster,
    throughput=_TABLES,
)

ITP_RAW = TraceFormat(
    name="elasticflow-itp-raw",
    about="Microsoft ITP as recorded: arrivals, devices, durations",
    required=("job_id", "submission_time", "duration", "num_gpu"),
    parser=only_rows(_parse_itp_raw),
    id_column="job_id",
    cluster=_itp_cluster,
)

ARTIFACT = TraceFormat(
    name="elasticflow",
    about="traces of the ElasticFlow artifact",
    required=("job_id", "submit_time", "iteration", "model_name", "ddl", "batch_size", "num_gpu", "duration"),
    optional=("real_iteration", "real_duration"),
    parser=only_rows(_parse_artifact),
    id_column="job_id",
    cluster=_artifact_cluster,
    throughput=_TABLES,
)
