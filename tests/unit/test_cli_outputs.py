"""Files and folders that a command could not write are found before it begins."""

from pathlib import Path

import pytest

from concertina.cli.outputs import check_output_file, check_output_folder, check_two_files
from concertina.core.errors import UsageError


def test_what_can_be_written_is_taken_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for path in (None, tmp_path / "old.json", tmp_path / "new.json", tmp_path / "a" / "b" / "new.json"):
        check_output_file("--report", path)
    for folder in (None, tmp_path, tmp_path / "a" / "b"):
        check_output_folder("--checkpoint", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"--report .*this is a folder"):
        check_output_file("--report", tmp_path)
    with pytest.raises(UsageError, match=r"--checkpoint .*this is a file"):
        check_output_folder("--checkpoint", file)
    for check in (check_output_file, check_output_folder):
        with pytest.raises(UsageError, match="file is a file, and a folder is needed there"):
            check("--x", file / "below" / "deep")


def test_what_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    for check in (check_output_file, check_output_folder):
        with pytest.raises(UsageError, match="may not be written to; choose another path"):
            check("--x", tmp_path / "new")


def test_two_outputs_need_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--report and --events are both x\.json"):
        check_two_files("--report", Path("x.json"), "--events", tmp_path / "x.json")
    check_two_files("--report", Path("x.json"), "--events", Path("y.json"))
    check_two_files("--report", None, "--events", Path("y.json"))
    check_two_files("--report", Path("/dev/null"), "--events", Path("/dev/null"))
