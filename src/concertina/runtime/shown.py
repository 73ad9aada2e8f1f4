"""What a member shows of its state while newcomers follow it.

It writes down once where parameters and optimizer state lie in its memory. From then on it notes on its desk, right
before an optimizer acts, with which gradients and hyperparameters; the newcomer acts at the same time as the member
does. At the end of a step it says whether these gradients were still the same, and how many such notes there were.
"""

import contextlib
import json
import os
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from concertina.runtime.desk import Desk
from concertina.runtime.device_memory import allocations, finish_work
from concertina.runtime.digest import sample
from concertina.runtime.membership import Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.segments import Segment, is_here, serve
from concertina.runtime.served_memory import ServedMemory
from concertina.runtime.state_map import describe, items, readable
from concertina.runtime.virtual import VirtualEngine

MOST_CHANGED = 1000  # parameters that a note names


class Shown:
    """One member's side of being followed."""

    def __init__(self, engine: VirtualEngine, membership: Membership, desk: Desk) -> None:
        self._engine = engine
        self._membership = membership
        self._desk = desk
        self.prepared = Prepared()
        self.step = 0  # steps that are complete
        self._described = 0  # the generation whose newcomers know where our state lies
        self._described_at: list[int] = []
        self._description: Segment | None = None
        self._served: ServedMemory | None = None  # where newcomers on other hosts follow
        self._sharing: Any = None  # the reducer that was asked to share its sums
        self._spoiled = False  # gradients of this step were overwritten after the update
        self._updates = 0  # of this step, so far
        self._params: list[Tensor] = []  # of the model, whose changes are counted
        self._versions: list[int] = []  # of these, when they were last looked at
        self._changed: set[int] = set()  # of these, by somebody else than an optimizer in this step
        self._taken: list[tuple[list[Tensor], Tensor]] = []  # this step's gradients as optimizers took them; a sample
        self._taken_before: list[tuple[list[Tensor], Tensor]] = []  # of the step before: somebody may still read them

    # -- at the end of every step ------------------------------------------------------------------------------------

    def show(self) -> None:
        """A step is complete: as long as newcomers follow, they find here what they need."""
        step = self.step
        wanted = self._membership.wanted
        if wanted is None or not wanted.joiners:
            if self._described:
                self.stop()
            self._desk.clock = 2 * step
            return
        finish_work(self.prepared.model.parameters())  # what the clock says must be true of a GPU's memory, too
        self._desk.clock = 2 * step
        if self._described == wanted.generation and self._where() == self._described_at:
            self._look_for_changes()
            note: dict[str, Any] = {"step": step, "updates": self._updates, "spoiled": self._is_spoiled()}
            self._desk.note({**note, "changed": sorted(self._changed)[:MOST_CHANGED]} if self._changed else note)
            self._begin_step()
        else:
            self._describe(wanted.generation)

    def while_held(self) -> None:
        """Everybody waits in the middle of a step for newcomers, who need to know where the state lies."""
        wanted = self._membership.wanted
        if wanted is not None and wanted.joiners and self._described != wanted.generation:
            self._describe(wanted.generation)

    def stop(self) -> list[Any]:
        """Nobody follows any more; what those who did may still be reading."""
        self._engine.on_update = None
        self._described = 0
        kept = [self._taken, self._taken_before, self._sharing, self._served]
        self._taken, self._taken_before, self._sharing = [], [], None
        self._stop_serving()
        stop_sharing = getattr(self._engine.reducer, "stop_sharing", None)
        if stop_sharing is not None:
            stop_sharing()
        return kept

    def _begin_step(self) -> None:
        self._updates, self._spoiled = 0, False
        self._changed = set()
        self._taken_before, self._taken = self._taken, []

    def _where(self) -> list[int]:
        return [item.tensor.data_ptr() for item in items(self.prepared)]

    def _describe(self, generation: int) -> None:
        """Writes down where the state lies, and from now on what every step does to it."""
        self._desk.note({"step": self.step, "updates": -1, "spoiled": True})
        memory = describe(self.prepared)
        served = self._serve() if memory is not None else ""
        description = json.dumps({"pid": os.getpid(), "memory": memory, "served": served}).encode()
        self._description = Segment.create(len(description) + 8)
        self._description.memory[: len(description) + 8] = len(description).to_bytes(8, "little") + description
        self._described, self._described_at = generation, self._where()
        self._params = list(self.prepared.model.parameters())
        self._versions = self._count_changes()
        self._begin_step()
        self._share()
        self._engine.on_update = self._before_update
        self._engine.on_updated = self._after_update
        self._engine.before_results = self._before_results
        self._engine.on_spoiled = self._on_spoiled
        self._desk.describe(generation, self._description.address)

    def _serve(self) -> str:
        """Where newcomers on other hosts find somebody who reads our memory for them; empty if there are none."""
        self._stop_serving()
        wanted = self._membership.wanted
        assert wanted is not None
        joining = [desk for member, desk in zip(wanted.members, wanted.desks, strict=True) if member in wanted.joiners]
        if all(map(is_here, joining)):
            return ""
        tensors = [item.tensor for item in items(self.prepared)]
        self._served = ServedMemory(self._desk, tensors, len(self.prepared.optimizers))
        return serve(self._served)

    def _stop_serving(self) -> None:
        served, self._served = self._served, None
        if served is not None:
            served.stop()

    def _share(self) -> None:
        """Lets the sums lie where newcomers can use them, as soon as there is memory for it."""
        self._sharing = self._engine.reducer
        share_sums = getattr(self._sharing, "share_sums", None)
        if share_sums is not None:
            self._membership.in_background(share_sums)

    # -- while a step goes on ----------------------------------------------------------------------------------------

    def _before_update(self, k: int) -> None:
        """Optimizer k is about to step: notes the gradients and hyperparameters that it takes."""
        self._desk.clock = 2 * self.step + 1
        self._look_for_changes()
        self._updates += 1
        if self._engine.reducer is not self._sharing:  # DDP's rebuild of the buckets has brought another
            self._share()
        optimizer = self.prepared.optimizers[k]
        groups = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        taken = [
            (i, p, p.grad)
            for i, p in enumerate(self.prepared.model.parameters())
            if id(p) in held and p.grad is not None
        ]
        grads = [grad for _, _, grad in taken]
        note: dict[str, Any] = {"step": self.step + 1, "optimizer": k}
        if _can_be_replayed(optimizer, groups) and all(_fits(p, g) for _, p, g in taken):
            with contextlib.suppress(OSError):
                note["shared"] = [*getattr(self._engine.reducer, "shared", []), *allocations(grads)]
                note["groups"] = groups
                note["grads"] = [[i, grad.data_ptr()] for i, _, grad in taken]
        finish_work(grads)
        self._desk.note(note)
        self._keep(grads)
        if self._served is not None and "grads" in note:
            self._served.note(self._desk.noted, self.step + 1, grads)

    def _after_update(self) -> None:
        self._versions = self._count_changes()

    def _count_changes(self) -> list[int]:
        return [-1 if param.is_inference() else param._version for param in self._params]

    def _look_for_changes(self) -> None:
        """What a script does to parameters itself is no update that a newcomer could make, too."""
        before, self._versions = self._versions, self._count_changes()
        if before != self._versions:
            self._changed.update(i for i, (a, b) in enumerate(zip(before, self._versions, strict=True)) if a != b)

    def _keep(self, grads: list[Tensor]) -> None:
        """The gradients themselves, whose memory must not be used for others yet, and a few elements of each."""
        if grads and all(map(readable, grads)):
            self._taken.append((grads, _some_of(grads)))

    def _is_spoiled(self) -> bool:
        """Whether somebody may have read gradients that the script was changing again."""
        return (
            self._spoiled
            or len(self._changed) > MOST_CHANGED
            or any(not torch.equal(_some_of(grads), some) for grads, some in self._taken)
        )

    def _before_results(self) -> None:
        self._desk.overwritten = self.step + 1

    def _on_spoiled(self) -> None:
        self._spoiled = True


def _can_be_replayed(optimizer: Optimizer, groups: list[dict[str, Any]]) -> bool:
    """Whether all that it acts with is plain: no learning rates in tensors, nothing set by a gradient scaler."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    return not scaled and all(_is_plain(value) for group in groups for value in group.values())


def _some_of(grads: list[Tensor]) -> Tensor:
    return torch.cat([sample(grad) for grad in grads])


def _fits(param: Tensor, grad: Tensor) -> bool:
    """Whether another process can read the gradient as it would lie in its own parameter's."""
    return readable(grad) and grad.dtype == param.dtype and (grad.stride() == param.stride() or grad.numel() <= 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, int | float | bool | str)
