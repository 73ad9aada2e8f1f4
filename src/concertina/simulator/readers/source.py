"""From a file to its header and cells. Plain or gzip is told by the content, not by the name.

Knows nothing about traces: what the columns mean is the formats' business.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from concertina.simulator.readers.problems import RowProblem, TraceError

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text of a file."""

    source: str
    body: str
    cut_short: str = ""
    """Why the end is missing; empty if it is all there. The last, torn line is not part of `body`."""


def read_text(path: Path) -> Text:
    """The whole file, unpacked; a gzip stream that ends early gives what was in it, and says so."""
    source = path.name
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TraceError(source=str(path), seen="no such file", needed="a trace", hint=_others(path)) from None
    except OSError as error:
        raise TraceError(source=str(path), seen=error.strerror or str(error), needed="a readable file") from None
    cut_short = ""
    if raw.startswith(_GZIP):
        raw, cut_short = _unpack(source, raw)
    if cut_short:
        raw = raw[: raw.rfind(b"\n") + 1]
    try:
        return Text(source=source, body=raw.decode("utf-8-sig"), cut_short=cut_short)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        seen = f"line {line} is not text (byte {raw[error.start]:#04x})"
        raise TraceError(source=source, seen=seen, needed="UTF-8 text, plain or gzip") from None


def _others(path: Path) -> str:
    near = sorted(p.name for p in path.parent.glob("*.csv*")) if path.parent.is_dir() else []
    if near:
        return f"in that folder are {', '.join(near[:6])}{', ...' if len(near) > 6 else ''}"
    return "for a trace without any file try synthetic:jobs=500,seed=1"


def _unpack(source: str, raw: bytes) -> tuple[bytes, str]:
    """What was packed, and why its end is missing. Damage is no cut: nothing of it can be trusted."""
    parts: list[bytes] = []
    rest = raw
    while rest:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            parts.append(unpacker.decompress(rest))
        except zlib.error as error:
            if rest is not raw and not rest.strip(b"\0"):
                break  # padding behind the last member, as tar and block devices leave it
            raise TraceError(
                source=source,
                seen=f"its gzip data are damaged ({error})",
                needed="data that are what was packed",
                hint="fetch the file again",
            ) from None
        if not unpacker.eof:
            return b"".join(parts), f"its gzip data end early, after {len(raw)} bytes"
        rest = unpacker.unused_data
    return b"".join(parts), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A header and the rows below it."""

    source: str
    header: tuple[str, ...]
    rows: tuple[tuple[int, list[str]], ...]
    """(row number from 1, its cells). Empty lines are not rows; numbers do not count them."""
    cut_short: RowProblem | None = None


def read_sheet(path: Path) -> Sheet:
    """The cells of a comma- or tab-separated file with a header."""
    text = read_text(path)
    first = text.body.lstrip("\r\n").split("\n", 1)[0]
    lines = _numbered(text, "\t" if "\t" in first and "," not in first else ",")
    _, cells = next(lines, (0, None))
    if cells is None:
        raise TraceError(
            source=text.source,
            seen="the file is empty" + (f" because {text.cut_short}" if text.cut_short else ""),
            needed="a header and at least one row",
            hint="fetch the file again",
        )
    header = tuple(cell.strip() for cell in cells)
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise TraceError(source=text.source, seen=f"the header has column {twice!r} twice", needed="each column once")
    rows = tuple(lines)
    torn = (
        RowProblem(row=len(rows) + 1, column=header[0], seen=text.cut_short, needed="the whole file")
        if text.cut_short
        else None
    )
    return Sheet(source=text.source, header=header, rows=rows, cut_short=torn)


def _numbered(text: Text, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(number, cells) of every line that is not empty; the header has number 0."""
    number = -1
    reader = csv.reader(io.StringIO(text.body, newline=""), delimiter=delimiter)
    try:
        for cells in reader:
            if cells and (len(cells) > 1 or cells[0].strip()):
                number += 1
                yield number, cells
    except csv.Error as error:
        seen = f"line {reader.line_num} can not be split into cells ({error})"
        raise TraceError(source=text.source, seen=seen, needed="comma-separated values") from None
