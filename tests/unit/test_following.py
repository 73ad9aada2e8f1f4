"""A newcomer that steps along with a member ends with the member's bits, whatever happens on the way."""

import errno
import os
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from followed import KINDS, Member, all_tensors, assert_same, prepared_of, settle
from torch.optim.optimizer import register_optimizer_step_pre_hook

from concertina.core.formation import Formation
from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.catch_up import LEAVES_GRADIENTS, CatchUp, rehearse_update
from concertina.runtime.desk import METAS, Desk
from concertina.runtime.handover import hand_over, pack, receive, unpack
from concertina.runtime.member_memory import MemberMemory
from concertina.runtime.pieces import ELEMENTWISE
from concertina.runtime.prepared import Prepared
from concertina.runtime.shown import Shown
from concertina.runtime.sources import MOVES, Sources
from concertina.runtime.state_map import describe
from concertina.runtime.sums import SharedSums


def follow(
    member: Member, kind: Any, awaited: Callable[[], bool] = lambda: True, **options: Any
) -> tuple[CatchUp, Prepared]:
    newcomer = prepared_of(kind, 2, **options)
    description = describe(member.prepared)
    assert description is not None
    return CatchUp(MemberMemory(os.getpid()), member.desk, newcomer, description, awaited=awaited), newcomer


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_it_steps_at_the_same_time_and_comes_to_the_same(kind: Any, options: Any, shares: bool) -> None:
    member = Member(kind, shares, **options)
    member.step()
    catch_up, newcomer = follow(member, kind, **options)
    settle(catch_up)
    for _ in range(3):
        member.begin()
        while catch_up.follow_note():  # beside the member's optimizer, not after it
            pass
        member.end()
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)
    assert bool(catch_up._grads) == (not shares or kind not in LEAVES_GRADIENTS)  # copies only where there must be


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_rehearsing_an_update_makes_one_and_changes_nothing(
    kind: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, untouched = prepared_of(kind, 1, **options), prepared_of(kind, 1, **options)
    made: list[int] = []
    plain = kind.step
    monkeypatch.setattr(kind, "step", lambda self: made.append(len(self.param_groups[0]["params"])) or plain(self))
    rehearse_update(prepared.optimizers[0])
    assert made == [1]  # of one device and one dtype
    assert pack(prepared.state()) == pack(untouched.state())


def test_only_torchs_own_optimizers_rehearse() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise AssertionError("made an update")

    rehearse_update(prepared_of(Odd, 1).optimizers[0])


def test_an_optimizer_of_matrices_rehearses_an_update_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = torch.optim.Muon.step
    monkeypatch.setattr(torch.optim.Muon, "step", lambda self: (plain(self), made.append(1)))
    rehearse_update(torch.optim.Muon([torch.nn.Parameter(torch.ones(3, 5))]))
    assert made == [1]


def test_parameters_that_are_not_trained_rehearse_nothing() -> None:
    packed = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    rehearse_update(torch.optim.AdamW([packed, torch.nn.Parameter(torch.ones(3))]))


def test_an_optimizer_that_cannot_rehearse_ends_no_newcomer() -> None:
    rehearse_update(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(3))]))  # it asks for a closure


def test_hooks_that_a_script_has_for_all_optimizers_see_its_own_updates_only() -> None:
    seen: list[Any] = []
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    try:
        rehearse_update(newcomer.optimizers[0])
        member.step()
        assert catch_up.reaches(member.number)
    finally:
        hook.remove()
    assert seen == [member.optimizer]
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)


class Damped(torch.optim.Optimizer):
    """A script's own, with something that it acts with as its attribute."""

    def __init__(self, params: Any, lr: float = 0.1, damping: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.damping = damping

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * self.damping)


def test_an_optimizer_with_attributes_of_its_own_is_replayed_with_them() -> None:
    member = Member(Damped, shares=True)
    member.step()
    catch_up, newcomer = follow(member, Damped)
    settle(catch_up)
    member.step()
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)


class Named(Damped):
    """Acts on nothing but the parameters that it knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.names = {id(p): str(i) for i, p in enumerate(self.param_groups[0]["params"])}

    def step(self, closure: Any = None) -> None:
        assert all(self.names[id(p)] for group in self.param_groups for p in group["params"])
        super().step()


def test_what_an_optimizer_cannot_do_to_other_parameters_is_left_to_the_switch() -> None:
    member = Member(Named, shares=True)
    member.step()
    catch_up, newcomer = follow(member, Named)
    settle(catch_up)
    for _ in range(2):
        member.step()
        assert catch_up.reaches(member.number)
    assert catch_up.in_step
    assert "cannot be made elsewhere (KeyError" in catch_up.gave_up
    assert catch_up.finish(member.number) == len(member.params)
    assert_same(member, newcomer)


class Counting(torch.optim.Optimizer):
    """Keeps something that is of no parameter, as MADGRAD does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        steps = self.state.setdefault("k", torch.tensor([0]))  # type: ignore[call-overload]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / (1 + steps.item()))
        steps += 1


def test_what_an_optimizer_keeps_for_no_parameter_is_handed_over_with_all_else() -> None:
    member = Member(Counting, shares=True)
    for _ in range(2):
        member.step()
    assert describe(member.prepared) is None
    handed = hand_over(member.prepared, {}, whole=False)
    newcomer = prepared_of(Counting, 2)
    newcomer.load(receive(handed.address)["whole"])
    assert newcomer.optimizers[0].state["k"] == 2  # type: ignore[index]
    assert all(map(torch.equal, newcomer.model.parameters(), member.params))


class Averaging(torch.optim.Optimizer):
    """What it keeps lies in the order of the indices, however its parameter lies in memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                kept = self.state[p].setdefault("average", torch.zeros(p.shape))
                p.sub_(kept.mul_(0.9).add_(p.grad), alpha=0.1)


def _with_columns_together(prepared: Prepared) -> None:
    for p in prepared.model.parameters():
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t()


def test_state_that_lies_otherwise_than_its_parameter_is_replayed_in_its_own_order() -> None:
    member = Member(Averaging, shares=False)
    _with_columns_together(member.prepared)
    for i, p in enumerate(member.params):
        member.grads[i] = torch.empty_like(p)
    member.step()
    newcomer = prepared_of(Averaging, 2)
    _with_columns_together(newcomer)
    description = describe(member.prepared)
    assert description is not None
    catch_up = CatchUp(MemberMemory(os.getpid()), member.desk, newcomer, description)
    settle(catch_up)
    member.step()
    settle_comparisons(catch_up)
    assert catch_up.differing == 0
    assert_same(member, newcomer)


def test_state_of_a_shape_of_its_own_is_found_equal() -> None:
    member = Member(torch.optim.Adafactor, shares=True)
    member.step()
    assert {t.dim() for t in all_tensors(member.prepared)} == {0, 1, 2}
    catch_up, newcomer = follow(member, torch.optim.Adafactor)
    settle(catch_up)
    member.step()
    settle_comparisons(catch_up)
    assert catch_up.differing == 0
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)


def test_gradients_that_are_overwritten_too_soon_are_not_trusted() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    member.begin()
    member.end()
    member.desk.overwritten = member.number + 1  # the next step's have come before the newcomer looked
    for grad in member.grads.values():
        grad.zero_()
    while catch_up.follow_note():
        pass
    assert not catch_up.in_step
    settle(catch_up)
    member.step()
    assert catch_up.reaches(member.number)
    catch_up.finish(member.number)
    assert_same(member, newcomer)


@pytest.mark.parametrize(("updates", "spoiled"), [(1, True), (2, False)])
def test_a_step_that_cannot_be_made_here_is_copied_in_the_end(updates: int, spoiled: bool) -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    for _ in range(4):
        settle(catch_up)
        member.begin()
        member.end(updates, spoiled)
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) > 0
    assert_same(member, newcomer)


def test_whoever_misses_notes_begins_again() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    for _ in range(METAS):
        member.step()
    settle(catch_up)
    member.step()
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)


def test_the_place_of_sums_that_another_segment_has_taken_over_is_not_used() -> None:
    param = torch.zeros(3)
    layout = BucketLayout.initial([param], DdpOptions())
    first, second = SharedSums(layout), SharedSums(layout)
    base, size, _, token = first.where
    address = first.flats[0].data_ptr()
    assert MemberMemory(os.getpid()).find([first.where], address, param) is not None
    assert MemberMemory(os.getpid()).find([(base, size, second.where[2], token)], address, param) is None


VARIANTS = [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1, "maximize": True}, {"fused": True}]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("kind", LEAVES_GRADIENTS)
def test_optimizers_that_use_the_members_gradients_do_not_write_to_them(kind: Any, options: Any) -> None:
    assert kind in ELEMENTWISE
    prepared = prepared_of(kind, 1, lr=0.1, **options)
    params = list(prepared.model.parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in params if p.grad is not None]
    for _ in range(2):
        prepared.optimizers[0].step()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True) if p.grad is not None)


@pytest.mark.parametrize(
    "state",
    [
        {"betas": (0.9, 0.999), 3: [None, True, 1.5, "x"], "nested": {"t": (1, [2, (3,)])}, "inf": float("inf")},
        {"of torch": Counter({30: 1}), "betas": (0.9, 0.999)},
    ],
)
def test_what_is_handed_over_comes_back_as_it_was(state: Any) -> None:
    back = unpack(pack(state))
    assert back == state
    assert type(back["betas"]) is tuple


def test_tensors_can_be_handed_over_too() -> None:
    back = unpack(pack({"average": torch.arange(3.0), "betas": (1, 2)}))
    assert torch.equal(back["average"], torch.arange(3.0))
    assert back["betas"] == (1, 2)


class Shows:
    """A member with `shown.py` itself, and nothing else around it."""

    def __init__(self) -> None:
        self.prepared = prepared_of(torch.optim.AdamW, 1)
        self.desk = Desk.create(2, 100)
        self.engine = SimpleNamespace(
            reducer=object(), on_update=None, on_updated=None, before_results=None, on_spoiled=None
        )
        wanted = SimpleNamespace(joiners=(7,), generation=3, members=(1, 7), desks=("1/fd/1", "7/fd/1"))
        membership = SimpleNamespace(wanted=wanted, in_background=lambda work: work())
        self.shown = Shown(cast(Any, self.engine), cast(Any, membership), self.desk)
        self.shown.prepared = self.prepared
        self.step()  # the optimizer makes its state
        self.shown.show()

    def step(self) -> None:
        for p in self.prepared.model.parameters():
            p.grad = torch.randn_like(p)
        if self.engine.on_update is not None:
            self.engine.on_update(0)
        self.prepared.optimizers[0].step()
        if self.engine.on_updated is not None:
            self.engine.on_updated()
        self.shown.step += 1

    def last_note(self) -> dict[str, Any]:
        note = self.desk.read_note(self.desk.noted)
        assert note is not None
        return note


def _zero(grad: torch.Tensor) -> None:
    grad.data.zero_()  # as scripts of old do it, past autograd's counting of versions


@pytest.mark.parametrize(("meddle", "spoiled"), [(lambda grad: None, False), (_zero, True)])
def test_gradients_that_a_script_changes_after_the_update_spoil_the_step(meddle: Any, spoiled: bool) -> None:
    member = Shows()
    for _ in range(2):
        member.step()
        assert member.last_note()["step"] == member.shown.step
        assert member.desk.clock % 2 == 1
        for p in member.prepared.model.parameters():
            meddle(p.grad)
        member.shown.show()
        assert member.last_note() == {"step": member.shown.step, "updates": 1, "spoiled": spoiled}
        assert member.desk.clock == 2 * member.shown.step


def _clamp(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("before", [True, False])
def test_parameters_that_a_script_changes_itself_are_named(before: bool) -> None:
    member = Shows()
    params = list(member.prepared.model.parameters())
    for _ in range(2):
        if before:
            _clamp(params[1])
        member.step()
        if not before:
            _clamp(params[1])
        member.shown.show()
        assert member.last_note() == {"step": member.shown.step, "updates": 1, "spoiled": False, "changed": [1]}
    member.step()
    member.shown.show()
    assert "changed" not in member.last_note()


def test_state_that_has_moved_is_described_again() -> None:
    member = Shows()
    before = member.desk.described
    member.step()
    param = next(iter(member.prepared.model.parameters()))
    state = member.prepared.optimizers[0].state[param]
    state["exp_avg"] = state["exp_avg"].clone()
    member.shown.show()
    assert member.last_note()["spoiled"]
    assert member.desk.described != before


def sources_of(member: Shows) -> tuple[Sources, Prepared]:
    own, newcomer = Desk.create(2, 100), prepared_of(torch.optim.AdamW, 2)
    formation = Formation(
        generation=3,
        members=(1, 7),
        placement=VirtualPlacement.blocks(2, 2),
        desks=(member.desk.segment.address, own.segment.address),
        joiners=(7,),
        sources=((1, member.desk.segment.address),),
    )
    return Sources(formation, 7, own, newcomer, 2), newcomer


def test_a_member_that_gives_memory_back_is_not_taken_for_ended() -> None:
    sources, _ = sources_of(Shows())
    assert sources.begin() is not None
    sources.lost_sight(OSError(errno.EFAULT, "cannot read the memory of a process"))
    assert sources.wants_beginning
    assert not sources.gone
    sources.lost_sight(OSError(errno.ESRCH, "cannot read the memory of a process"))
    assert sources.gone


def test_state_that_moves_at_every_step_is_left_to_the_switch() -> None:
    member = Shows()
    sources, _ = sources_of(member)
    param = next(iter(member.prepared.model.parameters()))
    for _ in range(MOVES):
        catch_up = sources.begin()
        assert catch_up is not None
        assert not catch_up.in_step
        member.step()
        param.data = param.data.clamp(-0.1, 0.1)
        member.shown.show()
        assert sources.wants_beginning
    catch_up = sources.begin()
    assert catch_up is not None
    assert catch_up.in_step
    assert "in other memory" in catch_up.gave_up
    member.step()
    param.data = param.data.clamp(-0.1, 0.1)
    member.shown.show()
    assert not sources.wants_beginning  # it would be in vain
    assert sources.have_moved


def test_tensors_among_hyperparameters_are_not_shown() -> None:
    member = Shows()
    member.prepared.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    member.step()
    note = member.last_note()
    assert note["optimizer"] == 0
    assert "grads" not in note


def test_a_comparison_before_any_step_was_made_proves_nothing() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    member.step()
    with torch.no_grad():
        member.params[0].data.clamp_(-0.1, 0.1)  # as some scripts do after every step
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == 1
    assert_same(member, newcomer)


def test_what_differs_unexplained_makes_everything_else_suspect() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    for changed in (0, 1):  # past autograd's counting of versions, once to one of them, once to another
        member.step()
        member.params[changed].data.clamp_(-0.01, 0.01)
        settle_comparisons(catch_up)
    assert catch_up.reaches(member.number)
    assert catch_up.finish(member.number) == len(member.params)
    assert_same(member, newcomer)


def settle_comparisons(catch_up: CatchUp) -> None:
    while any(not piece.proved and piece.exact for piece in catch_up._pieces):
        catch_up.work()
        time.sleep(1e-4)


def test_what_a_script_changes_itself_is_told_and_copied_at_the_switch() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW)
    settle(catch_up)
    member.step()
    settle_comparisons(catch_up)
    with torch.no_grad():
        member.params[1].clamp_(-0.01, 0.01)
    member.begin()
    member.end(changed=[1])
    assert catch_up.reaches(member.number)
    assert catch_up.in_step
    assert catch_up.finish(member.number) == 1
    assert_same(member, newcomer)


def test_who_is_not_waited_for_is_ready_when_it_has_made_a_step() -> None:
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, newcomer = follow(member, torch.optim.AdamW, awaited=lambda: False)
    for _ in range(100):
        catch_up.work()
        time.sleep(1e-4)
    assert not catch_up.in_step
    member.step()
    settle(catch_up)
    assert all(piece.proved for piece in catch_up._pieces)
    assert catch_up.finish(member.number) == 0
    assert_same(member, newcomer)


@pytest.mark.parametrize("awaited", [True, False])
def test_who_is_waited_for_does_not_rest(awaited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemberMemory, "rests", lambda memory: True)
    member = Member(torch.optim.AdamW, shares=True)
    member.step()
    catch_up, _ = follow(member, torch.optim.AdamW, awaited=lambda: awaited)
    for _ in range(10):
        catch_up.work()
    assert catch_up.in_step == awaited
