"""Lines of a script that could be behind a difference: read, never executed."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Suspicion(Enum):
    GENERATOR = "makes a random generator of its own"
    CHANCE = "is different in every run"
    WORKERS = "depends on the machine or the number of workers"
    MAIN = "acts on one worker only"
    CARRIED = "is carried from one loop body to the next"


@dataclass(frozen=True, slots=True)
class Suspect:
    """One place in the source."""

    kind: Suspicion
    file: str
    line: int
    text: str  # the source line
    name: str  # what caught the eye


GENERATORS = {"Generator", "Random", "SystemRandom", "default_rng", "RandomState", "PCG64", "MT19937"}
CHANCE = {
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow", "urandom",
    "getpid", "uuid1", "uuid4", "token_bytes", "token_hex", "randbits", "randbelow", "hash", "id", "get_ident",
    "process_time",
}  # fmt: skip
WORKERS = {
    "workers", "cpu_count", "environ", "getenv", "get_world_size", "get_rank", "device_count", "gethostname",
    "get_num_threads", "process_cpu_count", "sched_getaffinity",
}  # fmt: skip
GROWS = {"append", "extend", "add", "update", "appendleft", "popleft", "pop"}


def find_suspects(script: Path) -> list[Suspect]:
    """In the script and in the modules beside it that it imports."""
    found: list[Suspect] = []
    todo, seen = [script], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        found += suspects_in(source, path.name)
        todo += [file for file in (script.parent / f"{name}.py" for name in _imported(tree)) if file.is_file()]
    return found


def suspects_in(source: str, file: str) -> list[Suspect]:
    lines = source.splitlines()
    hits = sorted({(node_line, kind.name, name) for kind, node_line, name in _hits(ast.parse(source))})
    return [Suspect(Suspicion[kind], file, line, lines[line - 1].strip(), name) for line, kind, name in hits]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _hits(tree: ast.AST) -> Iterator[tuple[Suspicion, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            if name in GENERATORS:
                yield Suspicion.GENERATOR, node.lineno, name
            if name in CHANCE:
                yield Suspicion.CHANCE, node.lineno, name
            if name in {"cpu_count", "getenv", "device_count", "get_num_threads", "gethostname", "get_rank"}:
                yield Suspicion.WORKERS, node.lineno, name
        elif isinstance(node, ast.Attribute):
            if node.attr in WORKERS:
                yield Suspicion.WORKERS, node.lineno, node.attr
            if node.attr == "is_main":
                yield Suspicion.MAIN, node.lineno, node.attr
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute | ast.Subscript):
            target = node.target
            yield (
                Suspicion.CARRIED,
                node.lineno,
                ast.unparse(target.value if isinstance(target, ast.Subscript) else target),
            )
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            target = node.targets[0]
            kept = ast.unparse(target.value if isinstance(target, ast.Subscript) else target)
            if any(ast.unparse(part) == kept for part in ast.walk(node.value)):
                yield Suspicion.CARRIED, node.lineno, kept
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from ((Suspicion.CARRIED, node.lineno, name) for name in node.names)
        elif isinstance(node, ast.For):
            yield from ((Suspicion.CARRIED, line, name) for name, line in carried_over(node))


def bare(path: str) -> str:
    """The last name of a path: `taken` of `data.taken`, `averages` of `averages[3]`."""
    return path.partition("[")[0].rpartition(".")[2]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def carried_over(loop: ast.For) -> list[tuple[str, int]]:
    """Variables of a loop that its body reads before it sets them: (name, line where it is set)."""
    inner = {
        id(n) for child in ast.walk(loop) if isinstance(child, ast.For) and child is not loop for n in ast.walk(child)
    }
    events = [(name, stores, line, id_ in inner) for name, stores, line, id_ in _uses(loop.body)]
    bound = {name for name, _, _, _ in _uses([loop.target])}
    first: dict[str, bool] = {}
    for name, stores, _, _ in events:
        first.setdefault(name, stores)
    sets = {name: line for name, stores, line, inside in reversed(events) if stores and not inside}
    return [(name, line) for name, line in sets.items() if not first[name] and name not in bound]


def _uses(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool, int, int]]:
    """(name, is set, line, node) in the order of execution, roughly."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.AugAssign):
            yield from _uses([node.value])
            if isinstance(node.target, ast.Name):
                yield node.target.id, False, node.lineno, id(node)
            yield from _uses([node.target])
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            yield from _uses([] if node.value is None else [node.value])
            yield from _uses(node.targets if isinstance(node, ast.Assign) else [node.target])
        elif isinstance(node, ast.For | ast.comprehension):
            yield from _uses([node.iter, node.target, *(node.body if isinstance(node, ast.For) else node.ifs)])
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            yield from _uses([*node.generators, node.elt])
        elif isinstance(node, ast.Name):
            yield node.id, isinstance(node.ctx, ast.Store), node.lineno, id(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWS:
            yield from _uses([node.func.value, *node.args])
            if isinstance(node.func.value, ast.Name):
                yield node.func.value.id, True, node.lineno, id(node)
        else:
            yield from _uses(ast.iter_child_nodes(node))
