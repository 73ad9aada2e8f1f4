"""Who reads which piece of a sharded stream: the books behind `session.shards(items)` (EDL 5.3). Pure.

They are written for holders that come, go and are lost, and for steps that are decided later than they are read. In a
job the holders are its virtual workers, and every worker keeps the same copy of the books (`shard_deal.py`).

Pieces are numbers; what they stand for and how long they are, only the workers know. A worker asks for a piece when it
has begun to use up the one before, reports how far it has read for which step, and a step counts when it is committed.
Promise: over an epoch every record of every piece is part of committed steps exactly once, whoever leaves or is lost.

It holds if the caller saves `to_json` before it answers (a few numbers per worker), tells `commit` and `roll_back` in
the order in which steps were decided, and hears only members of the present generation: a report from before a
`roll_back` must not come in after it.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from concertina.core.errors import UsageError

FORMAT = 1
NOBODY = ""  # holder of what a lost worker had read for steps that are not decided yet


@dataclass(frozen=True, slots=True)
class Span:
    """Records of a piece from `first` up to, not including, `end`; None: up to where the piece ends."""

    piece: int
    first: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """For step `step`, the holder has read up to `offset`; `ended`: and the piece ends there."""

    step: int
    offset: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Held:
    """A span that was handed out; `span.first` moves on with committed steps, `marks` are of steps not decided yet."""

    ticket: int
    worker: str
    span: Span
    marks: tuple[Mark, ...] = ()

    @property
    def read_to(self) -> int:
        return self.marks[-1].offset if self.marks else self.span.first

    @property
    def all_read(self) -> bool:
        return bool(self.marks) and (self.marks[-1].ended or self.marks[-1].offset == self.span.end)


@dataclass(frozen=True, slots=True)
class Shards:
    """The whole state. Small: what was not handed out is a cursor into an order that seed and epoch give."""

    pieces: int
    seed: int = 0
    shuffle: bool = True
    hold: int = 2  # pieces a worker gets that it has not read to their end: one in use, one being fetched. More only
    # after a `roll_back`, when pieces that it had read are unread again
    epoch: int = 0
    cursor: int = 0  # pieces of this epoch that were handed out for the first time
    committed: int = 0  # newest step that counts
    tickets: int = 0  # given so far
    returned: tuple[Span, ...] = ()
    held: tuple[Held, ...] = ()
    answered: tuple[tuple[str, int, int], ...] = ()  # (worker, its newest request that was granted, ticket)

    @property
    def over(self) -> bool:
        """Every record of this epoch is part of a committed step."""
        return self.cursor == self.pieces and not self.returned and not self.held


# Answers.
@dataclass(frozen=True, slots=True)
class Granted:
    """Read this span; name the ticket in reports."""

    ticket: int
    span: Span


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to hand out now, but the epoch is not over. Ask again after the next commit."""

    reason: str


@dataclass(frozen=True, slots=True)
class EpochOver:
    epoch: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing has changed."""

    reason: str


Answer = Granted | Wait | EpochOver | Refused


def start(pieces: int, *, seed: int = 0, shuffle: bool = True, hold: int = 2, committed: int = 0) -> Shards:
    if pieces < 1:
        raise UsageError(f"session.shards got {pieces} items, needed 1 or more")
    if hold < 1:
        raise UsageError(f"a worker may hold {hold} pieces, needed 1 or more; 2 reads one while it fetches the next")
    return Shards(pieces, seed, shuffle, hold, committed=committed)


@lru_cache(maxsize=4)
def order(pieces: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The pieces in the order of an epoch. Kept, since it is asked for with every piece."""
    numbers = list(range(pieces))
    random.Random(f"{seed} {epoch}").shuffle(numbers)
    return tuple(numbers)


def take(state: Shards, worker: str, request: int, epoch: int) -> tuple[Shards, Answer]:
    """A piece for `worker`. `request` counts up with every new request of it; the same one again has the same answer.

    The first who asks for the next epoch after one is over opens it.
    """
    if not worker:
        raise UsageError("a worker without a name asked for a piece, needed one to know whose it is")
    if epoch < state.epoch:
        return state, EpochOver(epoch)
    if epoch > state.epoch and not (epoch == state.epoch + 1 and state.over):
        return state, Wait(f"epoch {state.epoch} is not over, so epoch {epoch} cannot begin")
    if epoch > state.epoch:
        state = replace(state, epoch=epoch, cursor=0)
    for asked, newest, ticket in state.answered:
        if asked == worker and request <= newest:
            return state, _again(state, request, newest, ticket)
    if state.over:
        return state, EpochOver(epoch)
    having = sum(h.worker == worker and not h.all_read for h in state.held)
    if having >= state.hold:
        return state, Refused(f"worker {worker} has {having} pieces to read already, at most {state.hold} at once")
    if state.returned:
        span, state = state.returned[0], replace(state, returned=state.returned[1:])
    elif state.cursor < state.pieces:
        here = order(state.pieces, state.seed, epoch)[state.cursor] if state.shuffle else state.cursor
        span, state = Span(here), replace(state, cursor=state.cursor + 1)
    else:
        return state, Wait("every piece is handed out, some are not trained yet and may come back")
    ticket = state.tickets
    answered = (*(a for a in state.answered if a[0] != worker), (worker, request, ticket))
    held = (*state.held, Held(ticket, worker, span))
    return replace(state, tickets=ticket + 1, held=held, answered=answered), Granted(ticket, span)


def _again(state: Shards, request: int, newest: int, ticket: int) -> Answer:
    for held in state.held:
        if held.ticket == ticket and request == newest:
            return Granted(ticket, held.span)
    return Refused(f"request {request} was answered before, the newest is {newest}; count up")


@dataclass(frozen=True, slots=True)
class Report:
    """A worker has read what it holds under `ticket` up to `offset`; `ended`: and the piece ends there."""

    worker: str
    ticket: int
    offset: int
    ended: bool = False


def read(
    state: Shards, worker: str, ticket: int, *, step: int, offset: int, ended: bool = False
) -> tuple[Shards, Refused | None]:
    """For step `step`, the worker has read its span up to `offset`. May be told several times."""
    state, refused = read_all(state, step, (Report(worker, ticket, offset, ended),))
    return state, refused[0] if refused else None


def read_all(state: Shards, step: int, reports: Iterable[Report]) -> tuple[Shards, tuple[Refused, ...]]:
    """What all workers have read for a step, in one go. What is refused changes nothing, the rest counts."""
    held = {h.ticket: h for h in state.held}
    refused: list[Refused] = []
    for report in reports:
        found = held.get(report.ticket)
        if found is None or found.worker != report.worker:
            what = f"worker {report.worker} does not hold ticket {report.ticket}"
            refused.append(Refused(f"{what}; what it reads there does not count"))
            continue
        mark = Mark(step, report.offset, report.ended)
        if mark in found.marks or (found.all_read and report.offset == found.read_to):
            continue
        why = _wrong(state, found, mark)
        if why:
            where = f"worker {report.worker}, ticket {report.ticket}, piece {found.span.piece}"
            refused.append(Refused(f"{where}: {why}"))
            continue
        held[report.ticket] = replace(found, marks=(*(m for m in found.marks if m.step != step), mark))
    return replace(state, held=tuple(held.values())), tuple(refused)


def _wrong(state: Shards, held: Held, mark: Mark) -> str:
    if mark.step <= state.committed:
        return f"step {mark.step} is committed already, nothing can be added to it"
    if held.marks and mark.step < held.marks[-1].step:
        return f"step {mark.step} after step {held.marks[-1].step}"
    if mark.offset < held.read_to:
        return f"read to {mark.offset}, but it had read to {held.read_to}"
    if held.all_read:
        return f"read to {mark.offset}, beyond its end at {held.read_to}"
    if held.span.end is not None and mark.offset > held.span.end:
        return f"read to {mark.offset}, beyond its part, which ends at {held.span.end}"
    return ""


def commit(state: Shards, step: int) -> Shards:
    """Every step up to `step` counts. What was read for it will not be handed out again."""
    if step <= state.committed:
        return state
    return replace(_with_held(state, lambda h: _committed(h, step)), committed=step)


def _committed(held: Held, step: int) -> Held | None:
    counted = [m for m in held.marks if m.step <= step]
    if not counted:
        return held
    last = counted[-1]
    if last.ended or last.offset == held.span.end:
        return None
    return replace(held, span=replace(held.span, first=last.offset), marks=held.marks[len(counted) :])


def roll_back(state: Shards) -> Shards:
    """The steps that are not committed will be done again: nothing was read for them.

    Members go on from `holdings`; what lost workers had read for those steps is handed out again.
    """
    orphans = [h.span for h in state.held if h.worker == NOBODY]
    state = _with_held(state, lambda h: None if h.worker == NOBODY else replace(h, marks=()))
    return _give_back(state, orphans)


def leave(state: Shards, worker: str) -> Shards:
    """The worker is gone, by wish or not: what it has not read is handed out again at once.

    What it had read for steps that are not decided yet waits for `commit` or `roll_back`.
    """
    rest = [Span(h.span.piece, h.read_to, h.span.end) for h in state.held if h.worker == worker and not h.all_read]
    state = _with_held(state, lambda h: _orphaned(h) if h.worker == worker else h)
    state = replace(state, answered=tuple(a for a in state.answered if a[0] != worker))
    return _give_back(state, rest)


def _orphaned(held: Held) -> Held | None:
    if not held.marks:
        return None
    return replace(held, worker=NOBODY, span=replace(held.span, end=held.read_to))


def begin_again(state: Shards) -> Shards:
    """No worker is left and no step is in flight: as a job continues from a checkpoint that holds this state."""
    for worker in sorted({h.worker for h in state.held}):
        state = leave(state, worker)
    return roll_back(state)


def holdings(state: Shards, worker: str) -> tuple[Granted, ...]:
    """What a worker has and from where it goes on, by ticket; for a worker or a master that has to begin again."""
    return tuple(
        Granted(h.ticket, replace(h.span, first=h.read_to)) for h in state.held if h.worker == worker and not h.all_read
    )


def _with_held(state: Shards, change: Callable[[Held], Held | None]) -> Shards:
    changed = (change(h) for h in state.held)
    return replace(state, held=tuple(h for h in changed if h is not None))


def _give_back(state: Shards, spans: Iterable[Span]) -> Shards:
    """Adds spans to those that come next, in a fixed order; neighbours become one again."""
    merged: list[Span] = []
    for span in sorted((*state.returned, *spans), key=lambda s: (s.piece, s.first)):
        if span.first == span.end:
            continue
        if merged and (merged[-1].piece, merged[-1].end) == (span.piece, span.first):
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged.append(span)
    return replace(state, returned=tuple(merged))


# -- JSON --------------------------------------------------------------------------------------------------------


def to_json(state: Shards) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pieces": state.pieces,
        "seed": state.seed,
        "shuffle": state.shuffle,
        "hold": state.hold,
        "epoch": state.epoch,
        "cursor": state.cursor,
        "committed": state.committed,
        "tickets": state.tickets,
        "returned": [_plain(span) for span in state.returned],
        "held": [
            [h.ticket, h.worker, _plain(h.span), [[m.step, m.offset, m.ended] for m in h.marks]] for h in state.held
        ],
        "answered": [list(a) for a in state.answered],
    }


def from_json(value: Mapping[str, Any]) -> Shards:
    if value.get("format") != FORMAT:
        raise UsageError(
            f"the state of the shards has format {value.get('format')!r}, needed {FORMAT}; "
            "go on with the version that wrote it, or begin the epoch anew"
        )
    return Shards(
        pieces=value["pieces"],
        seed=value["seed"],
        shuffle=value["shuffle"],
        hold=value["hold"],
        epoch=value["epoch"],
        cursor=value["cursor"],
        committed=value["committed"],
        tickets=value["tickets"],
        returned=tuple(Span(*span) for span in value["returned"]),
        held=tuple(
            Held(ticket, worker, Span(*span), tuple(Mark(*m) for m in marks))
            for ticket, worker, span, marks in value["held"]
        ),
        answered=tuple((worker, request, ticket) for worker, request, ticket in value["answered"]),
    )


def _plain(span: Span) -> list[int | None]:
    return [span.piece, span.first, span.end]
