"""One virtual worker's turn, and what must not happen in it.

The loop body runs once per virtual worker, so some of what a DDP script may do would quietly give other numbers here.
Each check below refuses one such thing, in a sentence that says what to write instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from concertina.core.errors import UnsupportedScript


@dataclass(slots=True)
class Turn:
    """One pass of the loop body by one virtual worker."""

    virtual_worker: int
    is_last: bool
    syncs_buffers_next: bool  # DDP's require_forward_param_sync
    forwards: int = 0
    sync: bool | None = None  # whether the last forward was a synchronising one
    ready: set[int] = field(default_factory=set)  # parameters whose gradient was taken out
    ready_order: list[int] = field(default_factory=list)
    watching: bool = False  # a backward has begun
    backward_done: bool = False
    stepped: bool = False
    versions: int = 0  # of all parameters at the beginning
    rates_at_step: list[float] | None = None  # learning rates when the optimizer was asked to step


# -- before a round ----------------------------------------------------------------------------------------------------


def check_still_frozen(frozen: Sequence[tuple[str, torch.Tensor]]) -> None:
    """These required no gradient at prepare(); gradients of theirs would be summed by nobody."""
    thawed = [name for name, param in frozen if param.requires_grad]
    if thawed:
        some = ", ".join(thawed[:5]) + (" ..." if len(thawed) > 5 else "")
        raise UnsupportedScript(
            f"{len(thawed)} parameters that were frozen at prepare() require gradients now ({some}), which would not "
            "be summed, as under DistributedDataParallel: freeze them after prepare(find_unused_parameters=True)"
        )


# -- in a forward ------------------------------------------------------------------------------------------------------


def check_forward(turn: Turn, sync_allowed: bool) -> None:
    """The model is about to be called."""
    if turn.stepped and torch.is_grad_enabled():
        raise UnsupportedScript(
            "the model is used for training again after optimizer.step() in the same loop body: virtual workers "
            "that ran earlier have not seen that update. Put each optimizer step into a loop body of its own"
        )
    if turn.backward_done and torch.is_grad_enabled() and sync_allowed:
        raise UnsupportedScript(
            "a second synchronising forward in one loop body: put all but the last forward and backward of a body "
            "under session.no_sync()"
        )


def check_buffers(turn: Turn, unchanged: Callable[[], bool]) -> None:
    """The model is about to be called, and virtual worker 0's buffers were broadcast before this round."""
    if turn.forwards > 0 and turn.syncs_buffers_next and not unchanged():
        raise UnsupportedScript(
            "the model is called twice in one loop body and changes its buffers: DDP would broadcast them in "
            "between. Pass broadcast_buffers=False to prepare(), or call the model once per body"
        )


# -- in a backward -----------------------------------------------------------------------------------------------------


def check_model_was_called(turn: Turn) -> None:
    """A gradient has appeared."""
    if turn.sync is None:
        raise UnsupportedScript(
            "gradients arrived although the prepared model was not called in this loop body: call model(...) "
            "itself, not one of its methods or parts, as DistributedDataParallel requires too"
        )


def check_first_time(turn: Turn, index: int, name: str) -> None:
    """The gradient of a parameter has appeared in a synchronising backward."""
    if index in turn.ready:
        raise UnsupportedScript(
            f"parameter {name} got its gradient twice in one loop body (a second backward, or "
            "reentrant activation checkpointing); use one backward per body and use_reentrant=False"
        )


def check_backward(turn: Turn, forgot_to_clear: bool) -> None:
    """A synchronising backward has begun."""
    if turn.backward_done:
        raise UnsupportedScript("a second backward() in one loop body: add the losses up and call it once")
    if forgot_to_clear:
        raise UnsupportedScript(
            "earlier steps called optimizer.zero_grad() before backward(), this one did not: call it in every body"
        )


def check_dense(name: str, grad: Any) -> None:
    if grad.requires_grad:
        raise UnsupportedScript("backward(create_graph=True) gives gradients that cannot be taken out")
    if grad.layout is not torch.strided:
        raise UnsupportedScript(f"parameter {name} has a sparse gradient; make its module with sparse=False")


def check_none_missing(missing: Sequence[int], names: Sequence[str]) -> None:
    """A backward is over in which every parameter should have got a gradient."""
    if missing:
        some = ", ".join(names[i] for i in missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise UnsupportedScript(
            f"{len(missing)} parameters got no gradient ({some}); if that is meant, pass "
            "find_unused_parameters=True to prepare(), or freeze them with requires_grad_(False)"
        )


# -- at the end of a turn ----------------------------------------------------------------------------------------------


def check_backward_came(turn: Turn) -> None:
    if turn.sync and not turn.backward_done:
        raise UnsupportedScript(
            f"virtual worker {turn.virtual_worker} called the model with gradients on but ended its turn without "
            "a backward(); run such forwards under torch.no_grad()"
        )


def check_same_kind(turn: Turn, other: Turn) -> None:
    """Two virtual workers have had their turn in this round."""
    if (other.sync, other.backward_done) != (turn.sync, turn.backward_done):
        raise UnsupportedScript(
            f"virtual workers {other.virtual_worker} and {turn.virtual_worker} of one step disagree on whether "
            "gradients are synchronised; count with loader.index instead of enumerate(), whose count runs on "
            "over virtual workers"
        )


def check_nothing_stepped(turn: Turn, versions: int, rates: Callable[[], list[float]]) -> None:
    """Before the last turn nothing may happen that belongs to a step, since it would happen once per turn."""
    changed = ""
    if versions != turn.versions:
        changed = "parameters are changed"
    elif turn.rates_at_step is not None and turn.rates_at_step != rates():
        changed = "the learning rate is changed after optimizer.step()"
    if changed:
        raise UnsupportedScript(
            f"{changed} in the loop body by hand, which runs once per virtual worker: put that under "
            "`if session.is_last_turn:`, where it happens once per step"
        )
