"""Whatever bytes a file holds, reading it gives jobs or one sentence of ours, never another exception."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from concertina.core.job import JobSpec
from concertina.simulator.readers import Trace, TraceError, read_throughput, read_trace, write_trace

SAMPLES = (
    (
        b"job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
        b"a,100,50,vgg16,900,32,8,10\nb,101,51,bert,901,64,1,11\n"
    ),
    (
        b"job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
        b"best_effort,job_type\n3,vc,1,10,99,vgg16,5,8,7-9,10-5,0,soft\n"
    ),
    b"submit_s,num_gpus,duration_s,vc\n7,2,60,ab\n8,1,61,cd\n",
    b"id,submit_s,gpus,duration_s,deadline_s,soft,device_types\nx,0.5,2,10,20,yes,A100+T4\n",
)
CELLS = st.sampled_from(
    [
        b"",
        b"nan",
        b"-1",
        b"1e999",
        b"0",
        b"\xff",
        b'"',
        b",",
        b"\n",
        b"\0",
        b"1e3",
        b"-",
        b"x",
        b"\xe2\x80\xa8",
        b"#",
    ]
)
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _check(path: Path) -> None:
    for skip_bad_rows in (False, True):
        try:
            trace = read_trace(str(path), skip_bad_rows=skip_bad_rows)
        except TraceError:
            continue
        _check_jobs(trace)


def _check_jobs(trace: Trace) -> None:
    assert trace.jobs
    assert len({job.id for job in trace.jobs}) == len(trace.jobs) == len(trace.rows)
    assert all(math.isfinite(job.submit_s) and job.submit_s >= 0 and job.gpus >= 1 for job in trace.jobs)


@FEW
@given(sample=st.sampled_from(SAMPLES), where=st.floats(0, 1), change=CELLS, cut=st.integers(0, 12))
def test_a_damaged_trace_is_read_or_refused(
    tmp_path: Path, sample: bytes, where: float, change: bytes, cut: int
) -> None:
    at = int(where * len(sample))
    (tmp_path / "t.csv").write_bytes(sample[:at] + change + sample[at + cut :])
    _check(tmp_path / "t.csv")


@FEW
@given(content=st.binary(max_size=200))
@example(content=b"\x1f\x8b")
@example(content=b'"')
@example(content=b"\x1f\x8b\x08\x00")
def test_any_bytes_are_refused_in_our_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    _check(tmp_path / "t.csv")
    with pytest.raises(TraceError):
        read_throughput(tmp_path / "t.csv")


@FEW
@given(sample=st.sampled_from(SAMPLES), keep=st.floats(0, 1), flip=st.integers(0, 255), where=st.floats(0, 0.999))
def test_damaged_gzip_is_read_or_refused(tmp_path: Path, sample: bytes, keep: float, flip: int, where: float) -> None:
    packed = bytearray(gzip.compress(sample, mtime=0))
    packed[int(where * len(packed))] ^= flip
    (tmp_path / "t.csv").write_bytes(packed[: int(keep * len(packed))])
    _check(tmp_path / "t.csv")


TEXT = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
NUMBER = st.floats(0, 1e12, allow_nan=False)
JOBS = st.lists(
    st.builds(
        JobSpec,
        id=TEXT,
        submit_s=NUMBER,
        gpus=st.integers(1, 1024),
        user=st.one_of(st.just(""), TEXT),
        model=st.one_of(st.none(), TEXT),
        batch_size=st.one_of(st.none(), st.integers(1, 10**6)),
        work=st.one_of(st.none(), NUMBER),
        duration_s=NUMBER,
        deadline_s=NUMBER,
        soft=st.booleans(),
        mixed=st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda job: job.id,
)


@FEW
@given(jobs=JOBS)
def test_any_jobs_are_written_and_read_back_the_same(tmp_path: Path, jobs: list[JobSpec]) -> None:
    (tmp_path / "t.csv").write_text(write_trace(jobs), encoding="utf-8")
    assert list(read_trace(str(tmp_path / "t.csv")).jobs) == jobs
