"""Any interleaving of take, read, commit, leave, loss, redo and a new master trains every record exactly once."""

import json
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from concertina.core import shard_ledger as ledger
from concertina.core.shard_ledger import EpochOver, Granted, Refused, Shards, Span

Record = tuple[int, int, int]  # epoch, piece, position


@dataclass
class Reader:
    """A worker as the world sees it: what it may read, and how far it is."""

    requests: int = 0
    open: dict[int, Span] = field(default_factory=dict)  # ticket -> what is left to read


class Job(RuleBasedStateMachine):
    """The world around the books: real lengths, real workers, and what really was part of committed steps."""

    @initialize(
        lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 3), hold=st.integers(1, 3)
    )
    def begin(self, lengths: list[int], seed: int, hold: int) -> None:
        self.lengths = lengths
        self.state: Shards = ledger.start(len(lengths), seed=seed, hold=hold)
        self.readers: dict[str, Reader] = {"w0": Reader(), "w1": Reader()}
        self.names = 2
        self.epoch = 0
        self.step = 1  # in flight
        self.in_flight: list[tuple[int, Record]] = []  # (step, record)
        self.trained: Counter[Record] = Counter()

    def some_reader(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.readers)))

    @rule()
    @precondition(lambda self: len(self.readers) < 4)
    def join(self) -> None:
        self.readers[f"w{self.names}"] = Reader()
        self.names += 1

    @rule(data=st.data(), resend=st.booleans())
    @precondition(lambda self: self.readers)
    def take(self, data: st.DataObject, resend: bool) -> None:
        self.take_for(self.some_reader(data), resend)

    def take_for(self, name: str, resend: bool) -> None:
        reader = self.readers[name]
        self.state, answer = ledger.take(self.state, name, reader.requests + 1, self.epoch)
        if isinstance(answer, Granted):
            if resend:
                self.state, again = ledger.take(self.state, name, reader.requests + 1, self.epoch)
                assert again == answer
            reader.requests += 1
            assert answer.ticket not in reader.open
            reader.open[answer.ticket] = answer.span
            assert len(reader.open) <= self.state.hold
        elif isinstance(answer, EpochOver):
            self.check_epoch()
            self.epoch += 1
        elif isinstance(answer, Refused):
            assert len(reader.open) >= self.state.hold  # more, where a redo has made read pieces unread

    @rule(data=st.data(), count=st.integers(0, 3), twice=st.booleans())
    @precondition(lambda self: any(r.open for r in self.readers.values()))
    def read(self, data: st.DataObject, count: int, twice: bool) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, r in self.readers.items() if r.open)))
        ticket = data.draw(st.sampled_from(sorted(self.readers[name].open)))
        self.read_some(name, ticket, count, twice)

    def read_some(self, name: str, ticket: int, count: int, twice: bool) -> None:
        reader = self.readers[name]
        span = reader.open[ticket]
        stop = self.lengths[span.piece] if span.end is None else span.end
        to = min(stop, span.first + count)
        for position in range(span.first, to):
            self.in_flight.append((self.step, (self.epoch, span.piece, position)))
        ended = to == stop and span.end is None
        for _ in range(2 if twice else 1):
            self.state, refused = ledger.read(self.state, name, ticket, step=self.step, offset=to, ended=ended)
            assert refused is None, refused
        if to == stop:
            del reader.open[ticket]
        else:
            reader.open[ticket] = Span(span.piece, to, span.end)

    @rule(counts=st.lists(st.integers(0, 3), min_size=8, max_size=8), ahead=st.booleans())
    @precondition(lambda self: self.readers)
    def everybody_works(self, counts: list[int], ahead: bool) -> None:
        if ahead and self.step - self.state.committed < 3:
            self.step += 1  # before the commit of the step in flight is known
        for name in sorted(self.readers):
            self.take_for(name, resend=False)
        tickets = [(name, ticket) for name, reader in sorted(self.readers.items()) for ticket in reader.open]
        for (name, ticket), count in zip(tickets, counts, strict=False):
            self.read_some(name, ticket, count, twice=False)

    @rule(behind=st.integers(0, 2))
    def commit(self, behind: int) -> None:
        done = max(self.state.committed, self.step - behind)
        self.state = ledger.commit(self.state, done)
        self.trained.update(record for step, record in self.in_flight if step <= done)
        self.in_flight = [(step, record) for step, record in self.in_flight if step > done]
        self.step = max(self.step, done + 1)

    @rule()
    def redo(self) -> None:
        """A crash: what is not committed was for nothing, members go on from what the books say."""
        self.state = ledger.roll_back(self.state)
        self.in_flight = []
        self.step = self.state.committed + 1
        for name, reader in self.readers.items():
            reader.open = {g.ticket: g.span for g in ledger.holdings(self.state, name)}

    @rule(data=st.data())
    @precondition(lambda self: self.readers)
    def leave_or_be_lost(self, data: st.DataObject) -> None:
        name = self.some_reader(data)
        self.state = ledger.leave(self.state, name)
        del self.readers[name]

    @rule()
    def new_master(self) -> None:
        restored = ledger.from_json(json.loads(json.dumps(ledger.to_json(self.state))))
        assert restored == self.state
        self.state = restored

    @rule()
    def everybody_dies_and_a_checkpoint_of_now_is_used(self) -> None:
        self.state = ledger.begin_again(ledger.from_json(json.loads(json.dumps(ledger.to_json(self.state)))))
        self.in_flight, self.readers = [], {}
        self.step = self.state.committed + 1

    @invariant()
    def nothing_counts_twice(self) -> None:
        assert all(count == 1 for count in self.trained.values())

    @invariant()
    def the_books_know_what_members_hold(self) -> None:
        for name, reader in self.readers.items():
            assert reader.open == {g.ticket: g.span for g in ledger.holdings(self.state, name)}

    def check_epoch(self) -> None:
        wanted = {(self.epoch, piece, k) for piece, length in enumerate(self.lengths) for k in range(length)}
        assert {record for record in self.trained if record[0] == self.epoch} == wanted

    def teardown(self) -> None:
        """Whatever happened, one worker that goes on alone ends the epoch with everything trained once."""
        if not hasattr(self, "state"):
            return
        for name in list(self.readers):
            self.state = ledger.leave(self.state, name)
            del self.readers[name]
        self.redo()
        self.readers["last"] = Reader()
        epoch = self.epoch
        for _ in range(100):
            self.take_for("last", resend=False)
            if self.epoch > epoch:
                return
            for ticket in list(self.readers["last"].open):
                self.read_some("last", ticket, 2, twice=False)
            self.commit(0)
            self.nothing_counts_twice()
        raise AssertionError(f"the epoch does not end: {self.state}")


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
