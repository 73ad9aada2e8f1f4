"""A trace meets its cluster and its speeds; whatever was assumed or left out is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from concertina.core.errors import InvalidClusterError
from concertina.simulator.readers import BadRowsError, TraceError
from concertina.simulator.scenario import load_scenario, load_scenarios

GAVEL = "vc,arrival_s,model,batch_size,num_gpus,total_steps\na,0,LM,5,1,500\na,1,LM,5,16,500\nb,1,LM,5,1,500\n"
SPEEDS = "gpu_type,consolidated,model,batch_size,num_gpus,steps_per_s\nv100,1,LM,5,1,9\nv100,1,LM,5,4,20\n"
PLAIN = "id,submit_s,gpus,duration_s,model,batch_size,work\nx,0,4,10,m,8,100\ny,0,64,10,m,8,100\n"
OWN = "model,batch_size,device_type,workers,iterations_per_s\nm,8,H200,1,3\nm,8,H200,8,20\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gavel.csv").write_text(GAVEL)
    (tmp_path / "throughput_isolated_simulation.csv").write_text(SPEEDS)
    (tmp_path / "plain.csv").write_text(PLAIN)
    (tmp_path / "own.csv").write_text(OWN)
    return tmp_path


def test_jobs_whose_speed_nobody_knows_are_left_out_and_counted(folder: Path) -> None:
    scenario = load_scenario(f"{folder / 'gavel.csv'}#vc=a")
    assert [job.id for job in scenario.jobs] == ["1"]
    assert any(note.startswith("1 row left out: row 2, column num_gpus: 16 devices") for note in scenario.notes)


def test_what_was_assumed_is_said(folder: Path) -> None:
    notes = load_scenario(f"{folder / 'gavel.csv'}#vc=a").notes
    assert any("throughput from throughput_isolated_simulation.csv, found near the trace" in note for note in notes)
    assert any(note.startswith("cluster 9x4:V100,9x4:P100,9x4:K80, as the trace implies") for note in notes)


def test_what_was_given_is_not_said_again(folder: Path) -> None:
    table = folder / "throughput_isolated_simulation.csv"
    assert load_scenario(f"{folder / 'gavel.csv'}#vc=b", cluster="2x4:V100", throughput=table).notes == ()


def test_steps_without_any_table_are_refused_in_one_sentence(folder: Path) -> None:
    (folder / "throughput_isolated_simulation.csv").unlink()
    with pytest.raises(TraceError, match=r"no job with a known speed.*pass one with --throughput"):
        load_scenario(f"{folder / 'gavel.csv'}#vc=a")


def test_a_job_outside_the_table_leans_on_its_duration(folder: Path) -> None:
    scenario = load_scenario(str(folder / "plain.csv"), throughput=folder / "own.csv", cluster="16x8")
    assert [job.work for job in scenario.jobs] == [100, None]
    assert any(note.startswith("1 jobs are not in the table at their size") for note in scenario.notes)


def test_a_cluster_without_a_type_gets_the_type_of_the_trace_or_the_table(folder: Path) -> None:
    gavel = load_scenario(f"{folder / 'gavel.csv'}#vc=b", cluster="2x4@r1,1x4:K80")
    assert [(node.device_type, node.rack) for node in gavel.cluster.nodes] == [
        ("V100", "r1"),
        ("V100", "r1"),
        ("K80", ""),
    ]
    plain = load_scenario(str(folder / "plain.csv"), throughput=folder / "own.csv", cluster="16x8")
    assert plain.cluster.types == ("H200",)


def test_a_table_of_other_devices_is_refused(folder: Path) -> None:
    with pytest.raises(TraceError, match="throughput of V100 alone; needed figures for A100"):
        load_scenario(f"{folder / 'gavel.csv'}#vc=b", cluster="2x4:A100")


def test_a_cluster_is_quoted_as_it_was_typed(folder: Path) -> None:
    with pytest.raises(InvalidClusterError, match="cluster 'many'"):
        load_scenario(f"{folder / 'gavel.csv'}#vc=b", cluster="many")


def test_a_job_larger_than_the_cluster_stops_or_is_counted(folder: Path) -> None:
    with pytest.raises(BadRowsError, match="row 2, column gpus: job 'y' asks for 64 devices"):
        load_scenario(str(folder / "plain.csv"), cluster="1x8")
    scenario = load_scenario(str(folder / "plain.csv"), cluster="1x8", skip_bad_rows=True)
    assert any(note.startswith("1 row skipped: row 2, column gpus") for note in scenario.notes)


def test_a_star_gives_one_scenario_for_each_value(folder: Path) -> None:
    names = [scenario.name for scenario in load_scenarios([f"{folder / 'gavel.csv'}#vc=*"])]
    assert names == ["gavel#vc=a", "gavel#vc=b"]


def test_traces_of_one_name_are_told_apart(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "plain.csv").write_text(PLAIN)
    sources = [
        str(folder / "plain.csv"),
        str(folder / "sub" / "plain.csv"),
        "synthetic:jobs=3",
        "synthetic:jobs=3",
    ]
    names = [scenario.name for scenario in load_scenarios(sources)]
    assert names == [
        f"{folder.name}/plain",
        "sub/plain",
        "synthetic:jobs=3 (1)",
        "synthetic:jobs=3 (2)",
    ]
