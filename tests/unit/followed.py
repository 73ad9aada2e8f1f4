"""A member of a job as newcomers see it, made by hand, and what both must agree in."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.catch_up import CatchUp
from concertina.runtime.desk import Desk
from concertina.runtime.prepared import Prepared
from concertina.runtime.sums import SharedSums

PATIENCE = 20.0

KINDS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {}),
]


def prepared_of(kind: Any, seed: int, **options: Any) -> Prepared:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    return Prepared.sort((model, kind(model.parameters(), **options)))


class Member:
    """What `shown.py` does in a member, by hand; in this process, whose memory a newcomer can read as well."""

    def __init__(self, kind: Any, shares: bool, **options: Any) -> None:
        self.prepared = prepared_of(kind, 1, **options)
        self.optimizer = self.prepared.optimizers[0]
        self.params = list(self.prepared.model.parameters())
        layout = BucketLayout.initial(self.params, DdpOptions())
        self.sums = SharedSums(layout)
        self.grads = dict(zip(layout.buckets[0], layout.views(0, self.sums.flats[0]), strict=True))
        self.shared = [self.sums.where] if shares else []
        self.desk = Desk.create(2, 100)
        self.number = 0

    def begin(self) -> None:
        """Up to the moment right before the optimizer acts."""
        step = self.number + 1
        self.desk.overwritten = step
        for i, p in enumerate(self.params):
            self.grads[i].copy_(torch.randn(p.shape))
            p.grad = self.grads[i]
        self.desk.clock = 2 * self.number + 1
        self.desk.note(
            {
                "step": step,
                "optimizer": 0,
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
                "grads": [[i, g.data_ptr()] for i, g in self.grads.items()],
                "shared": self.shared,
            }
        )

    def end(self, updates: int = 1, spoiled: bool = False, changed: Sequence[int] = ()) -> None:
        self.optimizer.step()
        self.number += 1
        self.desk.clock = 2 * self.number
        self.desk.note(
            {
                "step": self.number,
                "updates": updates,
                "spoiled": spoiled,
                **({"changed": list(changed)} if changed else {}),
            }
        )

    def step(self) -> None:
        self.begin()
        self.end()


def all_tensors(prepared: Prepared) -> list[torch.Tensor]:
    kept = [t for p in prepared.model.parameters() for t in prepared.optimizers[0].state[p].values()]
    return [*prepared.model.parameters(), *(t for t in kept if isinstance(t, torch.Tensor))]


def settle(catch_up: CatchUp) -> None:
    until = time.monotonic() + PATIENCE
    while not catch_up.in_step:
        assert time.monotonic() < until, "not in step"
        if not catch_up.work():
            time.sleep(1e-4)  # it lets the member have its memory


def assert_same(member: Member, newcomer: Prepared) -> None:
    ours, theirs = all_tensors(newcomer), all_tensors(member.prepared)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
