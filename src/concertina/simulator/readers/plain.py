"""Our own format, read and written: one column per field of `JobSpec`; `id`, `submit_s`, `gpus` required.

An empty cell is a field that was not given. `soft` and `mixed` are yes or no; several `device_types` are
joined with `+`. What is written is read back as the same jobs, bit for bit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import fields

from concertina.core.job import JobSpec
from concertina.simulator.readers.format import TraceFormat, nodes_of_eight, only_rows
from concertina.simulator.readers.row import Row

COLUMNS = tuple(field.name for field in fields(JobSpec))
_REQUIRED = ("id", "submit_s", "gpus")


def _number(row: Row, column: str) -> float | None:
    return row.number_of(column) if row.optional(column) else None


def _count(row: Row, column: str) -> int | None:
    return row.count_of(column) if row.optional(column) else None


def _flag(row: Row, column: str) -> bool:
    text = row.optional(column).lower()
    if text not in ("", "yes", "no", "true", "false", "1", "0"):
        row.bad(column, repr(text), "yes or no")
    return text in ("yes", "true", "1")


def _parse(row: Row) -> JobSpec:
    work, duration = _number(row, "work"), _number(row, "duration_s")
    if work is None and duration is None:
        row.bad("duration_s", "neither duration_s nor work", "one of them")
    return JobSpec(
        id=row.text("id"),
        submit_s=row.number_of("submit_s"),
        gpus=row.count_of("gpus"),
        name=row.optional("name"),
        user=row.optional("user"),
        model=row.optional("model") or None,
        batch_size=_count(row, "batch_size"),
        work=work,
        duration_s=duration,
        deadline_s=_number(row, "deadline_s"),
        soft=_flag(row, "soft"),
        min_workers=_count(row, "min_workers"),
        max_workers=_count(row, "max_workers"),
        device_types=tuple(row.optional("device_types").split("+")) if row.optional("device_types") else (),
        mixed=_flag(row, "mixed"),
    )


PLAIN = TraceFormat(
    name="concertina",
    about="our own: one column per field of a job",
    required=_REQUIRED,
    optional=tuple(column for column in COLUMNS if column not in _REQUIRED),
    parser=only_rows(_parse),
    id_column="id",
    gpus_column="gpus",
    select_by=("user",),
    cluster=lambda jobs: nodes_of_eight(jobs, "gpu"),
    throughput=("throughput.csv",),
)


def write_trace(jobs: Iterable[JobSpec]) -> str:
    """The jobs as text in our own format, without the columns that no job uses."""
    jobs = list(jobs)
    rows = [{column: _cell(getattr(job, column)) for column in COLUMNS} for job in jobs]
    used = [column for column in COLUMNS if column in _REQUIRED or any(row[column] for row in rows)]
    out = io.StringIO()
    writer = csv.DictWriter(out, used, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return "+".join(value)
    return str(value)
