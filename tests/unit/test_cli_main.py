"""The command line as a whole: what it says to words that it does not know, and its exit code then."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from concertina.__main__ import main as start
from concertina.cli import main
from concertina.cli.places import STATE
from concertina.cli.up import way_here


def said(
    words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    monkeypatch.setattr("sys.argv", ["concertina", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["run", "--worker", "2", "train.py"], "no option --worker; did you mean --workers?"),
        (["submit", "--deadlin=2h", "train.py"], "no option --deadlin; did you mean --deadline?"),
        (["quote", "--epochs", "3", "train.py"], "no option --epochs; options of the script itself come after it"),
        (["profile", "-x", "train.py"], "no option -x; options of the script itself come after it"),
        (["verify", "nosuch.py"], "nosuch.py is not a file: give the path of a training script"),
    ],
)
def test_a_misspelt_option_is_no_script(
    words: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(words, monkeypatch, capsys) == (2, f"concertina: {answer}\n")


def test_an_unknown_policy_is_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, words = said(["up", "--policy", "fifoo"], monkeypatch, capsys)
    assert code == 2
    assert words.startswith("concertina: no policy named 'fifoo'; known: backfill, ")


def test_a_cluster_in_a_folder_of_its_own_says_how_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE, str(tmp_path))
    assert way_here(tmp_path, "http://127.0.0.1:8500") == ""
    assert way_here(tmp_path / "own", "http://127.0.0.1:8500") == "export CONCERTINA_URL=http://127.0.0.1:8500"


def test_ctrl_c_while_the_command_line_is_loaded_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "concertina.cli", Interrupted("concertina.cli"))
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 130
