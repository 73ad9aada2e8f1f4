"""The proof that every sample of an epoch was trained on once: what committed steps were made of, counted.

Pure. Two ways to say what a step was made of: by *position* in what a virtual worker reads in an epoch (the loader:
one range per step, and padding counts as the samples it stands for), or by *number* of the sample in the data (streams
and samplers of one's own). Feed only steps that are committed, each once: what is told twice is counted twice, because
two workers that both ran a virtual worker would look just like that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from concertina.core.errors import UsageError
from concertina.core.sample_set import SampleSet

FORMAT = 1
EVERYBODY = -1  # "virtual worker" of samples that are told by number: whoever trains one, it counts for the epoch
MOST_PROBLEMS = 20  # sentences that are kept; the counts are always complete

Key = tuple[int, int, int, int]  # epoch, loader, pass over the loader in that epoch, virtual worker


@dataclass(slots=True)
class Stream:
    """What should be trained in an epoch by one virtual worker, or by everybody, and what was."""

    expected: int = 0
    seen: int = 0  # samples of committed steps, doubles included
    once: SampleSet = field(default_factory=SampleSet)
    last_step: int = -1


@dataclass(slots=True)
class SampleLedger:
    """The books of a job, or of one worker: `merge` joins them."""

    streams: dict[Key, Stream] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one sentence for each doubled range, the first ones only

    def expect(self, epoch: int, virtual: int, samples: int, *, loader: int = 0, turn: int = 0) -> None:
        """In this pass, virtual worker `virtual` reads `samples` samples. May be told several times.

        Told beforehand for all virtual workers, one of which nothing is heard is missed as a whole.
        """
        stream = self.streams.setdefault((epoch, loader, turn, virtual), Stream())
        if stream.expected not in (0, samples):
            raise UsageError(
                f"epoch {epoch}, loader {loader}, {_who(virtual)}: {samples} samples are expected, it was "
                f"{stream.expected} before; an epoch's length must not change while it is trained"
            )
        stream.expected = samples

    def expect_numbers(self, epoch: int, samples: int, *, loader: int = 0, turn: int = 0) -> None:
        """In this pass, the samples 0 ... samples - 1 are read once each, whoever does."""
        self.expect(epoch, EVERYBODY, samples, loader=loader, turn=turn)

    def record(
        self, epoch: int, step: int, virtual: int, first: int, end: int, *, loader: int = 0, turn: int = 0
    ) -> None:
        """Committed step `step` (or the steps up to it) trained positions first ... end - 1 of a virtual worker."""
        key = (epoch, loader, turn, virtual)
        stream = self.streams.setdefault(key, Stream())
        if not 0 <= first <= end or (stream.expected and end > stream.expected):
            raise UsageError(
                f"{_where(key)}, step {step}: positions {first} to {end - 1} were trained, "
                f"needed positions from 0 to {stream.expected - 1}"
            )
        self._count(key, end - first, stream.once.add_range(first, end), step)

    def record_numbers(
        self, epoch: int, step: int, virtual: int, numbers: Iterable[int], *, loader: int = 0, turn: int = 0
    ) -> None:
        """Committed step `step` trained these samples of the data."""
        key = (epoch, loader, turn, EVERYBODY)
        stream = self.streams.setdefault(key, Stream())
        told = list(numbers)
        if told and (min(told) < 0 or (stream.expected and max(told) >= stream.expected)):
            raise UsageError(
                f"{_where(key)}, step {step}, virtual worker {virtual}: samples {min(told)} to {max(told)} were "
                f"trained, needed numbers from 0 to {stream.expected - 1}"
            )
        self._count(key, len(told), stream.once.add(told), step)

    def add(self, event: Mapping[str, Any]) -> None:
        """A worker's `samples` event: batches `first` up to `end` of `batches`, in samples `seen` of `expected`."""
        turn = event.get("turn", 0)
        where = {"loader": event["loader"], "turn": turn}
        self.expect(event["epoch"], event["virtual"], event["expected"], **where)
        first, end = positions(event["first"], event["end"], event["batches"], event["seen"], event["expected"])
        self.record(event["epoch"], event.get("step", 0), event["virtual"], first, end, **where)

    def merge(self, other: "SampleLedger") -> None:
        """Adds the books of another worker."""
        self.problems = (self.problems + other.problems)[:MOST_PROBLEMS]
        for key, theirs in sorted(other.streams.items()):
            epoch, loader, turn, virtual = key
            if theirs.expected:
                self.expect(epoch, virtual, theirs.expected, loader=loader, turn=turn)
            ours = self.streams.setdefault(key, Stream())
            self._count(key, theirs.seen, ours.once.merge(theirs.once), theirs.last_step)

    def _count(self, key: Key, seen: int, again: SampleSet, step: int) -> None:
        stream = self.streams[key]
        stream.seen += seen
        stream.last_step = max(stream.last_step, step)
        for first, end in again.ranges():
            if len(self.problems) >= MOST_PROBLEMS:
                break
            what = "samples" if key[3] == EVERYBODY else "positions"
            self.problems.append(f"{_where(key)}: {what} {first} to {end - 1} were trained again by step {step}")

    def rows(self) -> list[dict[str, int]]:
        """One row per epoch and loader, as in the report: all is well where `duplicated` and `missed` are 0."""
        rows: dict[tuple[int, int], dict[str, int]] = {}
        for (epoch, loader, _, _), stream in sorted(self.streams.items()):
            row = rows.setdefault(
                (epoch, loader),
                {"epoch": epoch, "loader": loader, "expected": 0, "seen": 0, "duplicated": 0, "missed": 0},
            )
            row["expected"] += stream.expected
            row["seen"] += stream.seen
            row["duplicated"] += stream.seen - len(stream.once)
            row["missed"] += max(0, stream.expected - len(stream.once))
        return [rows[key] for key in sorted(rows)]

    def missed(self, limit: int = MOST_PROBLEMS) -> list[str]:
        """One sentence for each range that was not trained, the first ones only."""
        found: list[str] = []
        for key, stream in sorted(self.streams.items()):
            for first, end in stream.once.missing(stream.expected):
                if len(found) == limit:
                    return found
                what = "samples" if key[3] == EVERYBODY else "positions"
                found.append(f"{_where(key)}: {what} {first} to {end - 1} were not trained")
        return found

    def to_json(self) -> dict[str, Any]:
        streams = [
            {"key": list(key), "expected": s.expected, "seen": s.seen, "once": s.once.to_json(), "step": s.last_step}
            for key, s in sorted(self.streams.items())
        ]
        return {"format": FORMAT, "streams": streams, "problems": list(self.problems)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SampleLedger":
        if value.get("format") != FORMAT:
            raise UsageError(
                f"the sample ledger has format {value.get('format')!r}, needed {FORMAT}; "
                "go on with the version that wrote it"
            )
        made = cls(problems=list(value["problems"]))
        for s in value["streams"]:
            epoch, loader, turn, virtual = s["key"]
            once = SampleSet.from_json(s["once"])
            made.streams[epoch, loader, turn, virtual] = Stream(s["expected"], s["seen"], once, s["step"])
        return made


def positions(first: int, end: int, batches: int, seen: int, expected: int) -> tuple[int, int]:
    """Batches as positions. All batches are of one size but the last, which may be shorter: `seen` says the rest."""
    if not 0 <= first <= end <= batches or not 0 <= seen <= expected:
        raise UsageError(f"batches {first} to {end - 1} of {batches} with {seen} of {expected} samples cannot be")
    if first == end:
        return 0, 0
    if end == batches:
        return expected - seen, expected
    size, rest = divmod(seen, end - first)
    if rest:
        raise UsageError(f"{seen} samples in batches {first} to {end - 1} of {batches}: they are not of one size")
    return first * size, end * size


def _who(virtual: int) -> str:
    return "all workers" if virtual == EVERYBODY else f"virtual worker {virtual}"


def _where(key: Key) -> str:
    epoch, loader, turn, virtual = key
    pass_ = f", pass {turn}" if turn else ""
    return f"epoch {epoch}, loader {loader}{pass_}, {_who(virtual)}"
