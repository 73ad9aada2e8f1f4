"""What belongs to one virtual worker alone, and whose of it is the live one.

Virtual workers of one process share the parameters, but each has its random states, its buffers and the gradients that
it accumulates. One of them is *resident*: its random states and buffers are the ones that code in this process uses.
What a context is as a record on a desk, and as part of a checkpoint, is decided here, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from concertina.core.errors import UnsupportedScript
from concertina.runtime.buffers import FlatBuffers, Saved
from concertina.runtime.context_record import (
    ContextReader,
    ContextWriter,
    Memory,
    pack_random,
    tensor_from_bytes,
    tensor_to_bytes,
    unpack_random,
)
from concertina.runtime.desk import Desk, newest_context
from concertina.runtime.rng import RandomState, seed_everything


@dataclass(slots=True)
class VirtualContext:
    """What belongs to one virtual worker alone. Everything else is shared and equal on all workers."""

    random: RandomState
    buffers: Saved
    grads: list[Tensor | None] | None = None  # accumulated under no_sync, not yet reduced
    in_bucket: list[bool] | None = None  # which of these DDP would have accumulated in the bucket's own memory
    cleared_by: set[int] = field(default_factory=set)  # optimizers that set gradients to None since the last reduction
    used: list[bool] = field(default_factory=list)  # parameters that had a gradient since the last reduction
    packed: Memory = field(default_factory=Memory)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "random": self.random.state(),
            "buffers": self.buffers,
            "grads": self.grads,
            "in_bucket": self.in_bucket,
            "cleared_by": sorted(self.cleared_by),
            "used": self.used,
        }


class Contexts(dict[int, VirtualContext]):
    """Those of the local virtual workers, by number; empty while a newcomer's are still elsewhere."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        buffers: FlatBuffers,
        virtual: int,
        tracks_usage: bool,
    ) -> None:
        super().__init__()
        self._params = params
        self._names = names
        self._buffers = buffers
        self._virtual = virtual
        self._tracks_usage = tracks_usage
        self._moves_seldom = not buffers and not tracks_usage  # a few numbers and the random states say all of it
        self._shown: list[tuple[Tensor | None, int | None]] | None = None  # accumulated gradients seen outside the loop
        self.resident: int | None = None  # the virtual worker whose random state and buffers are live
        self.apart = False  # virtual workers have random states of their own

    def begin(self, order: Sequence[int], random: RandomState) -> None:
        """Each of these virtual workers begins with this random state and the model's buffers."""
        for v in order:
            self[v] = VirtualContext(random, self._buffers.copy(), used=[False] * len(self._params))
        self.resident = min(order)

    @property
    def accumulates(self) -> bool:
        """Whether virtual workers hold gradients that no step has used yet: too much to be copied at every step."""
        return any(context.grads is not None for context in self.values())

    # -- whose random state and buffers are the live ones ------------------------------------------------------------

    def make_resident(self, v: int) -> None:
        """Changes over to virtual worker v; nothing to do if it never left, as with one virtual worker per worker."""
        if self.resident != v:
            self.save_resident()
            self[v].random.restore()
            self._buffers.load_from(self[v].buffers)
            self.resident = v

    def save_resident(self) -> None:
        if self.resident is not None:
            context = self[self.resident]
            context.random = RandomState.capture(context.random)
            if self._buffers:
                self._buffers.save_to(context.buffers)

    def go_outside(self) -> None:
        """Outside the loop, code runs as the first local virtual worker: on the main worker, as virtual worker 0."""
        if not self:
            return
        self.make_resident(min(self))
        self.save_resident()
        self._show_accumulated()

    def come_inside(self) -> None:
        """Before a pass: what was drawn outside the loop must not belong to some virtual workers only.

        Before the first pass, while all virtual workers still have one random state, code outside is what every rank
        of a DDP job runs, so all of them move on. Later each would have to draw from its own state, which code that
        runs once per worker cannot do.
        """
        self._take_back_accumulated()
        before, now = self[min(self)].random, RandomState.capture()
        if self._virtual == 1 or now.same_as(before):
            return
        if self.apart:
            raise UnsupportedScript(
                "random numbers were drawn outside the loop, where a worker stands for several ranks (iterating a "
                "plain DataLoader draws a seed, too): put that code under `with session.aside():`, which leaves every "
                "random state as it was, and draw what the job is made of before session.seed()"
            )
        for context in self.values():
            context.random = now

    def _show_accumulated(self) -> None:
        """Outside the loop, `.grad` is what the first local virtual worker has accumulated."""
        grads = self[min(self)].grads
        if grads is not None:
            for p, g in zip(self._params, grads, strict=True):
                p.grad = g
            self._shown = [(g, None if g is None else g._version) for g in grads]

    def _take_back_accumulated(self) -> None:
        """What was cleared or zeroed outside the loop is cleared or zeroed for every virtual worker."""
        shown, self._shown = self._shown, None
        if shown is None:
            return
        for i, (p, (grad, version)) in enumerate(zip(self._params, shown, strict=True)):
            now, p.grad = p.grad, None
            if grad is None or (now is grad and grad._version == version):
                continue
            if now is not None and bool(now.any()):
                raise UnsupportedScript(f"the gradient of {self._names[i]} was changed outside the loop: only clear it")
            for context in self.values():
                if context.grads is not None:
                    kept = context.grads[i]
                    context.grads[i] = None if now is None or kept is None else kept.zero_()

    def seed(self, seed: int) -> None:
        """Between rounds: virtual worker v begins anew with `seed + v`."""
        self.save_resident()
        for v, context in self.items():
            seed_everything(seed + v)
            context.random = RandomState.capture()
        self.apart = True
        self.resident = None
        self.go_outside()

    # -- as records on desks -----------------------------------------------------------------------------------------

    def pack(self, v: int, loaders: Sequence[Any]) -> bytes:
        """Virtual worker v's context; `loaders` pack their part of it."""
        if v == self.resident:
            self.save_resident()
        context = self[v]
        key: list[int | None] = [None]
        if self._moves_seldom:
            key = [*context.cleared_by]
            for feed in loaders:
                key.append(feed.pack_key(v))
            if context.packed.stands(context.random, key):
                return context.packed.last
        writer = ContextWriter(context.packed, (context.random, key))
        head = {
            "random": pack_random(writer, context.random),
            "buffers": [writer.add(tensor_to_bytes(flat)) for flat in context.buffers],
            "cleared_by": sorted(context.cleared_by),
            "used": context.used if self._tracks_usage else [],
            "loaders": [feed.pack_context(v, writer) for feed in loaders],
        }
        return writer.close(head)

    def unpack(self, v: int, record: bytes, loaders: Sequence[Any]) -> None:
        reader = ContextReader(record)
        self[v] = self._read(reader)
        for feed, state in zip(loaders, reader.head["loaders"], strict=True):
            feed.unpack_context(v, state, reader)

    def _read(self, reader: ContextReader) -> VirtualContext:
        """All but the loaders' part, which follows."""
        head = reader.head
        return VirtualContext(
            unpack_random(reader, head["random"]),
            self._read_buffers(reader),
            cleared_by=set(head["cleared_by"]),
            used=head["used"] or [False] * len(self._params),
        )

    def _read_buffers(self, reader: ContextReader) -> Saved:
        sizes = reader.head["buffers"]
        return [tensor_from_bytes(reader.take(n), flat) for n, flat in zip(sizes, self._buffers.flats, strict=True)]

    def buffers_of_record(self, record: bytes) -> Saved:
        reader = ContextReader(record)
        for size in reader.head["random"]:
            reader.take(max(0, size))
        return self._read_buffers(reader)

    def adopt(
        self,
        order: Sequence[int],
        point: int,
        desks: Sequence[Desk],
        loaders: Sequence[Any],
        missing: Callable[[int], None],
    ) -> None:
        """Takes these virtual workers' contexts from the desks, as of that recovery point, and forgets all others."""
        self.clear()
        self.resident = None
        self.apart = True
        for v in order:
            found = newest_context(desks, v, point)
            if found is None:
                missing(v)
            else:
                self.unpack(v, found[0], loaders)

    def keep_only(self, order: Sequence[int]) -> None:
        """The other virtual workers now live elsewhere."""
        if self.resident is not None and self.resident not in order:
            self.save_resident()
            self.resident = None
        for v in [v for v in self if v not in order]:
            del self[v]

    # -- in checkpoints ----------------------------------------------------------------------------------------------

    def state(self, v: int) -> dict[str, Any]:
        self.save_resident()
        return self[v].state()

    def state_of_record(self, record: bytes, loaders: Sequence[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a record on a desk would be in a checkpoint: the context, and each loader's part of it."""
        reader = ContextReader(record)
        context = self._read(reader)
        parts = [feed.state_of_record(part, reader) for feed, part in zip(loaders, reader.head["loaders"], strict=True)]
        return context.state(), parts

    def load(self, v: int, state: dict[str, Any]) -> None:
        grads = state["grads"]
        if grads is not None:
            grads = [None if g is None else g.clone().to(p.device) for g, p in zip(grads, self._params, strict=True)]
        buffers = [t.clone().to(flat.device) for t, flat in zip(state["buffers"], self._buffers.flats, strict=True)]
        self[v] = VirtualContext(
            RandomState.load(state["random"]),
            buffers,
            grads,
            state["in_bucket"],
            set(state["cleared_by"]),
            list(state["used"]),
        )
        self.apart = True
        self.resident = None
