"""Virtual workers: P slices of the global batch, run one after another by however many workers there are.

The engine hangs on the model's own hooks. While a virtual worker's turn lasts, its random state, buffers and
accumulated gradients are the live ones; a hook takes each gradient out as it appears and lays it into the bucket.
At the end of the last local virtual worker's backward the buckets are summed, so that from there on the user's code
(clipping, scaler, optimizer) sees what it would see under DistributedDataParallel.
"""

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from concertina.core.errors import UsageError
from concertina.core.placement import VirtualPlacement
from concertina.runtime.accumulation import Accumulation
from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.buffers import FlatBuffers, Saved
from concertina.runtime.contexts import Contexts
from concertina.runtime.desk import is_final
from concertina.runtime.fabric import PeersLost
from concertina.runtime.gradients import Gradients
from concertina.runtime.membership import Generation
from concertina.runtime.model_hooks import ModelHook
from concertina.runtime.reduce import LocalFold, Reducer
from concertina.runtime.torch_internals import call_after_backward
from concertina.runtime.turn import (
    Turn,
    check_backward,
    check_backward_came,
    check_buffers,
    check_first_time,
    check_forward,
    check_model_was_called,
    check_none_missing,
    check_nothing_stepped,
    check_same_kind,
    check_still_frozen,
)

# Of gradients: the kernel takes its time to find room for them. On a GPU, torch keeps what it has had.
MUCH_BYTES = 16 << 20

MakeReducer = Callable[[BucketLayout, Generation], Reducer]


class VirtualEngine:
    """The virtual workers of one worker, for one model."""

    def __init__(
        self,
        model: nn.Module,
        options: DdpOptions,
        virtual: int,
        make_reducer: MakeReducer,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.model = model
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        trained = {id(p) for p in self.params}
        frozen = [(name, p) for name, p in model.named_parameters() if id(p) not in trained]
        self._frozen = frozen if virtual > 1 else []
        self.frozen = [p for _, p in frozen if not p.is_inference()]
        self._has_much_on_host = sum(p.nbytes for p in self.params if not p.is_cuda) > MUCH_BYTES
        self.options = options
        self.virtual = virtual
        self.generation: Generation | None = None  # a newcomer has none until it is let in
        self.layout = BucketLayout.initial(self.params, options)
        self.buffers = FlatBuffers(model)
        self.contexts = Contexts(self.params, self.names, self.buffers, virtual, options.tracks_usage)
        self.accumulation = Accumulation(self.params, options.gradient_as_bucket_view)
        self.gradients = Gradients(self.params, self.names, self.layout, options, virtual, self.accumulation)
        self.gradients.before_filling = self._before_filling
        self.turn: Turn | None = None
        self.last_turn: Turn | None = None  # of the current round, kept for checks and records
        self.sync_allowed = True  # false inside no_sync()
        self.syncs_buffers = True  # DDP's flag, as it stands before the coming round
        self.syncs_at_point = True  # `syncs_buffers` as of the last recovery point
        self.step_done = False  # the current round has reduced its gradients
        self.point = 0  # the recovery point: rounds that count, and beginnings of passes
        self.rehearses = False  # a newcomer runs the loop's body once, for nothing
        self.round_failed = False  # a worker was lost in this round: it does not count and will be run again
        self.optimizers = 0
        self.stepping: list[torch.optim.Optimizer] = []  # the prepared optimizers
        self.covers_all_params = False
        self.on_enter: Callable[[Turn], None] | None = None
        self.on_leave: Callable[[Turn], None] | None = None
        self.on_reduced: Callable[[], None] | None = None  # gradients are summed, user code has not touched them
        self.commit: Callable[[], None] = lambda: None  # all workers have folded; raises PeersLost if one is gone
        self.on_update: Callable[[int], None] | None = None  # while newcomers follow: optimizer k is about to step
        self.on_updated: Callable[[], None] = lambda: None  # it has stepped
        self.before_results: Callable[[], None] = lambda: None
        self.on_spoiled: Callable[[], None] = lambda: None
        self.on_take_up: Callable[[Generation], None] = lambda generation: None
        self._make_reducer = make_reducer
        self._stale_reducer = False
        self._param_hooks: list[Any] = []
        self._outputs_are_tensors = True  # so that the start of a backward can be seen at the model's output
        self._first_order: list[int] = []  # in which virtual worker 0's gradients became ready
        self._static_usage: list[bool] | None = None
        self._synced_buffers: Saved | None = None
        model.register_forward_pre_hook(ModelHook(self._before_forward))
        model.register_forward_hook(ModelHook(self._after_forward))
        self._hang_on_params()

    # -- the generation in force -------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, ...]:
        """Local virtual workers in the order of their turns."""
        return self.reducer.order

    @property
    def reducer(self) -> Reducer:
        return self.gradients.reducer

    @property
    def placement(self) -> VirtualPlacement:
        assert self.generation is not None
        return self.generation.placement

    def take_up(self, generation: Generation) -> None:
        """Changes over to a generation that has been built, between two rounds; contexts have to be loaded after."""
        before = self.generation
        self.generation = generation
        self.on_take_up(generation)
        views = self.gradients.use(generation.reducer)
        if before is not None:
            before.kept.append(views)  # large memory may go with them
        self._stale_reducer = generation.buckets != self.layout.buckets

    def _renew_reducer(self) -> None:
        """DDP has laid its buckets anew."""
        assert self.generation is not None
        self.generation.reducer = None
        self.gradients.use(None)  # its memory goes before the next one's comes
        self.generation.reducer = self._make_reducer(self.layout, self.generation)
        self.gradients.use(self.generation.reducer)
        self._stale_reducer = False

    def _hang_on_params(self) -> None:
        hooks = [p.register_post_accumulate_grad_hook(partial(self._on_grad, i)) for i, p in enumerate(self.params)]
        self._param_hooks = hooks

    def seed(self, seed: int) -> None:
        if self.turn is not None:
            raise UsageError("session.seed() inside the loop body: call it before the loop")
        self.contexts.seed(seed)

    # -- rounds: one turn of every local virtual worker --------------------------------------------------------------

    def begin_round(self) -> None:
        check_still_frozen(self._frozen)
        if self._stale_reducer:
            self._renew_reducer()
        self._choose_when_to_take()
        self.accumulation.begin_round()
        if self.syncs_buffers and self.options.broadcast_buffers and self.buffers:
            self._synced_buffers = self._buffers_of_first()
        else:
            self._synced_buffers = None
        self.step_done = False
        self.last_turn = None
        self.round_failed = False

    def _choose_when_to_take(self) -> None:
        """Gradients one by one as they appear, or all at the end of a backward: cheaper where nothing could overlap,
        and where room for all of them is nothing that has to be waited for when a job shrinks to one worker.

        Decided when all layers can be trained: torch hangs nothing on those that a script has frozen for a while.
        """
        if not all(param.requires_grad for param in self.params):
            return
        at_end = (
            isinstance(self.reducer, LocalFold)
            and not self._has_much_on_host
            and not self.layout.wants_ready_order
            and not self.options.tracks_usage
            and self.gradients.observer is None
            and self._outputs_are_tensors
        )
        if at_end and self._param_hooks:
            for hook in self._param_hooks:
                hook.remove()
            self._param_hooks = []
        elif not at_end and not self._param_hooks:
            self._hang_on_params()

    def _buffers_of_first(self) -> Saved | None:
        """The buffers of virtual worker 0, which DDP gives to everybody before a forward."""
        if self.virtual == 1:
            return None
        generation = self.generation
        assert generation is not None
        if self.contexts.resident == 0:
            self.buffers.save_to(self.contexts[0].buffers)
        if 0 in self.contexts:
            return self.contexts[0].buffers
        home = generation.formation.members[self.placement.host(0)]
        desk, number = generation.desks[home], self.point
        generation.fabric.wait_for(home, lambda: is_final(desk, 0, number))
        record = desk.context(0, number)
        assert record is not None
        return self.contexts.buffers_of_record(record[0])

    def enter(self, virtual_worker: int) -> None:
        """Begins a turn."""
        self.leave()
        self.contexts.apart = True
        self.contexts.make_resident(virtual_worker)
        if self._synced_buffers is not None:
            self.buffers.load_from(self._synced_buffers)
        self.accumulation.hand_out(self.contexts[virtual_worker])
        self.gradients.begin_turn()
        self.turn = Turn(virtual_worker, virtual_worker == self.order[-1], self.syncs_buffers)
        if not self.turn.is_last:
            self.turn.versions = self._versions()
        if self.on_enter is not None:
            self.on_enter(self.turn)

    def leave(self) -> None:
        """Ends the turn in progress, if any."""
        turn, self.turn = self.turn, None
        if turn is None:
            return
        check_backward_came(turn)
        if self.round_failed:
            return
        if self.last_turn is not None:
            check_same_kind(turn, self.last_turn)
        if not turn.is_last:
            check_nothing_stepped(turn, self._versions(), self.learning_rates)
        if not turn.backward_done:
            self.accumulation.keep(self.contexts[turn.virtual_worker])
        self.last_turn = turn
        if self.on_leave is not None:
            self.contexts.save_resident()
            self.on_leave(turn)

    def end_round(self) -> None:
        self.leave()
        if self.last_turn is not None and not self.round_failed:
            self.syncs_buffers = self.last_turn.syncs_buffers_next

    def _versions(self) -> int:
        """Grows with every change of a parameter in place."""
        return sum(p._version for p in (*self.params, *self.frozen))

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for o in self.stepping for group in o.param_groups if "lr" in group]

    # -- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self.turn is None:
            return
        check_forward(self.turn, self.sync_allowed)
        if self._synced_buffers is not None:
            check_buffers(self.turn, self._buffers_unchanged)

    def _buffers_unchanged(self) -> bool:
        self.buffers.adopt_reassigned()
        assert self._synced_buffers is not None
        return all(torch.equal(a, b) for a, b in zip(self.buffers.flats, self._synced_buffers, strict=True))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        turn = self.turn
        if turn is None:
            return
        turn.forwards += 1
        turn.syncs_buffers_next = torch.is_grad_enabled() and self.sync_allowed
        if torch.is_grad_enabled():
            turn.sync = self.sync_allowed
            if turn.sync and not self._param_hooks:
                self._watch_outputs(output)

    def _watch_outputs(self, output: Any) -> None:
        """Without hooks on parameters, the first gradient at an output tells that a backward has begun."""
        leaves = tree_leaves(output)
        watched = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        for tensor in watched:
            tensor.register_hook(self._on_output_grad)
        if not watched or not all(isinstance(x, Tensor | int | float | str | None) for x in leaves):
            self._outputs_are_tensors = False
            self._hang_on_params()

    def _on_output_grad(self, grad: Tensor) -> None:
        turn = self.turn
        if turn is not None and turn.sync and not turn.watching:
            self._backward_begins(turn)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _on_grad(self, index: int, param: Tensor) -> None:
        """Autograd has just accumulated into `param.grad`."""
        turn = self.turn
        if turn is None:
            return
        if self.options.tracks_usage:
            self.contexts[turn.virtual_worker].used[index] = True
        if not turn.sync:
            check_model_was_called(turn)
            return
        if not turn.watching:
            self._backward_begins(turn)
        check_first_time(turn, index, self.names[index])
        turn.ready.add(index)
        turn.ready_order.append(index)
        self.gradients.take(turn.virtual_worker, index, param)

    def _backward_begins(self, turn: Turn) -> None:
        turn.watching = True
        check_backward(turn, self.accumulation.must_clear and not self._all_cleared(turn))
        call_after_backward(self._on_backward_end)

    def _all_cleared(self, turn: Turn) -> bool:
        return self.covers_all_params and len(self.contexts[turn.virtual_worker].cleared_by) == self.optimizers

    def _before_filling(self) -> None:
        if self.on_update is not None and self.reducer.overwrites_early:
            self.before_results()

    def _on_backward_end(self) -> None:
        turn = self.turn
        assert turn is not None
        if not self._param_hooks:
            self.gradients.take_all(turn)
        missing = [i for i in range(len(self.params)) if i not in turn.ready]
        if not self.options.tracks_usage:
            check_none_missing(missing, self.names)
        for i in missing:
            self.gradients.take(turn.virtual_worker, i, self.params[i])
        turn.backward_done, turn.watching = True, False
        if turn.virtual_worker == 0:
            self._first_order = turn.ready_order + missing
        if self._all_cleared(turn):
            self.accumulation.clears_first = True
        self.contexts[turn.virtual_worker].cleared_by = set()
        if turn.is_last:
            self._reduce()

    def _reduce(self) -> None:
        try:
            self.reducer.fold()
            used = self._usage()
            order = self._ready_order_of_first() if self.layout.wants_ready_order else None
            self.commit()
        except PeersLost:
            self._fail_round()
            return
        if self.on_update is not None:
            self.before_results()
        self.gradients.hand_back(not self._param_hooks, used)
        if order is not None:
            self.layout.rebuild(order)
            self._stale_reducer = True
        self.layout.synced_steps += 1
        self.step_done = True
        self.accumulation.stepped()
        if self.on_reduced is not None:
            self.on_reduced()

    def _fail_round(self) -> None:
        """The user's loop body goes on as in any turn but the last: nothing steps. Then the round is run again."""
        assert self.turn is not None
        self.turn.is_last = False
        self.round_failed = True
        self.accumulation.clear()

    def _usage(self) -> list[bool] | None:
        """Which parameters got a gradient from any virtual worker; None if all must have."""
        if not self.options.tracks_usage:
            return None
        if self._static_usage is not None:
            return self._static_usage
        counts = torch.zeros(len(self.params), dtype=torch.int32)
        for context in self.contexts.values():
            counts += torch.tensor(context.used, dtype=torch.int32)
            context.used = [False] * len(self.params)
        assert self.generation is not None
        everybody = self.generation.fabric.gather_bytes(bytes(n > 0 for n in counts.tolist()))
        used = [any(flags) for flags in zip(*everybody, strict=True)]
        if self.options.static_graph:
            self._static_usage = used
        return used

    def _ready_order_of_first(self) -> list[int]:
        """The order in which virtual worker 0's gradients became ready in this step, on every worker."""
        assert self.generation is not None
        orders = self.generation.fabric.gather_bytes(array("i", self._first_order).tobytes())
        return array("i", orders[self.placement.host(0)]).tolist()

    # -- what a checkpoint holds -------------------------------------------------------------------------------------

    def shared_state(self, light: bool = False) -> dict[str, Any]:
        """What is equal on all workers, apart from the user's own objects; `light` without gradients that the script
        clears before it uses them."""
        clears_first = self.accumulation.clears_first
        grads = self.step_done and not (light and clears_first)
        return {
            "layout": self.layout.state(),
            "syncs_buffers": self.syncs_buffers,
            "static_usage": self._static_usage,
            "grads": [p.grad for p in self.params] if grads else None,
            "clears_first": clears_first,
            "frozen": [i for i, p in enumerate(self.params) if not p.requires_grad],
            "evaluating": [name for name, module in self.model.named_modules() if _evaluates(module)],
        }

    def load_shared_state(self, state: dict[str, Any]) -> None:
        self.layout.load(state["layout"])
        self.syncs_buffers = state["syncs_buffers"]
        self._static_usage = state["static_usage"]
        self.accumulation.clears_first = state["clears_first"]
        for p, g in zip(self.params, state["grads"] or [None] * len(self.params), strict=True):
            p.grad = None if g is None else g.clone().to(p.device)
        if "frozen" in state:  # by what the script did in earlier epochs, which a newcomer has not run
            for i, p in enumerate(self.params):
                p.requires_grad_(i not in state["frozen"])
        if "evaluating" in state:
            evaluating = set(state["evaluating"])
            for name, module in self.model.named_modules():
                module.training = name not in evaluating
        self._stale_reducer = True


def _evaluates(module: nn.Module) -> bool:
    """A frozen TorchScript module has no such switch."""
    return not getattr(module, "training", True)
