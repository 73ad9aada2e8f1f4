"""What `session.shards(items, read)` returns: a stream of records, in pieces that virtual workers take on demand.

The loop is that of `session.loader`. All workers keep the same books of who holds which piece and has trained how far
(`core/shard_deal.py`); before a round they tell each other what it will use up. So the books need no place of their
own: they are part of the state that every worker has, that a newcomer is given and that a checkpoint holds; after a
loss they are again what they were at the last recovery point. Who reads what, and so the result, does not depend on
the number of workers.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from concertina.core import shard_deal
from concertina.core.errors import UsageError
from concertina.core.shard_deal import Need, Stream
from concertina.runtime.arrays import stack
from concertina.runtime.fabric import Fabric
from concertina.runtime.loader import Pass, SessionLoader
from concertina.runtime.shard_reader import Read, ShardReader

if TYPE_CHECKING:
    from concertina.runtime.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How a stream is read."""

    batch_size: int = 1  # records per virtual worker and step
    shuffle: bool = True  # the order of the items; records of an item come in its own order
    seed: int = 0
    collate_fn: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r}: needs a whole number of records, 1 or more")


class ShardFeed:
    """The batches of the local virtual workers: in the place of a loader's `Feed`."""

    plan = None  # batches are not cut beforehand
    samples = sys.maxsize  # of a virtual worker in an epoch: nobody knows

    def __init__(self, items: Sequence[Any], read: Read, options: ShardOptions, virtual: int) -> None:
        self.dataset = items
        self.options = options
        self._virtual = virtual
        self._reader = ShardReader(items, read)
        self._streams: dict[int, Stream] = {}  # by rounds done; from the last recovery point on
        self._order: Sequence[int] = ()
        self._size = options.batch_size
        self._needs: list[Need] = []
        self.stream: Stream | None = None

    @property
    def batches(self) -> int:
        """Rounds of the epoch, as soon as they are known."""
        return self._now.rounds if self._now.over else sys.maxsize

    @property
    def _now(self) -> Stream:
        assert self.stream is not None
        return self.stream

    # -- where in the stream -----------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        self.restore(shard_deal.begin(len(self.dataset), epoch, self.options.seed, self.options.shuffle))

    def restore(self, stream: Stream) -> None:
        if stream.books.pieces != len(self.dataset):
            raise UsageError(
                f"session.shards got {len(self.dataset)} items, the job has had {stream.books.pieces}: the items must "
                "be the same on all workers and after a restart"
            )
        self.stream = stream
        self._streams = {stream.rounds: stream}

    def open(self, epoch: int, first_batch: int, order: Sequence[int], new_pass: bool = True) -> None:
        """Goes on from there, for the virtual workers that are here now."""
        self.stream = self._streams[first_batch]
        self._streams = {first_batch: self.stream}
        self._order = tuple(order)
        self._hold()

    def cut_from(self, batch: int, size: int) -> None:
        self._size = size

    def _hold(self) -> None:
        held = {v: shard_deal.held_by(self._now, v) for v in self._order}
        self._reader.hold(held, ready=2 * self._size + 1)

    # -- a round -----------------------------------------------------------------------------------------------------

    def agree(self, fabric: Fabric) -> None:
        """With all other workers: who reads what in the coming round. Raises PeersLost if one of them is gone."""
        tries = 0
        while not self._now.tail:
            self._needs = needs = self._exchange(fabric, tries)
            short = any(n.short for n in needs)
            if shard_deal.all_dealt(self._now) and short:
                self.stream = shard_deal.even_out(self._now, self._all_ends(fabric), self._size, self._virtual)
            elif any(n.wants for n in needs):
                self.stream = shard_deal.grant(self._now, needs)
            if self.stream is not self._streams[self._now.rounds]:
                self._hold()
            if not short:
                return
            tries += 1
        self._needs = shard_deal.tail_needs(self._now, self._virtual)

    def _exchange(self, fabric: Fabric, tries: int) -> list[Need]:
        """What every virtual worker needs, as its host knows."""
        mine = {}
        for v in self._order:
            there = self._reader.look(v, self._size + 1)
            mine[v] = shard_deal.need(shard_deal.held_by(self._now, v), there, self._size, tries)
        if fabric.size == 1:
            return [mine[v] for v in range(self._virtual)]
        nothing = [-1] * shard_deal.WORDS
        words = [w for v in range(self._virtual) for w in (mine[v].words() if v in mine else nothing)]
        rows = fabric.exchange([len(self.dataset), *words])
        for pieces, *_ in rows:
            if pieces != len(self.dataset):
                raise UsageError(
                    f"session.shards got {len(self.dataset)} items here and {pieces} on another worker: the items must "
                    "be the same, in the same order, on all workers"
                )
        best = [max(column) for column in list(zip(*rows, strict=True))[1:]]
        return [Need.of(best[v * shard_deal.WORDS : (v + 1) * shard_deal.WORDS]) for v in range(self._virtual)]

    def _all_ends(self, fabric: Fabric) -> dict[int, int]:
        mine = self._reader.ends()
        if fabric.size == 1:
            return mine
        packed = [f"{ticket} {end}" for ticket, end in mine.items()]
        found: dict[int, int] = {}
        for part in fabric.gather_bytes(",".join(packed).encode()):
            for pair in filter(None, part.decode().split(",")):
                ticket, end = pair.split()
                found[int(ticket)] = int(end)
        return found

    def take(self, v: int, batch: int) -> Any:
        """The batch of virtual worker v; called under its random state."""
        return self.options.collate_fn(self._reader.take(v, self._needs[v].size))

    def advance(self, point: int) -> None:
        """The round is done; `point` is the first that may have to be done again."""
        self.stream = shard_deal.advance(self._now, self._needs)
        self._streams = {k: s for k, s in self._streams.items() if k >= point}
        self._streams[self.stream.rounds] = self.stream
        self._hold()

    def close(self) -> None:
        self._reader.hold({}, ready=0)

    def get_ready(self, epoch: int, order: Sequence[int]) -> None:
        """Nothing can be made ahead: who reads which piece is agreed on from round to round."""

    def shut_down(self) -> None:
        self._reader.close()

    # -- nothing of a stream belongs to one virtual worker alone -----------------------------------------------------

    def new_pass(self, v: int) -> None: ...

    def pack_key(self, v: int) -> int | None:
        """Nothing of a stream belongs to one virtual worker."""
        return 0

    def pack_context(self, v: int, writer: Any) -> dict[str, Any]:
        return {}

    def unpack_context(self, v: int, state: dict[str, Any], reader: Any) -> None: ...

    def state_of_record(self, state: dict[str, Any], reader: Any) -> dict[str, Any]:
        return {}

    def context_state(self, v: int) -> dict[str, Any]:
        return {}

    def load_context(self, v: int, state: dict[str, Any]) -> None: ...


class ShardStream(SessionLoader):
    """Batches of all local virtual workers, in turn, from pieces that they take on demand."""

    feed: ShardFeed  # type: ignore[assignment]

    def __len__(self) -> int:
        raise TypeError("a stream of shards has no length before it was read: count steps with session.step")

    def begin_pass(self) -> int:
        if self._mid_pass:
            self._mid_pass = False
            return self._resume_at
        self.feed.begin(self._session.loop.course.epoch)
        return 0

    def start(self) -> Iterator[Any]:
        return ShardPass(self._session.loop, self)

    def begin_round(self) -> None:
        self.feed.agree(self._session.loop.elastic.generation.fabric)

    def advance(self) -> None:
        super().advance()
        self.feed.advance(self._session.loop.elastic.point_batch)

    def state(self, active: bool) -> dict[str, Any]:
        state = super().state(active)
        if active:
            assert self.feed.stream is not None
            state["stream"] = shard_deal.to_json(self.feed.stream)
        return state

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if "stream" in state:
            self.feed.restore(shard_deal.from_json(state["stream"]))


class ShardPass(Pass):
    """One epoch of a stream."""

    def account(self, end: int | None = None) -> None:
        """There are no samples to count by index; the books say that all were trained once."""

    def stand_by(self) -> None:
        """So there is nothing to report in the place of another."""

    def end(self, completed: bool) -> None:
        stream = self._loader.feed.stream  # type: ignore[attr-defined]
        if completed and self._loop.member.is_main:
            self._loop.story.events.emit(
                "shards",
                loader=self._loader.number,
                epoch=self._loop.course.epoch,
                pieces=stream.books.pieces,
                records=stream.records,
                rounds=stream.rounds,
            )
        super().end(completed)


def make_stream(
    session: "Session",
    number: int,
    items: Any,
    read: Read | None,
    arrays: bool,
    **options: Any,
) -> ShardStream:
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or isinstance(items, str | bytes):
        raise UsageError(
            f"session.shards got a {type(items).__name__}, needed a list of items (such as file names) of which each "
            "stands for a part of the data"
        )
    if not len(items):
        raise UsageError("session.shards got no items")
    if read is None and isinstance(items[0], str | bytes):
        raise UsageError(
            f"session.shards got names like {items[0]!r} but no way to read them: pass read=function, which takes an "
            "item and gives its records"
        )
    if options.get("collate_fn") is None:
        options["collate_fn"] = stack if arrays else default_collate
    feed = ShardFeed(items, read or _itself, ShardOptions(**options), session.size)
    return ShardStream(session, feed, number)  # type: ignore[arg-type]


def _itself(item: Any) -> Any:
    return item
