"""The layers may import only what STYLE allows, and pure modules touch no clock, process or socket."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "concertina"
STDLIB = set(sys.stdlib_module_names)
ALLOWED = {  # folder -> third-party packages, and folders of our own
    "core": (set(), {"core"}),
    "master": ({"zmq"}, {"core", "master", "store"}),
    "runtime": ({"torch", "numpy"}, {"core", "runtime", "master"}),
    "backends": (set(), {"core", "backends"}),
    "store": (set(), {"core", "store"}),
    "verify": (set(), {"core", "report", "runner", "verify"}),
    "policies": ({"numpy"}, {"core", "policies"}),
    "simulator": ({"numpy", "plotly", "rich"}, {"core", "policies", "simulator"}),
    "questions": ({"numpy"}, {"core", "policies", "simulator", "questions"}),
    "cluster": (
        set(),
        {
            "backends",
            "cluster",
            "core",
            "master",
            "policies",
            "questions",
            "report",
            "runner",
            "simulator",
            "store",
        },
    ),
    "server": (
        {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"},
        {"cluster", "core", "questions", "report", "server", "store"},
    ),
}
SOLVERS = {"milp.py": {"highspy"}}  # the one file that may ask a solver
SOLVERS |= {name: {"aetcd", "grpc"} for name in ("etcd.py", "etcd_members.py", "etcd_watch.py")}
SOLVERS |= {"ray.py": {"ray"}}
PURE = [
    "core",
    "policies",
    "questions",
    *(
        f"cluster/{name}.py"
        for name in (
            "asks",
            "codec",
            "curves",
            "evict",
            "grants",
            "hold",
            "keeper_book",
            "keeper_plan",
            "keys",
            "profiling",
            "prune",
            "records",
            "settle",
            "slots",
            "turn",
            "turn_books",
            "turn_round",
            "turn_types",
            "views",
            "writes",
        )
    ),
    "master/cut_links.py",
    "master/machine.py",
    "master/machine_change.py",
    "master/machine_end.py",
    "master/pause_clock.py",
    "master/machine_generation.py",
    "master/machine_loss.py",
    "master/machine_types.py",
    "master/speed_watch.py",
    "master/state_json.py",
    "master/words.py",
    "master/topology.py",
    "master/transfer_plan.py",
    "runtime/read_frames.py",
    "runtime/ring_order.py",
    "runtime/seals.py",
    "runtime/ways.py",
    "runtime/wire_frames.py",
    "server/limits.py",
    "server/views.py",
    "store/lease.py",
    "store/protocol.py",
]
IMPURE = {"time", "os", "socket", "asyncio", "threading", "subprocess", "logging"}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(where: str) -> list[Path]:
    path = SOURCE / where
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    packages, own = ALLOWED[folder]
    for path in files(folder):
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "concertina":
                assert rest.partition(".")[0] in own | {"__version__"}, f"{path.name} imports {name}"
            else:
                assert top in STDLIB | packages | SOLVERS.get(path.name, set()), f"{path.name} imports {name}"


def test_nothing_outside_the_runtime_imports_torch() -> None:
    outside = [path for path in files(".") if "runtime" not in path.relative_to(SOURCE).parts]
    assert [path.name for path in outside if "torch" in {name.partition(".")[0] for name in imports(path)}] == []


@pytest.mark.parametrize("where", PURE)
def test_a_pure_module_imports_nothing_that_acts(where: str) -> None:
    for path in files(where):
        touched = {name.partition(".")[0] for name in imports(path)} & IMPURE
        assert not touched, f"{path.name} imports {touched}"


def test_the_command_line_imports_neither_torch_nor_plotly() -> None:
    code = "import sys, concertina, concertina.cli; sys.exit(bool({'torch', 'plotly'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_front_door_of_the_runtime_is_small() -> None:
    import concertina
    from concertina import runtime

    assert runtime.__all__ == ["Session", "join"]
    assert concertina.join is runtime.join
    with pytest.raises(AttributeError, match="no attribute 'leave'"):
        _ = concertina.leave
