"""How a newcomer gets the state of a job that goes on training: it copies pieces and replays what comes after.

The member may be another process of this host or be on another one (`member_memory.py`, `remote_memory.py`).

The state changes at every step, so it cannot be copied as a whole while training goes on. It is copied in pieces, each
between two steps; from then on the newcomer steps that piece along itself, with the very gradients and hyperparameters
that the members' optimizers use, and at the same time: a member says so right before its optimizer acts. The gradients
are taken from the members' memory, without a copy where it is shared; over a network they are sent, once per step.
When all pieces are there and have been compared once, after a step, the newcomer is in step with the members, whatever
the size of the model.

What cannot be replayed exactly shows in the comparison and is copied once more at the switch.
"""

import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import finish_work
from concertina.runtime.member_memory import MemberMemory
from concertina.runtime.pieces import Piece, cut, flat
from concertina.runtime.prepared import Prepared
from concertina.runtime.remote_memory import RemoteMemory
from concertina.runtime.state_map import all_params, make_room
from concertina.runtime.torch_internals import step_without_hooks

WORK_SECONDS = 0.004  # of copying between two looks at the members' clock
REHEARSED = (32, 32)  # some optimizers take nothing but matrices
BATCH_BYTES = 1 << 22  # of gradients that are asked for in one go, while those before are used
# Steps of these never write to the gradients, which may be the members' own.
LEAVES_GRADIENTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class CatchUp:
    """Follows one member's state, or a share of it."""

    def __init__(
        self,
        memory: MemberMemory | RemoteMemory,
        desk: Desk,
        prepared: Prepared,
        description: dict[str, Any],
        room: list[Tensor] | None = None,
        share: tuple[int, int, int] = (0, 1, 1),
        awaited: Callable[[], bool] = lambda: True,
    ) -> None:
        """`room` for the items of the description, if it has been made; `share` (from, to, of) of the pieces; `awaited`
        where the members may be making no step before we are ready."""
        self._memory = memory
        self._desk = desk
        self._prepared = prepared
        self._awaited = awaited
        self._params = all_params(prepared)
        if room is None:
            room = [tensor for _, tensor in make_room(prepared, description)]
        pieces = cut(prepared, description, room, memory.slice)
        first, end, of = share
        self._pieces = pieces[len(pieces) * first // of : len(pieces) * end // of]
        self._grads: dict[int, Tensor] = {}  # copies of gradients, where they cannot be used where they lie
        self._replicas = [_replica(optimizer) for optimizer in prepared.optimizers]
        self._next = 0
        self._lapses = 0
        self._misses = 0  # times in a row that the member changed what was just read
        self._by_copy = False
        self.gave_up = ""  # why all is left to the switch, if it is
        self._read = desk.noted  # notes that we have followed
        self._applied = desk.clock // 2  # steps that are over
        self._seen = (0, 0)  # a step that goes on, and how many of its updates we have made
        self._unreadable = 0  # the last step with an update that nobody else can make
        self.copied_bytes = 0
        self.replayed = 0
        self.differing = 0
        self.copied_at = 0.0
        for piece in self._pieces:
            self._enrol(piece)

    # -- following ---------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Every piece is here, compared once, and as new as the member's; or there is no use in trying."""
        if self._by_copy:
            return True
        return self._read >= self._desk.noted and all(p.version >= self._applied and p.compared for p in self._pieces)

    @property
    def version(self) -> int:
        return self._applied

    def work(self) -> bool:
        """A few milliseconds of copying, or one update of the optimizers; False if there was nothing to do."""
        if self.follow_note():
            return True
        if self._by_copy or self._desk.clock % 2 or self._rests():
            return False  # nothing can be read while the member's optimizers act
        until = time.monotonic() + WORK_SECONDS
        did = False
        while time.monotonic() < until and self._desk.noted == self._read:
            piece = self._next_piece()
            if piece is None:
                return did
            did = True
            if piece.version < 0:
                self._copy(piece)
            else:
                self._compare(piece)
            if self._rests():
                return did
        return did

    def _rests(self) -> bool:
        """Not while the members would spend the time waiting."""
        return self._memory.rests() and not self._awaited()

    def follow_note(self) -> bool:
        """Does what the member's next note says; False if there is none."""
        if self._by_copy:
            self._read, self._applied = self._desk.noted, self._desk.clock // 2
            return False
        if self._read >= self._desk.noted:
            return False
        note = self._desk.read_note(self._read + 1)
        if note is None:
            self._read, self._applied = self._desk.noted, self._desk.clock // 2
            self._drop(self._pieces)
            return True
        self._read += 1
        step = note["step"]
        if self._seen[0] != step:
            self._seen = (step, 0)
        if "updates" in note:
            self._end_step(step, note)
        elif "grads" not in note:
            self._unreadable = step
        elif self._update(step, note):
            self._seen = (step, self._seen[1] + 1)
        return True

    def _end_step(self, step: int, note: dict[str, Any]) -> None:
        """What has seen every update of a step has seen the step, unless the gradients were changed meanwhile."""
        live = [p for p in self._pieces if p.version == step - 1]
        self._applied = step
        if "changed" in note:
            self._distrust(piece for piece in self._pieces if piece.param in note["changed"])
        if note["spoiled"] or self._seen != (step, note["updates"]):
            self._drop(live)
            if (note["spoiled"] or self._unreadable == step) and self._lapses > 1:
                self.leave_to_switch("the updates of its optimizers cannot be repeated elsewhere")
            return
        for piece in live:
            piece.version = step
        self.replayed += bool(live)

    def _distrust(self, pieces: Iterable[Piece]) -> None:
        """The script changes these itself; they are copied again at the switch."""
        for piece in pieces:
            piece.exact = False

    def _drop(self, pieces: list[Piece]) -> None:
        """A step has gone by without these: what we hold of them is of no use any more."""
        if not any(piece.version >= 0 for piece in pieces):
            return
        self._lapses += 1
        if self._lapses > self._memory.most_lapses:
            self.leave_to_switch(f"{self._lapses} times, steps went by faster than they could be followed")
        for piece in pieces:
            piece.version = -1

    def leave_to_switch(self, why: str) -> None:
        """Nothing more is read before; then, all."""
        self._by_copy, self.gave_up = True, self.gave_up or why

    def _next_piece(self) -> Piece | None:
        """The next one to copy, or else to compare."""
        for wanted in (lambda p: p.version < 0, self._is_to_compare):
            for k in range(len(self._pieces)):
                piece = self._pieces[(self._next + k) % len(self._pieces)]
                if wanted(piece):
                    self._next = (self._next + k + 1) % len(self._pieces)
                    return piece
            if not self.copied_at:
                self.copied_at = time.monotonic()
        return None

    def _is_to_compare(self, piece: Piece) -> bool:
        """What was copied and not stepped along yet is equal, of course, whatever the script does in a step."""
        if piece.compared and (piece.proved or not piece.exact):
            return False
        return piece.version > piece.copied or (not piece.compared and self._awaited())

    def _copy(self, piece: Piece) -> None:
        with torch.no_grad():
            steps = self._memory.copy(self._desk, piece.where)
        if self._missed(steps < 0):
            return
        piece.version = piece.copied = steps
        piece.compared = piece.proved = False
        self.copied_bytes += sum(part.here.numel() * part.here.element_size() for part in piece.parts)

    def _compare(self, piece: Piece) -> None:
        """Looks, while nobody changes it, whether we came to the same."""
        steps, equal = self._memory.compare(self._desk, piece.where)
        if self._missed(steps != piece.version):
            return
        if not equal:
            self.differing += 1
        if not equal and piece.exact:  # by something that nobody has told of; it may do the same to others
            trained = piece.optimizer >= 0
            self._distrust(p for p in self._pieces if (p.optimizer >= 0) == trained)
        piece.compared, piece.proved = True, piece.version > piece.copied

    def _missed(self, missed: bool) -> bool:
        self._misses = self._misses + 1 if missed else 0
        if self._misses > self._memory.most_misses:
            self.leave_to_switch("steps are too short for anything to be read between two of them")
        return missed

    # -- replaying ---------------------------------------------------------------------------------------------------

    def _enrol(self, piece: Piece) -> None:
        """Makes the replaying optimizer step this piece, whenever it is given a gradient."""
        if piece.optimizer < 0:
            return
        by_key = {part.key: part for part in piece.parts}
        part, param = by_key.pop(""), self._params[piece.param]
        whole = (piece.lo, piece.hi) == (0, param.numel())
        leaf = param.detach() if whole else part.here
        replica = self._replicas[piece.optimizer]
        for key, part in by_key.items():
            if key in piece.scalars:
                replica.state[leaf][key] = part.here.view(piece.scalars[key])
            else:
                replica.state[leaf][key] = part.whole if whole else part.here
        replica.param_groups[piece.group]["params"].append(leaf)
        piece.leaf = leaf

    def _update(self, step: int, note: dict[str, Any]) -> bool:
        """Does what an optimizer of the member does; False if its gradients may have changed meanwhile."""
        k, addresses = note["optimizer"], dict(note["grads"])
        live = [p for p in self._pieces if p.version == step - 1 and p.optimizer == k and p.param in addresses]
        if not live:
            return True
        if isinstance(self._memory, RemoteMemory):
            return self._update_from_copies(self._memory, note, live, addresses)
        in_place = type(self._prepared.optimizers[k]) in LEAVES_GRADIENTS
        grads = {i: self._gradient(i, addresses[i], note["shared"], in_place) for i in {p.param for p in live}}
        if self._desk.overwritten > step:
            return False
        stepped = self._step(k, note["groups"], live, grads)
        finish_work(grads.values())
        valid = stepped and self._desk.overwritten <= step
        self._memory.get_ready(note["shared"])  # gradients may lie in several places in turn: now there is time
        return valid

    def _gradient(self, i: int, address: int, shared: list[Any], in_place: bool) -> Tensor:
        param = self._params[i].detach()
        memory = self._memory
        assert isinstance(memory, MemberMemory)
        there = memory.find(shared, address, param)
        if there is not None and in_place and there.device == param.device:
            return there
        room = self._room(i)
        if there is not None:
            room.copy_(there)
        else:
            memory.read(address, room)
        return room

    def _room(self, i: int) -> Tensor:
        if i not in self._grads:
            self._grads[i] = torch.empty_like(self._params[i].detach())
        return self._grads[i]

    def _update_from_copies(
        self, memory: RemoteMemory, note: dict[str, Any], live: list[Piece], addresses: dict[int, int]
    ) -> bool:
        """With gradients that the member keeps a copy of, and sends while we act with those that have come."""
        batches = list(_batches(live))
        places = [
            [(addresses[p.param] + p.lo * g.element_size(), flat(g)[p.lo : p.hi]) for p, g in self._with_rooms(batch)]
            for batch in batches
        ]
        for where in places:
            memory.ask_for_gradients(self._read, where)
        came = [self._act(memory, note, *both) for both in zip(batches, places, strict=True)]
        return all(came)

    def _with_rooms(self, pieces: Sequence[Piece]) -> list[tuple[Piece, Tensor]]:
        return [(piece, self._room(piece.param)) for piece in pieces]

    def _act(
        self, memory: RemoteMemory, note: dict[str, Any], batch: list[Piece], where: list[tuple[int, Tensor]]
    ) -> bool:
        if not memory.take_gradients(where):
            return False
        grads = {piece.param: grad for piece, grad in self._with_rooms(batch)}
        stepped = self._step(note["optimizer"], note["groups"], batch, grads)
        finish_work(grads.values())
        return stepped

    def _step(self, k: int, groups: list[dict[str, Any]], pieces: list[Piece], grads: dict[int, Tensor]) -> bool:
        """False if an optimizer, which may be the script's own, cannot step anything but its own parameters."""
        replica = self._replicas[k]
        for group, values in zip(replica.param_groups, groups, strict=True):
            group.update(values)
        for piece in pieces:
            grad, leaf = grads[piece.param], piece.leaf
            assert leaf is not None
            if leaf.numel() == grad.numel():
                leaf.grad = grad
            else:
                leaf.grad = flat(grad)[piece.lo : piece.hi]
        try:
            step_without_hooks(replica)
        except Exception as error:
            self.leave_to_switch(f"its updates cannot be made elsewhere ({type(error).__name__}: {error})")
            return False
        finally:
            for piece in pieces:
                assert piece.leaf is not None
                piece.leaf.grad = None
        return True

    # -- the switch --------------------------------------------------------------------------------------------------

    def reaches(self, step: int) -> bool:
        """Follows on; whether the member's `step` is over and what it did is done here as well as it can be."""
        while self.follow_note():
            pass
        if self._by_copy:
            return self._desk.clock >= 2 * step and self._desk.clock % 2 == 0
        return self._applied >= step

    def finish(self, step: int) -> int:
        """The members have changed over after `step`, which we have reached, and cannot go on without us: what is not
        as it should be is copied now. Returns how many pieces that were."""
        late = [p for p in self._pieces if self._by_copy or not self._is_right(p, step)]
        with torch.no_grad():
            self._memory.copy_settled(step, [pair for piece in late for pair in piece.where])
        return len(late)

    def _is_right(self, piece: Piece, step: int) -> bool:
        """Looks now, if there was no time to before."""
        if piece.version != step or not piece.exact:
            return False
        known = piece.proved or piece.copied == step
        return known or self._memory.compare(self._desk, piece.where) == (step, True)

    def close(self) -> None:
        self._memory.close()


def rehearse_update(optimizer: Optimizer) -> None:
    """One update of parameters that nobody has, so that the first real one need not wait for kernels to be loaded."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    twin = _replica(optimizer)
    for group, own in zip(twin.param_groups, optimizer.param_groups, strict=True):
        for like in {(p.device, p.dtype): p for p in own["params"] if p.requires_grad}.values():
            leaf = like.detach().new_zeros(REHEARSED)
            leaf.grad = torch.zeros_like(leaf)
            group["params"].append(leaf)
    with contextlib.suppress(Exception):  # one that asks for more than that is as slow the first time as it would be
        step_without_hooks(twin)


def _replica(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind that steps slices of the parameters, without the user's hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)  # copy.copy takes no attributes that the class has added
    for name in ("step", "zero_grad"):
        twin.__dict__.pop(name, None)  # what is replaced on the instance belongs to the original
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours whose gradients together are not much."""
    batch: list[Piece] = []
    total = 0
    for piece in pieces:
        batch.append(piece)
        total += piece.parts[0].here.element_size() * (piece.hi - piece.lo)
        if total >= BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
