"""What can be wrong with a trace, and how it is said: what was seen, what was needed, what to try.

TraceError              a file that can not be read as what it was given as
+-- BadRowsError        some of its rows can not be used, and skipping them was not asked for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from concertina.core.errors import ConcertinaError


class TraceError(ConcertinaError, ValueError):
    """A trace or a throughput table that can not be read."""

    def __init__(self, *, source: str, seen: str, needed: str, hint: str = "") -> None:
        super().__init__(f"{source}: {seen}; needed {needed}" + (f"; {hint}" if hint else ""))
        self.source, self.seen, self.needed, self.hint = source, seen, needed, hint


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """One row that is not used, and why."""

    row: int
    """Counted from 1 below the header; line `row + 1` of a file without line breaks inside its cells."""
    column: str
    seen: str
    needed: str

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}: {self.seen}, needed {self.needed}"


class RowError(Exception):
    """Raised while one row is read and caught by whoever reads the rows; never leaves the readers."""

    def __init__(self, problem: RowProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class RowRuleError(RowError):
    """The row breaks the rules of its format."""


class RowUnusableError(RowError):
    """The row is as its format allows, but there is nothing in it to schedule: left out and counted."""


class BadRowsError(TraceError):
    """Rows that break the rules of their format."""

    def __init__(self, *, source: str, problems: Sequence[RowProblem], hint: str = "") -> None:
        first = problems[0]
        more = f" ({len(problems) - 1} more such rows)" if len(problems) > 1 else ""
        super().__init__(
            source=source,
            seen=f"row {first.row}, column {first.column}: {first.seen}",
            needed=first.needed + more,
            hint=hint or "correct the row, or pass --skip-bad-rows to leave such rows out and count them",
        )
        self.problems = tuple(problems)
