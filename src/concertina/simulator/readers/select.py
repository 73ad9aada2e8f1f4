"""`FILE#column=value,...`: which part of a file is the trace.

Besides the columns that a format offers (`vc`, `load`, `workload`, `trace`, `user`), every trace
understands `first=N` (its first N jobs), `max_gpus=N` (jobs that ask for at most N devices) and `shift=yes`
(the clock starts with the first submission). `column=*` stands for every value there is, one trace for
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from concertina.simulator.readers.format import TraceFormat
from concertina.simulator.readers.problems import TraceError
from concertina.simulator.readers.source import Sheet

_ENDINGS = (".gz", ".csv", ".txt", ".tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A file and what to take from it."""

    path: Path
    text: str = ""
    """What stood behind the `#`."""
    values: tuple[tuple[str, str], ...] = ()
    first: int | None = None
    max_gpus: int | None = None
    shift: bool = False

    @property
    def name(self) -> str:
        """The file's name without its endings, with the selection."""
        stem = self.path.name
        while stem.endswith(_ENDINGS):
            stem = stem.rpartition(".")[0]
        return f"{stem}#{self.text}" if self.text else stem

    def check(self, sheet: Sheet, fmt: TraceFormat) -> None:
        """The columns are ones that split such a file, and where the rows need splitting they are split."""
        for column, _ in self.values:
            if column not in fmt.select_by:
                offered = ", ".join((*fmt.select_by, "first", "max_gpus", "shift"))
                raise TraceError(source=sheet.source, seen=f"#{column}=...", needed=f"one of {offered}")
        for column, value in self.values:
            known = values_of(sheet, column)
            if value not in known:
                raise TraceError(
                    source=sheet.source,
                    seen=f"no row with {column} {value!r}",
                    needed=f"one of {', '.join(known[:20])}{', ...' if len(known) > 20 else ''}",
                )
        chosen = {column for column, _ in self.values}
        missing = [column for column in fmt.select_by if column not in chosen] if fmt.must_select else []
        if missing:
            example = ",".join(f"{column}={values_of(sheet, column)[0]}" for column in missing)
            choices = "; ".join(f"{column} is one of {', '.join(values_of(sheet, column))}" for column in missing)
            raise TraceError(
                source=sheet.source,
                seen="a file that holds several traces",
                needed=f"which of them is meant, such as {self.path.name}#{example}",
                hint=choices,
            )


def values_of(sheet: Sheet, column: str) -> tuple[str, ...]:
    """All values of a column, in order of appearance."""
    at = sheet.header.index(column)
    return tuple(dict.fromkeys(cells[at].strip() for _, cells in sheet.rows if at < len(cells)))


def parse_source(source: str) -> Selection:
    """Take `FILE#column=value,...` apart."""
    file, mark, tail = source.rpartition("#")
    if not mark:
        return Selection(path=Path(source))
    values: list[tuple[str, str]] = []
    first = max_gpus = None
    shift = False
    for part in tail.split(","):
        column, equals, value = (piece.strip() for piece in part.partition("="))
        if not (column and equals and value):
            raise TraceError(source=file, seen=f"#{tail}", needed="column=value, separated by commas")
        if column == "first":
            first = _count(file, column, value)
        elif column == "max_gpus":
            max_gpus = _count(file, column, value)
        elif column == "shift":
            shift = value == "yes"
        else:
            values.append((column, value))
    return Selection(path=Path(file), text=tail, values=tuple(values), first=first, max_gpus=max_gpus, shift=shift)


def _count(file: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise TraceError(source=file, seen=f"#{key}={value}", needed=f"a whole number, 1 or more, for {key}")
    return int(value)


def expand(source: str, sheet: Sheet) -> list[str]:
    """`FILE#load=1.0,workload=*` as one source for each value there is."""
    file, _, tail = source.rpartition("#")
    parts = tail.split(",")
    for at, part in enumerate(parts):
        column, _, value = part.partition("=")
        if value.strip() == "*":
            if column.strip() not in sheet.header:
                raise TraceError(source=sheet.source, seen=f"#{part}", needed=f"one of {', '.join(sheet.header)}")
            return [
                one
                for found in values_of(sheet, column.strip())
                for one in expand(f"{file}#{','.join((*parts[:at], f'{column}={found}', *parts[at + 1 :]))}", sheet)
            ]
    return [source]
