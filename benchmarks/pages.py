"""The pages under docs/results: puts what a benchmark found between its marks, and reads the tables again."""

import re
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "docs" / "results"
REMINDER = "what stands around the table there, and the line in README.md beside it, may have to be said anew"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    section: str  # the heading it stands under
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def put(page: Path, name: str, text: str) -> None:
    """Between the marks of that name; all else stays."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also:
        raise SystemExit(f"{page.name} has no place for the table: it needs the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def tables(text: str) -> list[Table]:
    """Every table of a page, in order."""
    found: list[Table] = []
    section, lines = "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")))
            continue
        if lines:
            head, _, *rows = lines
            found.append(Table(section=section, head=head, rows=tuple(rows)))
            lines = []
        if line.startswith("#"):
            section = line.lstrip("# ")
    return found


def table(text: str, *head: str, section: str = "") -> Table:
    """The first whose columns begin like this, under the heading that begins like that."""
    for found in tables(text):
        if found.head[: len(head)] == head and found.section.startswith(section):
            return found
    raise LookupError(f"no table with the columns {', '.join(head)} under {section or 'any heading'}")


def numbers(cell: str) -> list[float]:
    """All numbers in a cell, such as both of `1,925 of 2,396`."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(cell)]


def number(cell: str) -> float:
    """The first one."""
    return numbers(cell)[0]
