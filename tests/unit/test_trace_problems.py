"""What can not be used is named by row and column, and stops the reading or is skipped and counted."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from concertina.core.cluster import Cluster
from concertina.simulator.readers import BadRowsError, TraceError, fit_to, read_trace

HEADER = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration"
GOOD = "a,100,50,vgg16,900,32,8,10"


def _write(folder: Path, *rows: str, header: str = HEADER) -> str:
    (folder / "t.csv").write_text("\n".join((header, *rows)) + "\n")
    return str(folder / "t.csv")


BAD = [
    pytest.param("b,-5,50,vgg16,900,32,8,10", "submission_time", "-5 is below 0", id="negative time"),
    pytest.param("b,nan,50,vgg16,900,32,8,10", "submission_time", "'nan' is not a finite", id="NaN"),
    pytest.param("b,inf,50,vgg16,900,32,8,10", "submission_time", "'inf' is not a finite", id="infinity"),
    pytest.param("b,soon,50,vgg16,900,32,8,10", "submission_time", "'soon' is not a number", id="words"),
    pytest.param("b,100,50,vgg16,900,32,8,", "duration", "an empty cell", id="empty cell"),
    pytest.param("b,100,50,vgg16,900,32,8,0", "duration", "0", id="no duration"),
    pytest.param("b,100,50,vgg16,900,32,0,10", "num_gpu", "0 is below 1", id="no device"),
    pytest.param("b,100,50,vgg16,900,32,1.5,10", "num_gpu", "1.5 is not whole", id="half a device"),
    pytest.param("b,100,50,vgg16,50,32,8,10", "deadline", "50 is below 100", id="deadline before submission"),
    pytest.param("b,100,50,vgg16,900,32,8", "duration", "7 cells where the header has 8", id="short row"),
    pytest.param("b,100,50,vgg16,900,32,8,10,11", "duration", "9 cells where the header has 8", id="long row"),
    pytest.param("a,200,50,vgg16,900,32,8,10", "job_id", "'a' was already used in row 1", id="duplicate id"),
]


@pytest.mark.parametrize(("row", "column", "seen"), BAD)
def test_a_bad_row_stops_with_its_row_and_column(tmp_path: Path, row: str, column: str, seen: str) -> None:
    with pytest.raises(BadRowsError) as caught:
        read_trace(_write(tmp_path, GOOD, row))
    message = str(caught.value)
    assert message.startswith("t.csv: ")
    assert f"row 2, column {column}: " in message
    assert seen in message
    assert "needed " in message
    assert "--skip-bad-rows" in message


@pytest.mark.parametrize(("row", "column", "seen"), BAD)
def test_a_bad_row_is_skipped_and_counted_where_asked(tmp_path: Path, row: str, column: str, seen: str) -> None:
    trace = read_trace(_write(tmp_path, GOOD, row, "z,100,50,vgg16,900,32,8,10"), skip_bad_rows=True)
    assert [job.id for job in trace.jobs] == ["a", "z"]
    assert trace.rows == (1, 3)
    assert [(problem.row, problem.column) for problem in trace.skipped] == [(2, column)]
    assert seen in trace.skipped[0].seen


def test_all_bad_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError, match="2 more such rows") as caught:
        read_trace(_write(tmp_path, "a,-1,1,m,2,1,1,1", "b,-1,1,m,2,1,1,1", GOOD, "c,-1,1,m,2,1,1,1"))
    assert [problem.row for problem in caught.value.problems] == [1, 2, 4]


@pytest.mark.parametrize("lost", HEADER.split(","))
def test_a_missing_column_is_named_and_the_file_not_taken_for_another_format(tmp_path: Path, lost: str) -> None:
    columns = [column for column in HEADER.split(",") if column != lost]
    row = ",".join(cell for column, cell in zip(HEADER.split(","), GOOD.split(","), strict=True) if column != lost)
    for skip_bad_rows in (False, True):
        with pytest.raises(TraceError, match=rf"lacks column {lost}; needed .*elasticflow-itp"):
            read_trace(_write(tmp_path, row, header=",".join(columns)), skip_bad_rows=skip_bad_rows)


def test_columns_of_no_format_name_the_formats(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"the columns x, y are those of no known trace; .*philly.*tiresias"):
        read_trace(_write(tmp_path, "1,2", header="x,y"))


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="column 'num_gpu' twice"):
        read_trace(_write(tmp_path, GOOD + ",1", header=HEADER + ",num_gpu"))


def test_a_throughput_table_is_not_a_trace(tmp_path: Path) -> None:
    header = "gpu_type,model,global_batch_size,num_gpus,iterations_per_s"
    with pytest.raises(TraceError, match="pass this file with --throughput"):
        read_trace(_write(tmp_path, "A100,bert,64,1,6.03", header=header))


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")], ids=["nothing", "blank lines", "gzip"])
def test_an_empty_file_is_called_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.csv: the file is empty; needed a header and at least one row"):
        read_trace(str(tmp_path / "t.csv"))


def test_a_header_alone_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a header without rows; needed at least one job"):
        read_trace(_write(tmp_path))


def test_only_bad_rows_leave_nothing_to_simulate(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no usable row \(1 left out, first: row 1, column duration"):
        read_trace(_write(tmp_path, "b,100,50,vgg16,900,32,8,0"), skip_bad_rows=True)


def _cut_gzip(folder: Path, rows: int, keep: float) -> str:
    body = "\n".join((HEADER, *(f"j{i},{i * 7919 % 1000},50,vgg16,90000,32,8,{i + 1}" for i in range(rows)))) + "\n"
    packed = gzip.compress(body.encode())
    (folder / "t.csv.gz").write_bytes(packed[: int(len(packed) * keep)])
    return str(folder / "t.csv.gz")


def test_gzip_cut_short_stops_with_the_first_row_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BadRowsError, match=r"row \d+, column job_id: its gzip data end early, after \d+ bytes"):
        read_trace(_cut_gzip(tmp_path, 5000, 0.6))


def test_gzip_cut_short_gives_the_whole_rows_before_the_cut_where_asked(tmp_path: Path) -> None:
    trace = read_trace(_cut_gzip(tmp_path, 5000, 0.6), skip_bad_rows=True)
    assert 1000 < len(trace.jobs) < 5000
    assert [job.duration_s for job in trace.jobs] == list(range(1, len(trace.jobs) + 1))
    assert [problem.row for problem in trace.skipped] == [len(trace.jobs) + 1]


def test_gzip_cut_before_the_first_row_is_said_to_be_cut(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the file is empty because its gzip data end early"):
        read_trace(_cut_gzip(tmp_path, 5000, 0.0005), skip_bad_rows=True)


def test_damaged_gzip_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = Path(_cut_gzip(tmp_path, 5000, 1.0))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 40] = b"\0" * 40
    path.write_bytes(raw)
    for skip_bad_rows in (False, True):
        with pytest.raises(TraceError, match="its gzip data are damaged"):
            read_trace(str(path), skip_bad_rows=skip_bad_rows)


def test_bytes_that_are_no_text_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(f"{HEADER}\n{GOOD}\n".encode() + b"\xff\xfe\n")
    with pytest.raises(TraceError, match=r"line 3 is not text \(byte 0xff\); needed UTF-8"):
        read_trace(str(tmp_path / "t.csv"))


def test_no_such_file_names_what_is_there(tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    with pytest.raises(TraceError, match=r"no such file; needed a trace; in that folder are t\.csv"):
        read_trace(str(tmp_path / "u.csv"))


def test_a_folder_is_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="needed a readable file"):
        read_trace(str(tmp_path))


def test_a_job_larger_than_the_cluster_is_named_by_row_and_column(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, GOOD, "b,100,50,vgg16,900,32,64,10"))
    with pytest.raises(BadRowsError, match=r"row 2, column num_gpu: job 'b' asks for 64 .* at most 32") as caught:
        fit_to(trace, Cluster.parse("4x8:A100,1x4:T4"))
    assert "give a larger --cluster" in str(caught.value)


def test_a_job_larger_than_the_cluster_is_skipped_and_counted_where_asked(tmp_path: Path) -> None:
    trace = read_trace(_write(tmp_path, "b,100,50,vgg16,900,32,64,10", GOOD))
    fitted = fit_to(trace, Cluster.parse("4x8:A100"), skip_bad_rows=True)
    assert ([job.id for job in fitted.jobs], fitted.rows) == (["a"], (2,))
    assert [problem.row for problem in fitted.skipped] == [1]


def test_pollux_without_its_profiles_says_what_is_missing(tmp_path: Path) -> None:
    header = "load,workload,name,submit_s,application,num_replicas,batch_size"
    with pytest.raises(TraceError, match=r"no validation\.csv .* beside the workloads"):
        read_trace(_write(tmp_path, "1.0,1,n,1,bert,1,8", header=header) + "#load=1.0,workload=1")
