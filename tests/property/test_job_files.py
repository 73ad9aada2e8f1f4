"""Pages of a growing file against its lines: however it is cut, every whole line comes once and in order."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.server.files import Lines, read_lines, tail_start

pieces = st.lists(st.binary(max_size=40).map(lambda piece: piece.replace(b"\r", b"\n")), max_size=8)


@settings(max_examples=150, deadline=None)
@given(pieces, st.integers(1, 5), st.integers(60, 200))
def test_pages_of_a_file_that_grows_have_every_whole_line_once(written: list[bytes], limit: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        found: list[bytes] = []
        after = 0
        for piece in written:
            with path.open("ab") as file:
                file.write(piece)
            page = Lines([], after, False)
            for _ in range(len(b"".join(written)) + 1):  # a page of nothing that says there is more would never end
                page = read_lines(path, page.next, limit, size)
                found += page.lines
                if page.at_end:
                    break
            assert page.at_end
            after = page.next
        *whole, rest = b"".join(written).split(b"\n")
        if all(len(line) < size for line in (*whole, rest)):  # a line longer than a page is cut
            assert found == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([b"", b"a", b"bc"]), max_size=12), st.binary(max_size=3), st.integers(1, 6))
def test_the_tail_begins_so_many_whole_lines_before_the_end(lines: list[bytes], rest: bytes, count: int) -> None:
    rest = rest.replace(b"\n", b"x")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(b"".join(line + b"\n" for line in lines) + rest)
        assert read_lines(path, tail_start(path, count), 100).lines == lines[-count:]
