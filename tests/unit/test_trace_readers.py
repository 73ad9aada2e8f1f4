"""Every format is told by its columns, and its rows become the jobs they stand for."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from concertina.core.job import JobSpec
from concertina.simulator.readers import Trace, TraceError, read_trace, write_trace
from concertina.simulator.readers.registry import FORMATS
from concertina.simulator.readers.select import expand
from concertina.simulator.readers.source import read_sheet

VALIDATION = """model,batch_size,progress,iteration,metric,grad_sqr,grad_var
bert,8,100,100,1,1,3
bert,8,200,200,1,1,3
bert,16,120,60,1,1,3
bert,16,240,120,1,1,3
"""

SAMPLES: dict[str, tuple[str, JobSpec]] = {
    "elasticflow-itp": (
        (
            "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
            "a-1,100,3249,vgg16,900,32,8,1075\n"
        ),
        JobSpec(
            id="a-1",
            submit_s=100,
            gpus=8,
            model="vgg16",
            batch_size=32,
            work=3249,
            duration_s=1075,
            deadline_s=900,
        ),
    ),
    "elasticflow-itp-raw": (
        "job_id,submission_time,duration,num_gpu\na-1,100,1075,8\n",
        JobSpec(id="a-1", submit_s=100, gpus=8, duration_s=1075),
    ),
    "elasticflow": (
        (
            "job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,duration,iteration\n"
            "0,5,70,vgg16,90,64,4,30,31,71\n"
        ),
        JobSpec(id="0", submit_s=5, gpus=4, model="vgg16", batch_size=64, work=70, duration_s=30, deadline_s=90),
    ),
    "philly": (
        "submit_s,num_gpus,duration_s,vc\n7,2,60,ab\n",
        JobSpec(id="1", submit_s=7, gpus=2, duration_s=60, user="ab"),
    ),
    "chronus": (
        (
            "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,"
            "expect_value_list,best_effort,job_type\n3,vc,1,10,99,vgg16,5,8,7-9,10-5,0,soft\n"
        ),
        JobSpec(id="3", submit_s=600, gpus=1, user="vc", model="vgg16", duration_s=300, deadline_s=1020, soft=True),
    ),
    "gavel": (
        "vc,arrival_s,model,batch_size,num_gpus,total_steps\nab,6,A3C,,1,500\n",
        JobSpec(id="1", submit_s=6, gpus=1, user="ab", model="A3C", batch_size=1, work=500),
    ),
    "pollux": (
        "load,workload,name,submit_s,application,num_replicas,batch_size\n1.0,6,bert-0,16,bert,2,8\n",
        JobSpec(id="bert-0", submit_s=16, gpus=2, model="bert", batch_size=8, work=200),
    ),
    "rubick": (
        (
            "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla\n"
            "t5-2,3519,3312,t5,4,32,0,ga,8109,1\n"
        ),
        JobSpec(
            id="t5-2",
            submit_s=3519,
            gpus=4,
            user="sla",
            model="t5/ga",
            batch_size=1,
            work=8109,
            duration_s=3312,
        ),
    ),
    "shockwave": (
        (
            "trace,arrival_s,model,batch_size,num_gpus,total_steps,adaptation_mode,priority_weight,"
            "isolated_duration_s\nt,55,LM,10,1,1345,gns,1,1418\n"
        ),
        JobSpec(id="1", name="LM-gns", submit_s=55, gpus=1, model="LM", batch_size=10, work=1345, duration_s=1418),
    ),
    "tiresias": (
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,30,133,vgg11,147,23\n",
        JobSpec(id="0", submit_s=30, gpus=8, model="vgg11", duration_s=147),
    ),
    "concertina": (
        "id,submit_s,gpus,duration_s,deadline_s,soft,device_types\nx,0.5,2,10,20,yes,A100+T4\n",
        JobSpec(id="x", submit_s=0.5, gpus=2, duration_s=10, deadline_s=20, soft=True, device_types=("A100", "T4")),
    ),
}
SELECTOR = {"gavel": "#vc=ab", "pollux": "#load=1.0,workload=6", "shockwave": "#trace=t"}


def _read(folder: Path, text: str, selector: str = "", *, skip_bad_rows: bool = False) -> Trace:
    (folder / "trace.csv").write_text(text)
    return read_trace(f"{folder / 'trace.csv'}{selector}", skip_bad_rows=skip_bad_rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "validation.csv").write_text(VALIDATION)
    return tmp_path


def test_every_format_has_a_sample_here() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_row_becomes_the_job_it_stands_for(folder: Path, name: str) -> None:
    text, job = SAMPLES[name]
    trace = _read(folder, text, SELECTOR.get(name, ""))
    assert (trace.format, trace.jobs, trace.rows) == (name, (job,), (1,))


@pytest.mark.parametrize("name", SAMPLES)
def test_gzip_is_told_by_content_not_by_name(folder: Path, name: str) -> None:
    text, job = SAMPLES[name]
    (folder / "anything.dat").write_bytes(gzip.compress(text.encode()))
    assert read_trace(f"{folder / 'anything.dat'}{SELECTOR.get(name, '')}").jobs == (job,)


def test_columns_may_come_in_any_order_and_with_company(folder: Path) -> None:
    trace = _read(folder, "comment,num_gpu,duration,submission_time,job_id\nhello,8,1075,100,a-1\n")
    assert trace.jobs == (SAMPLES["elasticflow-itp-raw"][1],)


def test_a_larger_batch_of_pollux_takes_fewer_iterations_by_its_gain(folder: Path) -> None:
    text = SAMPLES["pollux"][0].replace(",2,8\n", ",2,16\n")
    # Noise 3, signal 1: a batch twice the smallest brings 4 / (3 / 2 + 1) = 1.6 iterations of it at once.
    assert _read(folder, text, "#load=1.0,workload=6").jobs[0].work == pytest.approx(200 / 1.6)


def test_chronus_jobs_without_a_device_are_left_out_and_counted(folder: Path) -> None:
    text = SAMPLES["chronus"][0]
    trace = _read(folder, text + "4,vc,0,10,99,vgg16,5,8,7,10,0,strict\n")
    assert [job.id for job in trace.jobs] == ["3"]
    assert [(row.row, row.column) for row in trace.left_out] == [(2, "num_gpu")]


@pytest.mark.parametrize(("kind", "deadline", "soft"), [("strict", 1020.0, False), ("best", None, False)])
def test_chronus_kinds_of_deadline(folder: Path, kind: str, deadline: float | None, soft: bool) -> None:
    job = _read(folder, SAMPLES["chronus"][0].replace("soft", kind)).jobs[0]
    assert (job.deadline_s, job.soft) == (deadline, soft)


PHILLY = "submit_s,num_gpus,duration_s,vc\n7,2,60,a\n8,64,60,b\n9,4,60,a\n11,1,60,a\n"


def test_a_selection_takes_the_rows_it_names(folder: Path) -> None:
    trace = _read(folder, PHILLY, "#vc=a")
    assert ([job.gpus for job in trace.jobs], trace.rows, trace.name) == ([2, 4, 1], (1, 3, 4), "trace#vc=a")


def test_first_max_gpus_and_shift_work_for_every_format(folder: Path) -> None:
    trace = _read(folder, PHILLY, "#max_gpus=4,first=2,shift=yes")
    assert [(job.submit_s, job.gpus) for job in trace.jobs] == [(0, 2), (2, 4)]


def test_shift_moves_deadlines_too(folder: Path) -> None:
    job = _read(folder, SAMPLES["elasticflow-itp"][0], "#shift=yes").jobs[0]
    assert (job.submit_s, job.deadline_s) == (0, 800)


def test_a_star_stands_for_every_value(folder: Path) -> None:
    (folder / "p.csv").write_text(PHILLY)
    assert expand("p.csv#vc=*,first=1", read_sheet(folder / "p.csv")) == [
        "p.csv#vc=a,first=1",
        "p.csv#vc=b,first=1",
    ]


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("#vc=z", "needed one of a, b"),
        ("#color=red", "needed one of vc, first, max_gpus, shift"),
        ("#vc", "column=value"),
        ("#first=none", "whole number"),
        ("#first=0", "1 or more"),
    ],
)
def test_a_selection_that_names_nothing_says_what_there_is(folder: Path, selector: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        _read(folder, PHILLY, selector)


def test_a_file_of_several_traces_asks_which(folder: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv#vc=ab; vc is one of ab"):
        _read(folder, SAMPLES["gavel"][0])


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("elasticflow-itp", "16x8:A100"),
        ("pollux", "16x4:T4"),
        ("rubick", "8x8:A800"),
        ("shockwave", "8x4:V100"),
    ],
)
def test_the_format_implies_a_cluster(folder: Path, name: str, cluster: str) -> None:
    assert _read(folder, SAMPLES[name][0], SELECTOR.get(name, "")).cluster == cluster


def test_philly_gets_the_nodes_that_its_demand_needs(folder: Path) -> None:
    demand = "submit_s,num_gpus,duration_s,vc\n0,8,1000,a\n100,2,10,a\n"  # 80.2 devices on average
    assert _read(folder, demand).cluster == "16x8:P100"


def test_our_own_format_is_read_back_bit_for_bit(folder: Path) -> None:
    jobs = (
        JobSpec(id="a", submit_s=0.1 + 0.2, gpus=1, duration_s=1 / 3),
        JobSpec(id='b,"x"', submit_s=1e-9, gpus=8, model="m", batch_size=64, work=1e6, user="ü", min_workers=1),
        JobSpec(id="c", submit_s=5, gpus=2, duration_s=9, deadline_s=50, soft=True, max_workers=4, mixed=True),
        JobSpec(id="d", submit_s=5, gpus=2, duration_s=9, device_types=("A100", "T4"), name="d d"),
    )
    assert _read(folder, write_trace(jobs)).jobs == jobs


def test_columns_nobody_uses_are_not_written() -> None:
    assert write_trace([JobSpec(id="a", submit_s=0, gpus=1, duration_s=2)]) == "id,submit_s,gpus,duration_s\na,0,1,2\n"


def test_a_throughput_table_near_the_trace_is_found(folder: Path) -> None:
    (folder / "throughput.csv").write_text("")
    assert _read(folder, SAMPLES["elasticflow-itp"][0]).throughput == folder / "throughput.csv"
