"""How a newcomer gets the state of a job that goes on training: it copies pieces and replays what comes after.

The state changes at every step, so it cannot be copied as a whole while training goes on. It is copied in pieces, each
between two steps; from then on the newcomer steps that piece along itself, with the very gradients and hyperparameters
that the members' optimizers use, and at the same time: a member says so right before its optimizer acts. The gradients
are taken from the members' memory, without a copy where it is shared. When all pieces are there and have been compared
once, the newcomer is in step with the members, whatever the size of the model.

Optimizers that treat every element alone are replayed on slices, all others on whole parameters. What cannot be
replayed exactly shows in the comparison and is copied once more at the switch.
"""

import copy
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import finish_work
from concertina.runtime.digest import bit_pattern
from concertina.runtime.member_memory import MemberMemory
from concertina.runtime.prepared import Prepared
from concertina.runtime.state_map import all_params, make_room

SLICE = 1 << 20  # elements; a multiple of every vector width, so that slices give the bits of the whole
MOST_LAPSES = 30  # steps that may go by unseen before everything is left to the switch
WORK_SECONDS = 0.004  # of copying between two looks at the members' clock
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


# Steps of these never write to the gradients, which may be the members' own.
LEAVES_GRADIENTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(slots=True, eq=False)
class Part:
    """One tensor's share of a piece: where it lies there, and here."""

    key: str  # empty: the parameter itself
    address: int
    here: Tensor  # flat, the final memory; single numbers of slices but the first have a tensor of their own


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of one parameter with everything that optimizers keep for it."""

    param: int  # among all parameters of the model
    lo: int
    hi: int
    optimizer: int  # -1: no optimizer holds it
    group: int
    parts: list[Part]
    scalars: dict[str, torch.Size] = field(default_factory=dict)  # single numbers, with their shape
    version: int = -1  # steps that what we hold has seen; -1: nothing yet
    compared: bool = False
    exact: bool = True
    leaf: Tensor | None = None  # what the replaying optimizer takes for its parameter


class CatchUp:
    """Follows one member's state."""

    def __init__(self, memory: MemberMemory, desk: Desk, prepared: Prepared, description: dict[str, Any]) -> None:
        self._memory = memory
        self._desk = desk
        self._prepared = prepared
        self._params = all_params(prepared)
        self._pieces = _cut(prepared, description)
        self._grads: dict[int, Tensor] = {}  # copies of gradients, where they cannot be used where they lie
        self._replicas = [_replica(optimizer) for optimizer in prepared.optimizers]
        self._scratch: dict[torch.device, Tensor] = {}
        self._next = 0
        self._lapses = 0
        self._by_copy = False
        self._read = desk.noted  # notes that we have followed
        self._applied = desk.clock // 2  # steps that are over
        self._seen = (0, 0)  # a step that goes on, and how many of its updates we have made
        self._unreadable = 0  # the last step with an update that nobody else can make
        self.copied_bytes = 0
        self.replayed = 0
        self.differing = 0
        self.began = time.monotonic()
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
        if self._by_copy or self._desk.clock % 2:
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
        return did

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
        if note["spoiled"] or self._seen != (step, note["updates"]):
            self._drop(live)
            hopeless = note["spoiled"] or self._unreadable == step
            self._by_copy = self._by_copy or (hopeless and self._lapses > 1)
            return
        for piece in live:
            piece.version = step
        self.replayed += bool(live)

    def _drop(self, pieces: list[Piece]) -> None:
        """A step has gone by without these: what we hold of them is of no use any more."""
        if not any(piece.version >= 0 for piece in pieces):
            return
        self._lapses += 1
        if self._lapses > MOST_LAPSES:
            self._by_copy = True  # everything at the switch, then
        for piece in pieces:
            piece.version = -1

    def _next_piece(self) -> Piece | None:
        """The next one to copy, or else to compare."""
        for wanted in (lambda p: p.version < 0, lambda p: not p.compared):
            for k in range(len(self._pieces)):
                piece = self._pieces[(self._next + k) % len(self._pieces)]
                if wanted(piece):
                    self._next = (self._next + k + 1) % len(self._pieces)
                    return piece
            if not self.copied_at:
                self.copied_at = time.monotonic()
        return None

    def _copy(self, piece: Piece) -> None:
        clock = self._desk.clock
        if clock % 2:
            return
        with torch.no_grad():
            self._read_parts(piece)
        if self._desk.clock == clock:
            piece.version = clock // 2
            piece.compared = False
            self.copied_bytes += sum(part.here.numel() * part.here.element_size() for part in piece.parts)

    def _read_parts(self, piece: Piece) -> None:
        for part in piece.parts:
            self._memory.read(part.address, part.here)
        finish_work(part.here for part in piece.parts)

    def _compare(self, piece: Piece) -> None:
        """Reads a piece again, while nobody changes it, and looks whether we came to the same."""
        clock = self._desk.clock
        if clock % 2 or clock // 2 != piece.version:
            return
        equal = True
        for part in piece.parts:
            theirs = self._room(part.here)
            self._memory.read(part.address, theirs)
            equal = equal and torch.equal(bit_pattern(theirs), bit_pattern(part.here))
        if self._desk.clock != clock:
            return
        if not equal:
            self.differing += 1
            piece.exact = False  # copied again at the switch
        piece.compared = True

    def _room(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        room = self._scratch.get(like.device)
        if room is None or room.numel() < size:
            room = self._scratch[like.device] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return room[:size].view(like.dtype)

    # -- replaying ---------------------------------------------------------------------------------------------------

    def _enrol(self, piece: Piece) -> None:
        """Makes the replaying optimizer step this piece, whenever it is given a gradient."""
        if piece.optimizer < 0:
            return
        by_key = {part.key: part.here for part in piece.parts}
        flat, param = by_key.pop(""), self._params[piece.param]
        whole = (piece.lo, piece.hi) == (0, param.numel())
        leaf = param.detach() if whole else flat
        replica = self._replicas[piece.optimizer]
        for key, here in by_key.items():
            if key in piece.scalars:
                here = here.view(piece.scalars[key])
            elif whole and here.numel() == leaf.numel():
                here = here.as_strided(leaf.size(), leaf.stride(), here.storage_offset())
            replica.state[leaf][key] = here
        replica.param_groups[piece.group]["params"].append(leaf)
        piece.leaf = leaf

    def _update(self, step: int, note: dict[str, Any]) -> bool:
        """Does what an optimizer of the member does; False if its gradients may have changed meanwhile."""
        k, addresses = note["optimizer"], dict(note["grads"])
        live = [p for p in self._pieces if p.version == step - 1 and p.optimizer == k and p.param in addresses]
        if not live:
            return True
        in_place = type(self._prepared.optimizers[k]) in LEAVES_GRADIENTS
        grads = {i: self._gradient(i, addresses[i], note["shared"], in_place) for i in {p.param for p in live}}
        if self._desk.overwritten > step:
            return False
        self._step(k, note["groups"], live, grads)
        finish_work(grads.values())
        return self._desk.overwritten <= step

    def _gradient(self, i: int, address: int, shared: list[Any], in_place: bool) -> Tensor:
        param = self._params[i].detach()
        there = self._memory.find(shared, address, param)
        if there is not None and in_place and there.device == param.device:
            return there
        if i not in self._grads:
            self._grads[i] = torch.empty_like(param)
        if there is not None:
            self._grads[i].copy_(there)
        else:
            self._memory.read(address, self._grads[i])
        return self._grads[i]

    def _step(self, k: int, groups: list[dict[str, Any]], pieces: list[Piece], grads: dict[int, Tensor]) -> None:
        replica = self._replicas[k]
        for group, values in zip(replica.param_groups, groups, strict=True):
            group.update(values)
        for piece in pieces:
            grad, leaf = grads[piece.param], piece.leaf
            assert leaf is not None
            if leaf.numel() == grad.numel():
                leaf.grad = grad
            else:
                leaf.grad = _flat(grad)[piece.lo : piece.hi]
        type(replica).step(replica)
        for piece in pieces:
            assert piece.leaf is not None
            piece.leaf.grad = None

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
        late = [p for p in self._pieces if self._by_copy or p.version != step or not p.exact]
        with torch.no_grad():
            for piece in late:
                self._read_parts(piece)
        return len(late)

    def close(self) -> None:
        self._memory.close()


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as one row."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _replica(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same kind that steps slices of the parameters, without the user's hooks."""
    twin = copy.copy(optimizer)
    for name in ("step", "zero_grad"):
        twin.__dict__.pop(name, None)  # what is replaced on the instance belongs to the original
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _cut(prepared: Prepared, description: dict[str, Any]) -> list[Piece]:
    """All of the state in pieces, with room made for it here."""
    params = all_params(prepared)
    pairs = make_room(prepared, description)
    index = {id(p): i for i, p in enumerate(params)}
    of_param: dict[int, list[tuple[str, int, Tensor]]] = {i: [] for i in range(len(params))}
    held = [[p for group in o.param_groups for p in group["params"]] for o in prepared.optimizers]
    for (k, i, key, *_), (address, tensor) in zip(description["items"], pairs, strict=True):
        of_param[i if k < 0 else index[id(held[k][i])]].append((key, address, tensor))
    homes = {
        id(p): (k, g)
        for k, o in enumerate(prepared.optimizers)
        for g, group in enumerate(o.param_groups)
        for p in group["params"]
    }
    counting = {k for k, *_, value in description["others"] if value is not None}  # in plain numbers, unseen by us
    pieces = []
    for i, param in enumerate(params):
        optimizer, group = homes.get(id(param), (-1, -1))
        if optimizer in counting:
            optimizer, group = -1, -1
        tensors = of_param[i]
        sliceable = optimizer >= 0 and isinstance(prepared.optimizers[optimizer], ELEMENTWISE)
        sliceable = sliceable and all(t.numel() in (1, param.numel()) for _, _, t in tensors)
        size = SLICE if sliceable else max(1, param.numel())
        for lo in range(0, max(1, param.numel()), size):
            pieces.append(_piece(i, lo, min(lo + size, param.numel()), optimizer, group, tensors, param.numel()))
            # Trained, but by no optimizer that we know: the script changes it by hand, which nobody can replay.
            pieces[-1].exact = optimizer >= 0 or not param.requires_grad
    return pieces


def _piece(
    i: int, lo: int, hi: int, optimizer: int, group: int, tensors: list[tuple[str, int, Tensor]], whole: int
) -> Piece:
    parts: list[Part] = []
    scalars: dict[str, torch.Size] = {}
    for key, address, tensor in tensors:
        if tensor.numel() == whole and (whole > 1 or not key):
            part = _flat(tensor)[lo:hi]
            parts.append(Part(key, address + lo * tensor.element_size(), part))
        elif tensor.numel() == 1:  # all slices count it on alike
            parts.append(Part(key, address, tensor.view(1) if lo == 0 else torch.zeros_like(tensor).view(1)))
            scalars[key] = tensor.shape
        else:  # of a shape of its own: such an optimizer is replayed on whole parameters
            parts.append(Part(key, address, tensor))
    return Piece(i, lo, hi, optimizer, group, parts, scalars)
