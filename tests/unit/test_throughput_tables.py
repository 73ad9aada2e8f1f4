"""Throughput tables of five formats become rows of iterations per second; what did not run is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from concertina.core.job import JobSpec
from concertina.policies.scaling_curve import ThroughputRow
from concertina.simulator.readers import BadRowsError, Throughput, TraceError, read_throughput

VALIDATION = "model,batch_size,progress,iteration,metric,grad_sqr,grad_var\nbert,8,1,1,1,1,3\nbert,64,1,1,1,1,3\n"


def _read(folder: Path, text: str, *jobs: JobSpec, skip_bad_rows: bool = False) -> Throughput:
    (folder / "table.csv").write_text(text)
    return read_throughput(folder / "table.csv", jobs, skip_bad_rows=skip_bad_rows)


def _row(model: str, batch: int, kind: str, workers: int, speed: float, nodes: int | None = None) -> ThroughputRow:
    return ThroughputRow(
        model=model, batch_size=batch, device_type=kind, workers=workers, iterations_per_s=speed, nodes=nodes
    )


def test_elasticflow_rows_keep_their_figures(tmp_path: Path) -> None:
    text = "gpu_type,model,global_batch_size,num_gpus,iterations_per_s\na100,bert,64,2,8.5\n"
    assert _read(tmp_path, text).table.rows == (_row("bert", 64, "A100", 2, 8.5),)


@pytest.mark.parametrize("figure", ["0", "nan", "0.0"])
def test_what_did_not_run_is_left_out_and_counted(tmp_path: Path, figure: str) -> None:
    text = f"gpu_type,model,global_batch_size,num_gpus,iterations_per_s\nA100,b,64,1,8\nA100,b,64,2,{figure}\n"
    found = _read(tmp_path, text)
    assert len(found.table.rows) == 1
    assert [(row.row, row.column) for row in found.left_out] == [(2, "iterations_per_s")]


def test_gavel_spread_jobs_are_told_from_compact_ones(tmp_path: Path) -> None:
    text = (
        "gpu_type,consolidated,model,batch_size,num_gpus,steps_per_s\n"
        "v100,1,LM,5,4,9\nv100,0,LM,5,4,7\nv100,0,LM,5,1,3\nk80,1,A3C,,1,2\n"
    )
    found = _read(tmp_path, text)
    assert found.table.rows == (
        _row("LM", 5, "V100", 4, 9),
        _row("LM", 5, "V100", 4, 7, nodes=2),
        _row("A3C", 1, "K80", 1, 2),
    )
    assert [row.row for row in found.left_out] == [3]


def test_rubick_takes_the_fewest_nodes_for_compact_and_averages_times(tmp_path: Path) -> None:
    text = (
        "model,exec_plan,placement,iter_time_s,forward,overlap_sync,optimize\n"
        "t5,ga,8,0.5,,,\nt5,ga,44,1,,,\nt5,ga,35,3,,,\nt5,ga,4,0,,,\n"
    )
    found = _read(tmp_path, text)
    assert found.table.rows == (_row("t5/ga", 1, "A800", 8, 2.0), _row("t5/ga", 1, "A800", 8, 0.5, nodes=2))
    assert [row.row for row in found.left_out] == [4]


def _pollux(folder: Path, *rows: str, batch: int = 8) -> dict[tuple[int, int | None], float]:
    (folder / "validation.csv").write_text(VALIDATION)
    text = "\n".join(("model,placement,local_bsz,step_time_s,sync_time_s", *rows)) + "\n"
    job = JobSpec(id="j", submit_s=0, gpus=1, model="bert", batch_size=batch, work=1)
    table = _read(folder, text, job).table
    return {(row.workers, row.nodes): row.iterations_per_s for row in table.rows}


def test_pollux_step_times_are_interpolated_to_the_batch_of_the_job(tmp_path: Path) -> None:
    assert _pollux(tmp_path, "bert,2,2,1.0,0.1", "bert,2,6,3.0,0.1") == {(2, None): pytest.approx(1 / 2.0)}


def test_pollux_batches_too_large_for_a_device_are_accumulated(tmp_path: Path) -> None:
    # 32 on two devices is 16 each, twice the largest measured: two steps of 8, the exchange in one alone.
    speeds = _pollux(tmp_path, "bert,2,4,1.0,0.25", "bert,2,8,2.0,0.5", batch=32)
    assert speeds == {(2, None): pytest.approx(1 / (2.0 + 1.5))}


def test_pollux_one_device_accumulates_above_the_first_batch(tmp_path: Path) -> None:
    assert _pollux(tmp_path, "bert,1,8,2.0,0.5", "bert,1,16,9.9,0.5", batch=16) == {(1, None): pytest.approx(1 / 3.5)}


def test_pollux_full_nodes_stand_for_compact_and_the_rest_is_averaged(tmp_path: Path) -> None:
    rows = ("bert,33,4,9.0,0", "bert,24,4,2.0,0", "bert,33,4,9.0,0", "bert,222,4,4.0,0", "bert,114,4,8.0,0")
    speeds = _pollux(tmp_path, *rows, batch=24)
    assert speeds[6, None] == pytest.approx(1 / 2.0)
    assert speeds[6, 3] == pytest.approx(1 / 6.0)


def test_pollux_batches_too_small_to_share_are_refused(tmp_path: Path) -> None:
    rows = ("bert,1,4,1.0,0", "bert,1,8,1.0,0", "bert,44,4,1.0,0")
    assert set(_pollux(tmp_path, *rows, batch=8)) == {(1, None)}


def test_pollux_scalability_beside_the_placements_adds_more_nodes(tmp_path: Path) -> None:
    text = "model,num_nodes,num_replicas,local_bsz,step_time_s,sync_time_s\nbert,6,24,1,5.0,0.1\n"
    (tmp_path / "scalability.csv").write_text(text)
    assert _pollux(tmp_path, "bert,1,8,2.0,0.5", batch=8)[1, None] == pytest.approx(1 / 2.0)
    assert _pollux(tmp_path, "bert,1,24,2.0,0.5", batch=24)[24, None] == pytest.approx(1 / 5.0)


def test_our_own_table_is_read(tmp_path: Path) -> None:
    text = "model,batch_size,device_type,workers,iterations_per_s,nodes\nm,8,H200,4,10,\nm,8,H200,4,9,2\n"
    assert _read(tmp_path, text).table.rows == (
        _row("m", 8, "H200", 4, 10),
        _row("m", 8, "H200", 4, 9, nodes=2),
    )


def test_bad_figures_stop_or_are_skipped(tmp_path: Path) -> None:
    text = "gpu_type,model,global_batch_size,num_gpus,iterations_per_s\nA100,b,64,1,fast\nA100,b,64,2,3\n"
    with pytest.raises(BadRowsError, match="row 1, column iterations_per_s: 'fast' is not a number"):
        _read(tmp_path, text)
    found = _read(tmp_path, text, skip_bad_rows=True)
    assert ([row.workers for row in found.table.rows], [row.row for row in found.skipped]) == ([2], [1])


def test_a_trace_is_not_a_throughput_table(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="those of no known throughput table"):
        _read(tmp_path, "submit_s,num_gpus,duration_s,vc\n1,2,3,a\n")
