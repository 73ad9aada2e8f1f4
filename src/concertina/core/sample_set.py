"""A set of sample numbers that stays small for hundreds of millions of them: pages of bits, and a floor below which
all are in it.

Pure. A page is a Python integer of 4096 bits, so a range of samples is one operation per page. Numbers that come in
order cost nothing, a shuffled epoch one bit per sample until it is whole.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PAGE = 4096
FULL = (1 << PAGE) - 1  # one object for all full pages


class SampleSet:
    """Whole numbers from 0 up."""

    def __init__(self) -> None:
        self._floor = 0  # pages below are full and not kept
        self._pages: dict[int, int] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleSet) and (self._floor, self._pages) == (other._floor, other._pages)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __contains__(self, number: int) -> bool:
        return bool(self._page(number // PAGE) >> (number % PAGE) & 1)

    def _page(self, page: int) -> int:
        return FULL if page < self._floor else self._pages.get(page, 0)

    def add_range(self, first: int, end: int) -> "SampleSet":
        """Adds the numbers from `first` up to, not including, `end`; gives back those that were there already."""
        again = SampleSet()
        while first < end:
            page, low = divmod(first, PAGE)
            high = min(PAGE, end - page * PAGE)
            self._add(page, FULL if high - low == PAGE else ((1 << (high - low)) - 1) << low, again)
            first = page * PAGE + high
        return again

    def add(self, numbers: Iterable[int]) -> "SampleSet":
        """Adds numbers in any order; gives back those that were there already, or came twice."""
        again, masks = SampleSet(), dict[int, int]()
        for number in numbers:
            page, bit = number // PAGE, 1 << (number % PAGE)
            if masks.get(page, 0) & bit:
                again._add(page, bit, again)
            masks[page] = masks.get(page, 0) | bit
        for page, mask in masks.items():
            self._add(page, mask, again)
        return again

    def merge(self, other: "SampleSet") -> "SampleSet":
        """Adds all of another set; gives back those that were there already."""
        again = self.add_range(0, other._floor * PAGE)
        for page, mask in other._pages.items():
            self._add(page, mask, again)
        return again

    def _add(self, page: int, mask: int, again: "SampleSet") -> None:
        old = self._page(page)
        both = old & mask
        if both and again is not self:
            again._add(page, both, again)
        new = old | mask
        if new == old:
            return
        self.count += new.bit_count() - old.bit_count()
        self._pages[page] = FULL if new == FULL else new
        while self._pages.get(self._floor) == FULL:
            del self._pages[self._floor]
            self._floor += 1

    def ranges(self) -> Iterator[tuple[int, int]]:
        """As few ranges (first, end) as can be, in order."""
        first, end = (0, self._floor * PAGE) if self._floor else (-1, -1)
        for page in sorted(self._pages):
            for low, high in _runs(self._pages[page]):
                if page * PAGE + low != end:
                    if end >= 0:
                        yield first, end
                    first = page * PAGE + low
                end = page * PAGE + high
        if end >= 0:
            yield first, end

    def missing(self, total: int) -> Iterator[tuple[int, int]]:
        """The ranges of 0 ... total - 1 that are not in the set."""
        at = 0
        for first, end in self.ranges():
            if at < min(first, total):
                yield at, min(first, total)
            at = end
        if at < total:
            yield at, total

    def to_json(self) -> dict[str, Any]:
        """Full pages as runs, the others as packed bits."""
        partial = {page: mask for page, mask in sorted(self._pages.items()) if mask != FULL}
        full = _page_runs(sorted(page for page, mask in self._pages.items() if mask == FULL))
        bits = b"".join(mask.to_bytes(PAGE // 8, "little") for mask in partial.values())
        return {
            "full": [[0, self._floor], *full] if self._floor else full,
            "pages": list(partial),
            "bits": base64.b64encode(zlib.compress(bits, 1)).decode(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SampleSet":
        made = cls()
        for first, end in value["full"]:
            made.add_range(first * PAGE, end * PAGE)
        bits = zlib.decompress(base64.b64decode(value["bits"]))
        for k, page in enumerate(value["pages"]):
            made._add(page, int.from_bytes(bits[k * PAGE // 8 : (k + 1) * PAGE // 8], "little"), made)
        return made


def _runs(mask: int) -> Iterator[tuple[int, int]]:
    """Stretches of ones in a page, from low to high."""
    at = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        mask >>= zeros
        ones = (~mask & (mask + 1)).bit_length() - 1
        mask >>= ones
        yield at + zeros, at + zeros + ones
        at += zeros + ones


def _page_runs(pages: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1][1] += 1
        else:
            runs.append([page, page + 1])
    return runs
