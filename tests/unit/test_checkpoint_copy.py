"""What the training thread gives to the checkpoint writer: the same state, which does not change any more."""

import io
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from concertina.runtime.checkpoint import to_bytes
from concertina.runtime.checkpoint_writer import in_memory
from concertina.runtime.prepared import Prepared


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, (2.0, None)], 3: "text"},
        OrderedDict(b=1, a=2),
        Counter({30: 1, 80: 2}),
        defaultdict(int, {"x": 1}),
        {"milestones": Counter([30, 80, 80])},
    ],
)
def test_a_copy_is_of_the_same_kind_and_holds_the_same(state: Any) -> None:
    made = in_memory(state)
    assert made == state
    assert type(made) is type(state)
    assert made is not state


def test_a_copy_does_not_change_with_its_original() -> None:
    weights, inner = torch.zeros(2), Counter({30: 1})
    made = in_memory({"weights": weights, "inner": inner})
    weights.add_(1)
    inner[30] += 1
    assert made["weights"].tolist() == [0, 0]
    assert made["inner"] == {30: 1}


def test_a_scheduler_with_milestones_keeps_them_through_a_checkpoint() -> None:
    def made() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.MultiStepLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])

    saved = torch.load(io.BytesIO(to_bytes(in_memory(made()[1].state_dict()))), weights_only=True)
    optimizer, scheduler = made()
    scheduler.load_state_dict(saved)
    rates = []
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        rates.append(round(scheduler.get_last_lr()[0], 3))
    assert rates == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_what_an_optimizer_keeps_in_another_precision_comes_back_as_it_was(kind: Any) -> None:
    def made() -> Prepared:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).bfloat16()
        return Prepared.sort((model, kind(model.parameters())))

    before, after = made(), made()
    for _ in range(3):
        for param in before.model.parameters():
            param.grad = torch.randn_like(param)
        before.optimizers[0].step()
    after.load(torch.load(io.BytesIO(to_bytes(in_memory(before.state()))), weights_only=True))
    kept = [list(p.optimizers[0].state.values()) for p in (before, after)]
    assert [{k: v.dtype for k, v in state.items()} for state in kept[0]] == [
        {k: v.dtype for k, v in state.items()} for state in kept[1]
    ]
    for ours, theirs in zip(*kept, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_optimizer_that_writes_its_state_in_its_own_way_reads_it_too() -> None:
    class Plain(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"rate": self.param_groups[0]["lr"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.param_groups[0]["lr"] = state_dict["rate"]

    def made(lr: float) -> Prepared:
        model = torch.nn.Linear(3, 2)
        return Prepared.sort((model, Plain(model.parameters(), lr=lr)))

    after = made(0.1)
    after.load(torch.load(io.BytesIO(to_bytes(in_memory(made(0.5).state()))), weights_only=True))
    assert after.optimizers[0].param_groups[0]["lr"] == 0.5
