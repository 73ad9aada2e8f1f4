"""The module buffers of each virtual worker (running statistics of BatchNorm and the like).

All buffers of one dtype and device are laid into one flat tensor whose parts serve as the buffers' memory, so a
switch between virtual workers is one copy per dtype instead of one per buffer. The buffer objects stay the module's
own; only their `.data` moves, which also keeps autograd's version counters apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from concertina.core.errors import UnsupportedScript

Saved = list[Tensor]  # one flat tensor per (dtype, device), in the order of FlatBuffers.flats


class FlatBuffers:
    """The live buffers of a model, with cheap copies."""

    def __init__(self, model: nn.Module) -> None:
        self._homes: list[tuple[nn.Module, str]] = []
        self.names: list[str] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._homes.append((module, name))
                    self.names.append(f"{prefix}.{name}" if prefix else name)
        self._modules = [module for module in model.modules() if module._buffers]
        self.flats: list[Tensor] = []
        self._live: list[Tensor] = []
        self._where: list[tuple[int, int]] = []  # (flat, offset) by buffer
        self._flatten()

    def __bool__(self) -> bool:
        return bool(self._live)

    def _current(self) -> list[Tensor]:
        found = [module._buffers.get(name) for module, name in self._homes]
        return [buffer for buffer in found if buffer is not None]

    def _flatten(self) -> None:
        self._live = self._current()
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, buffer in enumerate(self._live):
            groups.setdefault((buffer.dtype, buffer.device), []).append(i)
        self.flats, self._where = [], [(0, 0)] * len(self._live)
        for (dtype, device), members in groups.items():
            flat = torch.empty(sum(self._live[i].numel() for i in members), dtype=dtype, device=device)
            offset = 0
            for i in members:
                self._where[i] = (len(self.flats), offset)
                offset += self._live[i].numel()
            self.flats.append(flat)
            for i in members:
                self._move_in(i)

    def _part(self, i: int, saved: Sequence[Tensor]) -> Tensor:
        k, offset = self._where[i]
        return saved[k][offset : offset + self._live[i].numel()].view(self._live[i].shape)

    def _move_in(self, i: int) -> None:
        home = self._part(i, self.flats)
        home.copy_(self._live[i].data)
        self._live[i].data = home

    def adopt_reassigned(self) -> None:
        """Takes up buffers that user code replaced (`self.mean = new`) instead of changing in place."""
        if not self._live and not self._modules:
            return
        current = self._current()
        seen = {id(b) for module in self._modules for b in module._buffers.values() if b is not None}
        if len(seen) != len(self._live):
            raise UnsupportedScript(
                f"the model had {len(self._live)} buffers at prepare() and has {len(seen)} now: make every buffer in "
                "the constructor, with its final shape"
            )
        changed = [i for i, (new, old) in enumerate(zip(current, self._live, strict=False)) if new is not old]
        if not changed:
            return
        same_kind = all(
            current[i].shape == self._live[i].shape and current[i].dtype == self._live[i].dtype for i in changed
        )
        if not same_kind:
            names = ", ".join(self.names[i] for i in changed)
            raise UnsupportedScript(
                f"buffer {names} was replaced by one of another shape or dtype during training; "
                "keep buffers the size they have at prepare(), or make them plain attributes"
            )
        self._live = current
        for i in changed:
            self._move_in(i)

    def copy(self) -> Saved:
        return [flat.clone() for flat in self.flats]

    def save_to(self, saved: Sequence[Tensor]) -> None:
        self.adopt_reassigned()
        for target, flat in zip(saved, self.flats, strict=True):
            target.copy_(flat)

    def load_from(self, saved: Sequence[Tensor]) -> None:
        self.adopt_reassigned()
        for flat, source in zip(self.flats, saved, strict=True):
            flat.copy_(source)

    def by_name(self, saved: Sequence[Tensor]) -> dict[str, Tensor]:
        """A saved copy as tensors by buffer name, for comparisons and reports."""
        return {name: self._part(i, saved) for i, name in enumerate(self.names)}
