"""Who may import what: the core nothing but the standard library, policies NumPy, and neither a clock."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "concertina"
IMPURE = {"time", "os", "socket", "asyncio", "threading", "subprocess", "logging"}
STDLIB = set(sys.stdlib_module_names) - IMPURE
OUTSIDE = {"core": STDLIB, "policies": STDLIB | {"numpy"}}
INSIDE = {"core": {"core"}, "policies": {"core", "policies"}, "simulator": {"core", "policies", "simulator"}}
SOLVERS = {"milp.py": {"highspy"}}
CORE_OF_OTHERS = {"env.py"}
"""Names environment variables for the runtime; its rules are its own."""


def imported(path: Path) -> set[str]:
    """Dotted names of every module a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
    return names


def files(folder: str) -> list[Path]:
    return [p for p in sorted((SOURCE / folder).rglob("*.py")) if p.name not in CORE_OF_OTHERS]


@pytest.mark.parametrize("folder", sorted(OUTSIDE))
def test_pure_folders_import_only_what_they_may(folder: str) -> None:
    for path in files(folder):
        others = {name.split(".")[0] for name in imported(path)} - {"concertina", "__future__"}
        assert others <= OUTSIDE[folder] | SOLVERS.get(path.name, set()), path.name


@pytest.mark.parametrize("folder", sorted(INSIDE))
def test_arrows_point_one_way(folder: str) -> None:
    for path in files(folder):
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("concertina.")}
        assert ours <= INSIDE[folder], path.name
