"""Reading a script for lines that could be behind a difference."""

import ast
from pathlib import Path

import pytest

from concertina.verify.suspects import Suspicion, bare, carried_over, find_suspects, suspects_in


def found(source: str) -> list[tuple[str, int, str]]:
    return [(s.kind.name, s.line, s.name) for s in suspects_in(source, "train.py")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("g = torch.Generator()", ("GENERATOR", 1, "Generator")),
        ("g = random.Random(3)", ("GENERATOR", 1, "Random")),
        ("g = np.random.default_rng()", ("GENERATOR", 1, "default_rng")),
        ("t = time.time()", ("CHANCE", 1, "time")),
        ("b = os.urandom(4)", ("CHANCE", 1, "urandom")),
        ("p = os.getpid()", ("CHANCE", 1, "getpid")),
        ("k = hash(name)", ("CHANCE", 1, "hash")),
        ("n = session.workers", ("WORKERS", 1, "workers")),
        ("n = os.environ['N']", ("WORKERS", 1, "environ")),
        ("if session.is_main: pass", ("MAIN", 1, "is_main")),
        ("self.calls += 1", ("CARRIED", 1, "self.calls")),
        ("seen[k] += 1", ("CARRIED", 1, "seen")),
        ("self.mean = 0.9 * self.mean + x", ("CARRIED", 1, "self.mean")),
        ("mean[k] = 0.9 * mean.get(k, 1.0) + x", ("CARRIED", 1, "mean")),
    ],
)
def test_each_kind_of_line_is_seen(line: str, expected: tuple[str, int, str]) -> None:
    assert expected in found(line)


@pytest.mark.parametrize(
    "line", ["x = torch.randn(3)", "n = session.size", "self.mean = x.mean()", "table[k] = x", "loss = f(x)"]
)
def test_harmless_lines_are_not(line: str) -> None:
    assert found(line) == []


def carried(source: str) -> list[str]:
    loop = ast.parse(source).body[0]
    assert isinstance(loop, ast.For)
    return [name for name, _ in carried_over(loop)]


def test_a_variable_read_before_it_is_set_is_carried_over() -> None:
    assert carried("for x, y in loader:\n  loss = f(x, y)\n  average = 0.9 * average + loss\n") == ["average"]


def test_a_counter_is_carried_over() -> None:
    assert carried("for x in loader:\n  n += 1\n") == ["n"]


def test_a_list_that_grows_is_carried_over() -> None:
    assert carried("for x in loader:\n  history.append(f(x))\n") == ["history"]


def test_variables_set_before_they_are_read_and_names_only_read_are_not() -> None:
    assert carried("for x, y in loader:\n  loss = f(x, y, scale)\n  loss.backward()\n  z = [i for i in loss]\n") == []


def test_modules_beside_the_script_are_read_and_others_are_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import net\nimport torch\nfrom net import Net\n")
    (tmp_path / "net.py").write_text("import train\nrng = torch.Generator()\n")
    (tmp_path / "unrelated.py").write_text("rng = torch.Generator()\n")
    assert [(s.file, s.line, s.kind) for s in find_suspects(script)] == [("net.py", 2, Suspicion.GENERATOR)]


def test_a_module_that_cannot_be_parsed_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import net\nt = time.time()\n")
    (tmp_path / "net.py").write_text("def broken(:\n")
    assert [s.name for s in find_suspects(tmp_path / "train.py")] == ["time"]


@pytest.mark.parametrize(
    ("path", "name"), [("average", "average"), ("data.taken", "taken"), ("self.means[3]", "means"), ("m['a.b']", "m")]
)
def test_the_bare_name_of_a_path(path: str, name: str) -> None:
    assert bare(path) == name
