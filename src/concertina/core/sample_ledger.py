"""The proof that every sample of an epoch was trained on once: what committed steps were made of, counted.

Pure. What a step was made of is told by *position* in what a virtual worker reads in an epoch: one range for one step
or many, in which padding counts as the samples it stands for. Feed only steps that are committed, each once: what is
told twice is counted twice, because two workers that both ran a virtual worker would look just like that.
"""

from dataclasses import dataclass, field

from concertina.core.errors import UsageError

Key = tuple[int, int, int, int]  # epoch, loader, pass over the loader in that epoch, virtual worker


@dataclass(slots=True)
class Stream:
    """What one virtual worker should read in a pass, and what of it was trained on."""

    expected: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # positions from, up to

    @property
    def seen(self) -> int:
        """Samples, doubles included."""
        return sum(end - first for first, end in self.spans)

    @property
    def different(self) -> int:
        """Samples, each counted once."""
        count = reached = 0
        for first, end in sorted(self.spans):
            count += max(0, end - max(first, reached))
            reached = max(reached, end)
        return count


@dataclass(slots=True)
class SampleLedger:
    """The books of a job."""

    streams: dict[Key, Stream] = field(default_factory=dict)

    def expect(self, epoch: int, virtual: int, samples: int, *, loader: int = 0, turn: int = 0) -> None:
        """In this pass, virtual worker `virtual` reads `samples` samples. May be told several times.

        Told beforehand for all virtual workers, one of which nothing is heard is missed as a whole.
        """
        stream = self.streams.setdefault((epoch, loader, turn, virtual), Stream())
        if stream.expected not in (0, samples):
            raise UsageError(
                f"{_where(epoch, loader, turn, virtual)}: {samples} samples are expected, it was {stream.expected} "
                "before; an epoch's length must not change while it is trained"
            )
        stream.expected = samples

    def record(self, epoch: int, virtual: int, first: int, end: int, *, loader: int = 0, turn: int = 0) -> None:
        """Committed steps trained positions first ... end - 1 of a virtual worker."""
        stream = self.streams.setdefault((epoch, loader, turn, virtual), Stream())
        if not 0 <= first <= end or (stream.expected and end > stream.expected):
            raise UsageError(
                f"{_where(epoch, loader, turn, virtual)}: positions {first} to {end - 1} were trained, "
                f"needed positions from 0 to {stream.expected - 1}"
            )
        stream.spans.append((first, end))

    def rows(self) -> list[dict[str, int]]:
        """One row per epoch and loader, as in the report: all is well where `duplicated` and `missed` are 0."""
        rows: dict[tuple[int, int], dict[str, int]] = {}
        for (epoch, loader, _, _), stream in sorted(self.streams.items()):
            row = rows.setdefault(
                (epoch, loader),
                {"epoch": epoch, "loader": loader, "expected": 0, "seen": 0, "duplicated": 0, "missed": 0},
            )
            different = stream.different
            row["expected"] += stream.expected
            row["seen"] += stream.seen
            row["duplicated"] += stream.seen - different
            row["missed"] += max(0, stream.expected - different)
        return [rows[key] for key in sorted(rows)]


def _where(epoch: int, loader: int, turn: int, virtual: int) -> str:
    pass_ = f", pass {turn}" if turn else ""
    return f"epoch {epoch}, loader {loader}{pass_}, virtual worker {virtual}"
