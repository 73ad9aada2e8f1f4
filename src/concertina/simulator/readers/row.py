"""One row of a trace: cells by column name, read as the kind of value the format says they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from concertina.simulator.readers.problems import RowProblem, RowRuleError, RowUnusableError


class Row:
    """Cells by column. The getters raise `RowRuleError` with row and column where a cell can not be used."""

    __slots__ = ("_cells", "_where", "number")

    def __init__(self, number: int, cells: list[str], where: Mapping[str, int]) -> None:
        self.number, self._cells, self._where = number, cells, where

    def __contains__(self, column: str) -> bool:
        return column in self._where

    def check_width(self) -> None:
        """A row has as many cells as the header."""
        cells, columns = len(self._cells), len(self._where)
        if cells != columns:
            names = list(self._where)
            at = names[cells] if cells < columns else names[-1]
            self.bad(at, f"the row has {cells} cells where the header has {columns}", f"{columns} cells")

    def bad(self, column: str, seen: str, needed: str) -> NoReturn:
        """Say that this row breaks the rules of its format."""
        raise RowRuleError(RowProblem(row=self.number, column=column, seen=seen, needed=needed))

    def unusable(self, column: str, seen: str, needed: str) -> NoReturn:
        """Say that this row is in order but holds nothing to schedule."""
        raise RowUnusableError(RowProblem(row=self.number, column=column, seen=seen, needed=needed))

    def text(self, column: str) -> str:
        """The cell without surrounding blanks; it must not be empty."""
        value = self._cells[self._where[column]].strip()
        return value or self.bad(column, "an empty cell", "a value")

    def optional(self, column: str) -> str:
        """The cell, or an empty string where the cell or the whole column is missing."""
        position = self._where.get(column)
        return "" if position is None else self._cells[position].strip()

    def number_of(self, column: str, *, least: float = 0.0, unit: str = "s") -> float:
        """A finite number, `least` or more."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            self.bad(column, f"{text!r} is not a number", f"a number ({unit})")
        if not math.isfinite(value):
            self.bad(column, f"{text!r} is not a finite number", f"a number ({unit})")
        if value < least:
            self.bad(column, f"{text} is below {least:g}", f"{least:g} {unit} or more")
        return value

    def above_zero(self, column: str, *, unit: str = "s") -> float:
        """A finite number greater than 0."""
        value = self.number_of(column, unit=unit)
        return value if value > 0 else self.bad(column, self.text(column), f"more than 0 {unit}")

    def count_of(self, column: str, *, least: int = 1, unit: str = "") -> int:
        """A whole number, `least` or more."""
        text = self.text(column)
        if text.isdecimal() and (value := int(text)) >= least:
            return value
        number = self.number_of(column, least=least, unit=unit or "whole number")
        if number != int(number):
            self.bad(column, f"{text} is not whole", "a whole number")
        return int(number)
