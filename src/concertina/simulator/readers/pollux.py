"""Pollux (OSDI 2021): workloads of the AdaptDL simulator, and the profiles that give them work and speed.

A Pollux job ends after a number of epochs, and how many iterations those take depends on its batch size:
progress is counted in iterations of the smallest batch, and one iteration of a larger batch brings `gain`
of them, where the gain follows from the gradient noise measured per epoch (equation 5 of the paper).
`validation.csv` holds that noise, `placements.csv` and `scalability.csv` the step times; they lie beside
the workloads.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import ThroughputRow
from concertina.simulator.readers.format import ParseRow, TraceFormat
from concertina.simulator.readers.problems import BadRowsError, RowRuleError, TraceError
from concertina.simulator.readers.row import Row
from concertina.simulator.readers.source import Sheet, read_sheet

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs until a job of each application is done, as the AdaptDL simulator sets them."""

LOCAL_BATCH_LIMIT = {"yolov3": 8}
"""Largest batch per device where it is less than the largest one measured (same source)."""

_SLOTS = 4
"""Devices of a node of the measured cluster (g4dn.12xlarge)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What was measured at the end of one epoch with one batch size."""

    progress: float
    grad_sqr: float
    grad_var: float


Validation = Mapping[str, Mapping[int, list[Epoch]]]
"""model -> global batch size -> epochs."""


def read_validation(folder: Path) -> Validation:
    """The gradient noise that lies beside a workload file."""
    path = beside(folder, "validation.csv")
    if path is None:
        raise TraceError(
            source=folder.name,
            seen="no validation.csv or validation.csv.gz beside the workloads",
            needed="it, to know how many iterations a Pollux job takes",
            hint="put it into the same folder",
        )
    found: dict[str, dict[int, list[Epoch]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows(read_sheet(path), ("model", "batch_size", "progress", "grad_sqr", "grad_var")):
        epoch = Epoch(
            progress=row.number_of("progress", unit="iterations"),
            grad_sqr=row.number_of("grad_sqr", unit=""),
            grad_var=row.number_of("grad_var", unit=""),
        )
        found[row.text("model")][row.count_of("batch_size")].append(epoch)
    return found


def iterations(by_batch: Mapping[int, list[Epoch]], batch_size: int, epochs: int) -> float | None:
    """Iterations of `batch_size` until the job is done; None outside the measured batch sizes."""
    sizes = sorted(by_batch)
    if not sizes[0] <= batch_size <= sizes[-1]:
        return None
    above = sizes[bisect_left(sizes, batch_size)]
    below = above if above == batch_size else sizes[bisect_left(sizes, batch_size) - 1]
    share = (batch_size - below) / (above - below) if above > below else 0.0
    scale = batch_size / sizes[0]
    done = total = 0.0
    for index in range(epochs):
        low, high = by_batch[below][index], by_batch[above][index]
        sqr = low.grad_sqr + share * (high.grad_sqr - low.grad_sqr)
        var = low.grad_var + share * (high.grad_var - low.grad_var)
        gain = (var + sqr) / (var / scale + sqr)
        goal = min(measured[index].progress for measured in by_batch.values())
        total += (goal - done) / gain
        done = goal
    return total


def _parser(folder: Path) -> ParseRow:
    validation = read_validation(folder)
    known: dict[tuple[str, int], float | None] = {}

    def parse(row: Row) -> JobSpec:
        model, batch = row.text("application"), row.count_of("batch_size")
        if model not in validation or model not in EPOCHS:
            row.bad("application", repr(model), f"one of {', '.join(sorted(set(validation) & set(EPOCHS)))}")
        if (model, batch) not in known:
            known[model, batch] = iterations(validation[model], batch, EPOCHS[model])
        work = known[model, batch]
        if work is None:
            sizes = sorted(validation[model])
            row.bad("batch_size", f"{batch} for {model}", f"{sizes[0]} to {sizes[-1]}, as was measured")
        return JobSpec(
            id=row.text("name"),
            submit_s=row.number_of("submit_s"),
            gpus=row.count_of("num_replicas"),
            model=model,
            batch_size=batch,
            work=work,
        )

    return parse


POLLUX = TraceFormat(
    name="pollux",
    about="workloads of the AdaptDL simulator",
    required=("load", "workload", "name", "submit_s", "application", "num_replicas", "batch_size"),
    parser=_parser,
    id_column="name",
    gpus_column="num_replicas",
    select_by=("load", "workload"),
    must_select=True,
    cluster=lambda _jobs: "16x4:T4",
    throughput=("placements.csv.gz", "placements.csv", "../pollux/placements.csv.gz"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step with `local` samples on each device, and the part of it spent on the exchange."""

    local: int
    step_s: float
    sync_s: float


Measured = Mapping[str, Mapping[tuple[int, int], list[StepTime]]]
"""model -> (workers, nodes) -> step times by local batch size, ascending."""


def read_step_times(sheet: Sheet, folder: Path) -> Measured:
    """`placements.csv`, and `scalability.csv` if it lies beside it.

    Placements over as many nodes are averaged, but for those that fill their nodes: 24 stands for six
    devices on two nodes, 33 does not, because that is how a scheduler would place them.
    """
    raw: _Raw = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    packed: set[tuple[str, tuple[int, int]]] = set()
    for row in _rows(sheet, ("model", "placement", "local_bsz", "step_time_s", "sync_time_s")):
        model, shape = row.text("model"), shape_of(row, "placement")
        fills = sum(digit != str(_SLOTS) for digit in row.text("placement")) <= 1
        if fills and (model, shape) not in packed:
            packed.add((model, shape))
            raw[model][shape].clear()
        if fills or (model, shape) not in packed:
            raw[model][shape][row.count_of("local_bsz")].append(_times(row))
    more = beside(folder, "scalability.csv")
    columns = ("model", "num_nodes", "num_replicas", "local_bsz", "step_time_s", "sync_time_s")
    for row in _rows(read_sheet(more), columns) if more else ():
        shape = row.count_of("num_replicas"), row.count_of("num_nodes")
        raw[row.text("model")][shape][row.count_of("local_bsz")].append(_times(row))
    return {
        model: {
            shape: [_mean(local, times) for local, times in sorted(by_local.items())]
            for shape, by_local in by_shape.items()
        }
        for model, by_shape in raw.items()
    }


_Raw = defaultdict[str, defaultdict[tuple[int, int], defaultdict[int, list[tuple[float, float]]]]]


def _mean(local: int, times: list[tuple[float, float]]) -> StepTime:
    return StepTime(
        local=local,
        step_s=math.fsum(step for step, _ in times) / len(times),
        sync_s=math.fsum(sync for _, sync in times) / len(times),
    )


def shape_of(row: Row, column: str) -> tuple[int, int]:
    """(workers, nodes) of a placement written as one digit per node."""
    digits = row.text(column)
    if not digits.isdecimal() or "0" in digits:
        row.bad(column, repr(digits), "devices per node as digits, such as 44")
    return sum(map(int, digits)), len(digits)


def _times(row: Row) -> tuple[float, float]:
    return row.above_zero("step_time_s"), row.number_of("sync_time_s")


def speeds(measured: Measured, validation: Validation, model: str, batch_size: int) -> list[ThroughputRow]:
    """Rows of a throughput table for one model and global batch size; empty for a model not measured."""
    shapes = measured.get(model, {})
    if not shapes or model not in validation:
        return []
    locals_ = [time.local for times in shapes.values() for time in times]
    most = min(max(locals_), LOCAL_BATCH_LIMIT.get(model, max(locals_)))
    first = min(validation[model])
    rows = []
    for (workers, nodes), times in sorted(shapes.items()):
        local = math.ceil(batch_size / workers)
        parts = max(math.ceil(local / most), 2 if workers == 1 and batch_size > first else 1)
        time = _interpolate(times, math.ceil(local / parts))
        if time is None:
            continue
        seconds = time[0] + (parts - 1) * (time[0] - time[1])
        rows.append(
            ThroughputRow(
                model=model,
                batch_size=batch_size,
                device_type="T4",
                workers=workers,
                nodes=None if nodes == math.ceil(workers / _SLOTS) else nodes,
                iterations_per_s=1 / seconds,
            )
        )
    return rows


def _interpolate(times: list[StepTime], local: int) -> tuple[float, float] | None:
    at = bisect_left([time.local for time in times], local)
    if at == len(times) or (at == 0 and times[0].local != local):
        return None
    high = times[at]
    if high.local == local:
        return high.step_s, high.sync_s
    low = times[at - 1]
    share = (local - low.local) / (high.local - low.local)
    return low.step_s + share * (high.step_s - low.step_s), low.sync_s + share * (high.sync_s - low.sync_s)


def beside(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, plain or gzip; None if there is none."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _rows(sheet: Sheet, columns: tuple[str, ...]) -> list[Row]:
    missing = [column for column in columns if column not in sheet.header]
    if missing:
        seen = f"row 0 (the header) lacks column {' and '.join(missing)}"
        raise TraceError(source=sheet.source, seen=seen, needed=", ".join(columns))
    where = {column: index for index, column in enumerate(sheet.header)}
    rows = [Row(number, cells, where) for number, cells in sheet.rows]
    try:
        for row in rows:
            row.check_width()
    except RowRuleError as bad:
        raise BadRowsError(source=sheet.source, problems=(bad.problem,)) from None
    return rows
