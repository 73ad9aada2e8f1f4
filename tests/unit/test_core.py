"""Vocabulary: environment variables, placements, messages, checkpoint manifests."""

import json
from pathlib import Path

import pytest

from concertina.core import checkpoints, messages
from concertina.core.env import WorkerEnv
from concertina.core.errors import CheckpointError, UsageError
from concertina.core.placement import VirtualPlacement
from concertina.master.machine import Change
from concertina.report import Generation, GenerationBook, Report, SampleBook
from concertina.runner import RunSettings, parse_changes


def test_a_worker_environment_survives_the_way_through_variables() -> None:
    env = WorkerEnv(virtual=8, worker=2, members=(0, 2, 5), generation=4, launched=True, run_dir="x y", hold_at=7)
    assert WorkerEnv.from_environ(env.to_environ()) == env


def test_a_newcomer_has_no_members_to_start_with() -> None:
    env = WorkerEnv(virtual=8, worker=2, members=())
    assert env.joins
    assert WorkerEnv.from_environ(env.to_environ()) == env


def test_without_variables_a_script_is_a_job_of_one() -> None:
    assert WorkerEnv.from_environ({}) == WorkerEnv()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"virtual": 0}, "at least 1 virtual worker"),
        ({"virtual": 2, "members": (0, 1, 2)}, "use 1 to 2 workers"),
        ({"level": "D9"}, "not one of D0, D1, D2"),
    ],
)
def test_senseless_environments_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        WorkerEnv(**fields)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="CONCERTINA_VIRTUAL='four'"):
        WorkerEnv.from_environ({"CONCERTINA_VIRTUAL": "four"})


def test_blocks_are_contiguous_and_even() -> None:
    assert VirtualPlacement.blocks(8, 3).workers == ((0, 1), (2, 3, 4), (5, 6, 7))
    assert VirtualPlacement.blocks(3, 3).one_each
    assert VirtualPlacement.blocks(8, 3).host(4) == 1


@pytest.mark.parametrize("workers", [((0, 1), ()), ((0,), (0, 1)), ((0, 2),)])
def test_a_placement_has_every_virtual_worker_once(workers: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        VirtualPlacement(workers)


def test_a_long_event_loses_text_not_structure() -> None:
    line = messages.encode({"event": "failed", "error": "x" * 10_000, "worker": 3})
    assert len(line) <= messages.MAX_LINE
    event = messages.decode(line)
    assert (event["event"], event["worker"]) == ("failed", 3)


def test_a_line_that_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError, match="not an event"):
        messages.decode(b"[1]")


def test_changes_are_read_in_order() -> None:
    assert parse_changes("40=4, 80=2") == (Change(40, 4), Change(80, 2))
    assert parse_changes("") == ()


@pytest.mark.parametrize("text", ["40", "x=4", "40=4,40=2", "40=4,30=2", "0=1", "5=0", "=", "40=4=2"])
def test_malformed_changes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--resize"):
        parse_changes(text)


def test_settings_refuse_what_cannot_run(tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text("pass")
    bad = tmp_path / "bad.py"
    bad.write_text("def")
    with pytest.raises(UsageError, match="is not a file"):
        RunSettings(script=tmp_path / "missing.py")
    with pytest.raises(UsageError, match="not a Python script"):
        RunSettings(script=bad)
    with pytest.raises(UsageError, match="needs 1 to 4 workers"):
        RunSettings(script=good, virtual=4, changes=(Change(3, 5),))
    with pytest.raises(UsageError, match="'odd' is not one of auto, shared"):
        RunSettings(script=good, reduction="odd")
    with pytest.raises(UsageError, match="needs --checkpoint DIR"):
        RunSettings(script=good, checkpoint_every=5)


def write_checkpoint(folder: Path, step: int) -> Path:
    path = folder / checkpoints.folder_name(step)
    path.mkdir(parents=True)
    (path / "shared.pt").write_bytes(b"state" * 100)
    files = {"shared.pt": checkpoints.file_entry(path / "shared.pt")}
    manifest = checkpoints.Manifest(step=step, epoch=0, virtual=4, environment={}, files=files)
    (path / "manifest.json").write_text(manifest.to_json())
    return path


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    newest = write_checkpoint(tmp_path, 10)
    assert checkpoints.newest_whole(tmp_path) == (newest, [])
    assert checkpoints.check_whole(newest).virtual == 4


def test_a_torn_checkpoint_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    older = write_checkpoint(tmp_path, 5)
    torn = write_checkpoint(tmp_path, 10)
    (torn / "shared.pt").write_bytes(b"state")
    found, passed_over = checkpoints.newest_whole(tmp_path)
    assert found == older
    assert "has 5 bytes instead of 500" in passed_over[0]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 5)
    (path / "shared.pt").write_bytes(b"stalE" * 100)
    with pytest.raises(CheckpointError, match="another hash"):
        checkpoints.check_whole(path)


def test_a_newer_format_a_damaged_manifest_and_no_checkpoint_are_told_apart(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", 5)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="upgrade concertina"):
        checkpoints.newest_whole(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.check_whole(path)
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        checkpoints.newest_whole(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.newest_whole(tmp_path / "empty")


def test_what_a_checkpoint_held_is_not_missed_by_the_job_that_goes_on_from_it() -> None:
    event = {"loader": 0, "epoch": 2, "turn": 0, "virtual": 1, "size": 4, "expected": 40}
    book = SampleBook(resumed=True)
    book.go_back(0, 25)  # the first of this run to begin; epoch 2 began after 20 rounds
    book.add({**event, "first": 5, "end": 10, "round": 25})
    book.add({**event, "epoch": 3, "first": 0, "end": 9, "round": 30})
    book.go_back(1, 37)  # all were lost: back to a checkpoint of this run
    book.add({**event, "epoch": 3, "first": 8, "end": 9, "round": 38})
    assert book.rows() == [
        {"epoch": 2, "loader": 0, "expected": 40, "seen": 40, "duplicated": 0, "missed": 0, "earlier": 20},
        {"epoch": 3, "loader": 0, "expected": 40, "seen": 32, "duplicated": 0, "missed": 8},
    ]
    told = SampleBook(resumed=True)  # the runs before told what they did, so nothing has to be believed
    told.begin_again()
    told.go_back(0, 25)
    told.add({**event, "first": 5, "end": 10, "round": 25})
    assert [row["missed"] for row in told.rows()] == [20]


def test_a_generation_that_is_told_of_after_its_steps_is_timed_at_the_end() -> None:
    book = GenerationBook(Report(virtual=2))
    told = {"event": "generation_started", "workers": 1, "members": [0], "reason": "", "at": 0.0}
    book.story({**told, "generation": 0, "step": 0})
    assert book.timed() == []
    book.note({"event": "step", "worker": 0, "step": 1, "at": 1.0})
    assert [row.generation for row in book.timed()] == [0]
    book.note({"event": "step", "worker": 0, "step": 2, "at": 2.0})
    book.story({**told, "generation": 1, "step": 1})
    assert book.timed() == []
    assert [row.generation for row in book.timed(at_the_end=True)] == [1]
    assert book.timed(at_the_end=True) == []


def test_longer_steps_after_a_change_are_no_pause() -> None:
    report = Report(virtual=4)
    book = GenerationBook(report)
    told = {"event": "generation_started", "members": [0], "reason": "", "at": 0.0}
    at, step = 0.0, 0
    for generation, (workers, pause, usual) in enumerate([(4, 0.0, 1.0), (2, 0.25, 2.0), (4, 0.5, 1.0)]):
        book.story({**told, "workers": workers, "generation": generation, "step": step})
        for k in range(7):
            step, at = step + 1, at + usual + (pause if k == 0 else 0.0)
            book.note({"event": "step", "worker": 0, "step": step, "at": at})
            assert (generation in [row.generation for row in book.timed()]) == (k == (5 if generation else 0))
    assert [row.stop_s for row in report.generations] == [0.0, 0.25, 0.5]


def test_a_step_that_nobody_told_of_is_no_part_of_the_pause_after_a_loss() -> None:
    """The main worker tells of a step when the next is complete; it is lost in between."""
    report = Report(virtual=4)
    book = GenerationBook(report)
    told = {"event": "generation_started", "workers": 2, "members": [0], "reason": "", "at": 0.0}
    book.story({**told, "generation": 0, "step": 0})
    for step in range(1, 6):
        book.note({"event": "step", "worker": 0, "step": step, "at": float(step)})
    book.story({**told, "generation": 1, "step": 6})
    for step in range(7, 13):
        book.note({"event": "step", "worker": 1, "step": step, "at": step + 3.0})
    assert [row.stop_s for row in report.generations] == [0.0, 3.0]


def test_a_run_that_goes_on_with_a_job_has_phases_of_its_own_start() -> None:
    report = Report(virtual=2)
    report.generations.append(Generation(0, 0, 1, "started, in an earlier run"))
    book = GenerationBook(report)
    book.story(
        {
            "event": "generation_started",
            "generation": 0,
            "step": 9,
            "workers": 1,
            "members": [3],
            "reason": "",
            "at": 1.0,
        }
    )
    book.note({"event": "worker_started", "worker": 3, "at": 1.5})
    book.note({"event": "joined", "worker": 3, "at": 3.5})
    assert [row.phases for row in report.generations] == [{}, {"start": 0.5, "import": 2.0}]


def test_two_changes_at_one_step_are_one_pause() -> None:
    report = Report(virtual=4)
    book = GenerationBook(report)
    told = {"event": "generation_started", "workers": 2, "members": [0], "reason": "", "at": 0.0}
    for generation, step in enumerate([0, 3, 3]):
        book.story({**told, "generation": generation, "step": step})
    for step in range(1, 6):
        book.note({"event": "step", "worker": 0, "step": step, "at": step + 9.0 * (step > 3)})
    assert [row.generation for row in book.timed(at_the_end=True)] == [0, 1, 2]
    assert [row.stop_s for row in report.generations] == [0.0, 0.0, 9.0]


def test_the_sample_book_counts_missed_and_doubled_batches() -> None:
    book = SampleBook()
    event = {"loader": 0, "epoch": 2, "turn": 0, "virtual": 1, "size": 4, "expected": 40}
    book.add({**event, "first": 0, "end": 4, "round": 20})
    book.add({**event, "first": 0, "end": 3, "round": 20})  # another worker saw the same rounds
    book.add({**event, "first": 3, "end": 9, "round": 24})  # batch 3 in a second round
    assert book.rows() == [{"epoch": 2, "loader": 0, "expected": 40, "seen": 40, "duplicated": 4, "missed": 4}]
