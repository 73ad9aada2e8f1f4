"""The pictures of docs/results show what the tables of their pages say, and look the same every time."""

import re
from pathlib import Path

import pytest
from benchmarks import chaos_table, live_replay, live_table, pages, pictures
from benchmarks.pictures_of_jobs import Compared, Pauses, draw_rescale, draw_sim_to_live, read_rescale, read_sim_to_live

from concertina.core.job import JobSpec

ONE_JOB = {"makespan_s": 90.0, "mean_jct_s": 80.0, "refused": ["chars-2-01"], "missed": []}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_new_as_the_table_it_was_drawn_from(name: str) -> None:
    drawn = (pages.RESULTS / f"{name}.svg").read_text()
    assert pictures.mark(pictures.rows(name)) in drawn, f"run python -m benchmarks.pictures {name}"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_on_its_page(name: str) -> None:
    assert f"]({name}.svg)" in (pages.RESULTS / pictures.PICTURES[name].page).read_text()


def test_every_picture_that_a_page_names_is_there() -> None:
    for page in pages.RESULTS.glob("*.md"):
        for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", page.read_text()):
            assert (page.parent / name).exists(), f"{page.name} shows {name}"


def test_the_index_names_every_page() -> None:
    index = (pages.RESULTS / "README.md").read_text()
    missing = [page.name for page in pages.RESULTS.glob("*.md") if page.name != "README.md" and page.name not in index]
    assert missing == []


def test_drawing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        pictures.draw("scheduling", folder)
    first, second = ((tmp_path / folder / "scheduling.svg").read_bytes() for folder in ("first", "second"))
    assert first == second


def test_pauses_are_read_from_both_tables_of_the_page() -> None:
    columns = "| MB of parameters | | growing | shrinking | moving one | step, ms |"
    head = f"{columns}\n|---|---|---|---|---|---|\n"
    page = (
        f"# Title\n\n{head}| 100 | **concertina** | 12 / 53 (20) | -1 / 1,062 (20) | not measured | 210 |\n"
        f"\n## On a GPU\n\n{head}| 1 | **concertina** | 17 / 19 (6) | 2 / 3 (6) | 9 / 33 (6) | 58 |\n"
    )
    found = read_rescale(page)
    assert found[0] == Pauses(device="on CPUs", way="concertina", megabytes=100, ms=((12, 53), (-1, 1062), None))
    assert [row.device for row in found] == ["on CPUs", "on a GPU"]
    draw_rescale(found)


def test_the_comparison_with_the_simulator_is_read_as_it_is_written() -> None:
    live = {**ONE_JOB, "jct_s": {"mlp-3-00": 80.4}, "slots": {"mlp-3-00": [[1.2, 2], [30.0, 4], [81.0, 0]]}}
    simulated = {
        **ONE_JOB,
        "jct_s": {"mlp-3-00": 78.0, "chars-2-01": 9.0},
        "slots": {"mlp-3-00": [[0.0, 4], [78.0, 0]]},
    }
    found = {
        "live": live,
        "simulated": simulated,
        "different": [],
        "compared": 1,
        "load": 0.5,
        "speeds": {"mlp": {"1": 1.24}},
        "costs": {"launch_s": 8.1, "grow_s": 2.0},
    }
    rows = read_sim_to_live(live_table.tables(found))
    assert rows == [
        Compared(name="mlp-3-00", jct_s=(80, 78), slots=(((1, 2), (30, 4), (81, 0)), ((0, 4), (78, 0)))),
        Compared(name="chars-2-01", jct_s=None, slots=((), ())),
    ]
    draw_sim_to_live(rows)


def test_the_table_of_runs_under_fire_names_what_went_wrong() -> None:
    quiet = {"jobs": 20, "seconds": 465.9, "kills": 0, "compared": 18, "different": [], "load": 0.4}
    quiet |= {"reclaims_s": [], "takeovers_s": [], "problems": [], "late": [], "live": {}}
    runs = [
        {**quiet, "kills": 50, "problems": ["slot n/0 has two jobs"], "different": ["a: weight"]},
        {**quiet, "reclaims_s": [1.0, 2.5, 1.5], "late": ["b missed its deadline"]},
        {**quiet, "kills": 2, "takeovers_s": [2.0, 2.25]},
    ]
    rows = pages.tables(live_table.under_fire(runs))[0].rows
    assert [(row[0].partition(":")[0], row[3], row[4], row[5]) for row in rows] == [
        ("the server killed 50 times", "17 of 18", "-", "slot n/0 has two jobs"),
        ("half of the slots reclaimed 3 times while all were busy", "18 of 18", "1.50 / 2.50", "b missed its deadline"),
        ("two servers on etcd, the leader killed 2 times", "18 of 18", "2.12 / 2.25", "none"),
    ]


def test_the_simulator_says_when_each_job_got_and_gave_slots() -> None:
    job = {"gpus": 4, "model": "mlp:3", "batch_size": 1, "work": 40.0, "min_workers": 1, "max_workers": 4}
    jobs = [JobSpec(id=f"mlp-3-{n:02d}", name="mlp-3", submit_s=5.0 * n, **job) for n in range(2)]
    speeds = {"mlp:3": {1: 1.0, 2: 2.0, 4: 4.0}}
    found = live_replay.simulated(live_replay.replay(jobs, 4, speeds, live_replay.Costs(launch_s=1, grow_s=1), "fifo"))
    assert found.slots == {"mlp-3-00": [(0.0, 1), (41.0, 0)], "mlp-3-01": [(5.0, 1), (46.0, 0)]}


def test_the_table_of_faults_counts_by_kind_and_phase_and_names_problems() -> None:
    runs = [
        {"faults": {"kill worker at step": 2, "cut links at joined": 1}, "seconds": 9.0, "problem": ""},
        {"faults": {"kill worker at step": 1}, "seconds": 30.0, "problem": "no result was written"},
    ]
    text = chaos_table.table({"runs": runs, "cores": 2, "load": 1.0, "at_once": 1})
    by_kind = pages.table(text, "struck at")
    step, joined = by_kind.head.index("step"), by_kind.head.index("newcomer joined")
    assert [row[step] for row in by_kind.rows if row[0] == "one worker killed"] == ["3"]
    assert [row[joined] for row in by_kind.rows if row[0] == "links to the master cut"] == ["1"]
    assert by_kind.rows[-1][-1] == "4"
    assert "no result was written" in text


def test_a_table_goes_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    pages.put(page, "a", "new")
    assert page.read_text() == "before\n<!-- a: begin -->\n\nnew\n\n<!-- a: end -->\nafter\n"
    with pytest.raises(SystemExit, match="<!-- b: begin -->"):
        pages.put(page, "b", "new")
