"""Virtual workers: P slices of the global batch, run one after another by however many workers there are.

The engine hangs on the model's own hooks. While a virtual worker's turn lasts, its random state, buffers and
accumulated gradients are the live ones; a hook takes each gradient out as it appears and lays it into the bucket.
At the end of the last local virtual worker's backward the buckets are summed, so that from there on the user's code
(clipping, scaler, optimizer) sees what it would see under DistributedDataParallel.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from concertina.core.errors import UnsupportedScript, UsageError
from concertina.core.placement import VirtualPlacement
from concertina.runtime.buckets import BucketLayout, DdpOptions
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
from concertina.runtime.desk import Desk, is_final, newest_context
from concertina.runtime.fabric import PeersLost
from concertina.runtime.membership import Generation
from concertina.runtime.reduce import LocalFold, Reducer
from concertina.runtime.rng import RandomState, seed_everything
from concertina.runtime.torch_internals import call_after_backward

MakeReducer = Callable[[BucketLayout, Generation], Reducer]


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


class InertHook:
    """What a hook of ours becomes in a copy of the model: nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class ModelHook:
    """A forward hook that does not follow the model into copies and pickles (an EMA copy must not train)."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


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
        self.options = options
        self.virtual = virtual
        self.generation: Generation | None = None  # a newcomer has none until it is let in
        self.layout = BucketLayout.initial(self.params, options)
        self.buffers = FlatBuffers(model)
        self.contexts: dict[int, VirtualContext] = {}
        self.turn: Turn | None = None
        self.last_turn: Turn | None = None  # of the current round, kept for checks and records
        self.sync_allowed = True  # false inside no_sync()
        self.syncs_buffers = True  # DDP's flag, as it stands before the coming round
        self.step_done = False  # the current round has reduced its gradients
        self.optimizers = 0
        self.stepping: list[torch.optim.Optimizer] = []  # the prepared optimizers
        self.covers_all_params = False
        self.observer: Callable[[int, int, Tensor], None] | None = None  # (virtual worker, parameter, gradient)
        self.on_enter: Callable[[Turn], None] | None = None
        self.on_leave: Callable[[Turn], None] | None = None
        self.on_reduced: Callable[[], None] | None = None  # gradients are summed, user code has not touched them
        self.commit: Callable[[], None] = lambda: None  # all workers have folded; raises PeersLost if one is gone
        self.on_update: Callable[[int], None] | None = None  # while newcomers follow: optimizer k is about to step
        self.before_results: Callable[[], None] = lambda: None
        self.on_spoiled: Callable[[], None] = lambda: None
        self.on_take_up: Callable[[Generation], None] = lambda generation: None
        self.rehearses = False  # a newcomer runs the loop's body once, for nothing
        self.round_failed = False  # a worker was lost in this round: it does not count and will be run again
        self._make_reducer = make_reducer
        self._reducer: Reducer | None = None
        self._stale_reducer = False
        self._param_hooks: list[Any] = []
        self._shown: list[tuple[Tensor | None, int | None]] | None = None  # accumulated gradients seen outside the loop
        self.point = 0  # the recovery point: rounds that count, and beginnings of passes
        self.apart = False  # virtual workers have random states of their own
        self.resident: int | None = None  # the virtual worker whose random state and buffers are live
        self._outputs_are_tensors = True  # so that the start of a backward can be seen at the model's output
        self._bucket_of: list[tuple[int, int]] = []
        self._pending: list[int] = []
        self._filling: dict[int, list[Tensor]] = {}  # views of the buckets that this turn is filling
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # by (address, bucket)
        self._first_order: list[int] = []  # in which virtual worker 0's gradients became ready
        self._static_usage: list[bool] | None = None
        self._base: list[Tensor | None] | None = None  # gradients that the last step left to all virtual workers
        self._handed: list[Tensor | None] | None = None  # this turn's copy of them
        self._base_kept = False  # for the step that is under way
        self.syncs_at_point = True  # `syncs_buffers` as of the last recovery point
        self._clears_first = False  # the script sets gradients to None before every backward
        self._must_clear = False
        self._synced_buffers: Saved | None = None
        self._place_params()
        self._install_hooks()

    # -- set-up ------------------------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, ...]:
        """Local virtual workers in the order of their turns."""
        return self.reducer.order

    @property
    def reducer(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    @property
    def placement(self) -> VirtualPlacement:
        assert self.generation is not None
        return self.generation.placement

    def take_up(self, generation: Generation) -> None:
        """Changes over to a generation that has been built, between two rounds; contexts have to be loaded after."""
        if self.generation is not None:
            self.generation.kept.append(self._views)  # large memory may go with them
        self.generation = generation
        self.on_take_up(generation)
        self._reducer = generation.reducer
        self._stale_reducer = generation.buckets != self.layout.buckets
        self._filling = {}
        self._place_params()

    def _install_hooks(self) -> None:
        self.model.register_forward_pre_hook(ModelHook(self._before_forward))
        self.model.register_forward_hook(ModelHook(self._after_forward))
        self._hang_on_params()

    def _hang_on_params(self) -> None:
        hooks = [p.register_post_accumulate_grad_hook(partial(self._on_grad, i)) for i, p in enumerate(self.params)]
        self._param_hooks = hooks

    def _place_params(self) -> None:
        """Where each parameter lies in the layout: (bucket, position in it)."""
        self._bucket_of = [(-1, -1)] * len(self.params)
        for b, members in enumerate(self.layout.buckets):
            for k, i in enumerate(members):
                self._bucket_of[i] = (b, k)
        self._views = {}

    def start(self, random: RandomState) -> None:
        """Every local virtual worker begins with this random state and the model's buffers."""
        for v in self.order:
            self.contexts[v] = VirtualContext(random, self.buffers.copy(), used=[False] * len(self.params))
        self.resident = min(self.order)

    # -- whose random state and buffers are the live ones ------------------------------------------------------------

    def _make_resident(self, v: int) -> None:
        """Changes over to virtual worker v; nothing to do if it never left, as with one virtual worker per worker."""
        if self.resident != v:
            self._save_resident()
            self.contexts[v].random.restore()
            self.buffers.load_from(self.contexts[v].buffers)
            self.resident = v

    def _save_resident(self) -> None:
        if self.resident is not None:
            context = self.contexts[self.resident]
            context.random = RandomState.capture(context.random)
            if self.buffers:
                self.buffers.save_to(context.buffers)

    def go_outside(self) -> None:
        """Outside the loop, code runs as the first local virtual worker: on the main worker, as virtual worker 0."""
        if not self.contexts:
            return  # a newcomer, whose virtual workers are still elsewhere
        self._make_resident(min(self.contexts))
        self._save_resident()
        self._show_accumulated()

    def come_inside(self) -> None:
        """Before a pass: what was drawn outside the loop must not belong to some virtual workers only.

        Before the first pass, while all virtual workers still have one random state, code outside is what every rank
        of a DDP job runs, so all of them move on. Later each would have to draw from its own state, which code that
        runs once per worker cannot do.
        """
        self._take_back_accumulated()
        home = self.contexts[min(self.contexts)]
        before, now = home.random, RandomState.capture()
        if self.virtual == 1 or now.same_as(before):
            return
        if self.apart:
            raise UnsupportedScript(
                "random numbers were drawn outside the loop, where a worker stands for several ranks (iterating a "
                "plain DataLoader draws a seed, too): put that code under `with session.aside():`, which leaves every "
                "random state as it was, and draw what the job is made of before session.seed()"
            )
        for context in self.contexts.values():
            context.random = now

    def _show_accumulated(self) -> None:
        """Outside the loop, `.grad` is what the first local virtual worker has accumulated."""
        grads = self.contexts[min(self.contexts)].grads
        if grads is not None:
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g
            self._shown = [(g, None if g is None else g._version) for g in grads]

    def _take_back_accumulated(self) -> None:
        """What was cleared or zeroed outside the loop is cleared or zeroed for every virtual worker."""
        shown, self._shown = self._shown, None
        if shown is None:
            return
        for i, (p, (grad, version)) in enumerate(zip(self.params, shown, strict=True)):
            now, p.grad = p.grad, None
            if grad is None or (now is grad and grad._version == version):
                continue
            if now is not None and bool(now.any()):
                raise UnsupportedScript(f"the gradient of {self.names[i]} was changed outside the loop: only clear it")
            for context in self.contexts.values():
                if context.grads is not None:
                    kept = context.grads[i]
                    context.grads[i] = None if now is None or kept is None else kept.zero_()

    def draw_as(self, v: int) -> None:
        """Random numbers drawn from now on, between rounds, are virtual worker v's."""
        self._make_resident(v)

    def seed(self, seed: int) -> None:
        if self.turn is not None:
            raise UsageError("session.seed() inside the loop body: call it before the loop")
        self._save_resident()
        for v, context in self.contexts.items():
            seed_everything(seed + v)
            context.random = RandomState.capture()
        self.apart = True
        self.resident = None
        self.go_outside()

    # -- rounds: one turn of every local virtual worker --------------------------------------------------------------

    def begin_round(self) -> None:
        if self._stale_reducer:
            self._views = {}
            assert self.generation is not None
            self.generation.reducer = self._reducer = None  # its memory goes before the next one's comes
            self.generation.reducer = self._reducer = self._make_reducer(self.layout, self.generation)
            self._place_params()
            self._stale_reducer = False
        self._choose_when_to_take()
        if not self._base_kept:
            self._keep_base()
        if self.syncs_buffers and self.options.broadcast_buffers and self.buffers:
            self._synced_buffers = self._buffers_of_first()
        else:
            self._synced_buffers = None
        self.step_done = False
        self.last_turn = None
        self.round_failed = False

    def _choose_when_to_take(self) -> None:
        """Gradients one by one as they appear, or all at the end of a backward: cheaper where nothing could overlap."""
        at_end = (
            isinstance(self._reducer, LocalFold)
            and not self.layout.wants_ready_order
            and not self.options.tracks_usage
            and self.observer is None
            and self._outputs_are_tensors
        )
        if at_end and self._param_hooks:
            for hook in self._param_hooks:
                hook.remove()
            self._param_hooks = []
        elif not at_end and not self._param_hooks:
            self._hang_on_params()

    def _keep_base(self) -> None:
        """What the user left in `.grad` after a step is where every virtual worker's next accumulation starts."""
        self._base_kept = True
        left = [p.grad for p in self.params]
        self._base, self._must_clear = None, False
        if all(g is None for g in left):
            return
        if self._clears_first:
            self._must_clear = True
        else:
            self._base = [None if g is None else g.detach().clone() for g in left]
        for p in self.params:
            p.grad = None

    def _buffers_of_first(self) -> Saved | None:
        """The buffers of virtual worker 0, which DDP gives to everybody before a forward."""
        if self.virtual == 1:
            return None
        generation = self.generation
        assert generation is not None
        if self.resident == 0:
            self.buffers.save_to(self.contexts[0].buffers)
        if 0 in self.contexts:
            return self.contexts[0].buffers
        home = generation.formation.members[self.placement.host(0)]
        desk, number = generation.desks[home], self.point
        generation.fabric.wait_for(home, lambda: is_final(desk, 0, number))
        record = desk.context(0, number)
        assert record is not None
        reader = ContextReader(record[0])
        for size in reader.head["random"]:
            reader.take(max(0, size))
        return self._unpack_buffers(reader)

    def enter(self, virtual_worker: int) -> None:
        """Begins a turn."""
        self.leave()
        self.apart = True
        context = self.contexts[virtual_worker]
        self._make_resident(virtual_worker)
        if self._synced_buffers is not None:
            self.buffers.load_from(self._synced_buffers)
        self._handed = None
        if context.grads is not None:
            marks = context.in_bucket or [False] * len(self.params)
            self._handed = [g if mark else None for g, mark in zip(context.grads, marks, strict=True)]
            for p, g in zip(self.params, context.grads, strict=True):
                p.grad = g
            context.grads = context.in_bucket = None
        elif self._base is not None:
            self._handed = [None if g is None else g.clone() for g in self._base]
            for p, g in zip(self.params, self._handed, strict=True):
                p.grad = g
        self._pending = [len(members) for members in self.layout.buckets]
        self._filling = {}
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
        if turn.sync and not turn.backward_done:
            raise UnsupportedScript(
                f"virtual worker {turn.virtual_worker} called the model with gradients on but ended its turn without "
                "a backward(); run such forwards under torch.no_grad()"
            )
        context = self.contexts[turn.virtual_worker]
        if self.round_failed:
            return
        self._check_same_kind(turn)
        if not turn.is_last:
            self._check_nothing_stepped(turn)
        if not turn.backward_done:
            self._keep_accumulated(context)
        self.last_turn = turn
        if self.on_leave is not None:
            self._save_resident()
            self.on_leave(turn)

    def _keep_accumulated(self, context: VirtualContext) -> None:
        grads = [p.grad for p in self.params]
        if any(g is not None for g in grads):
            context.grads = grads
            context.in_bucket = [g is not None and self._lives_in_bucket(i, g) for i, g in enumerate(grads)]
        for p in self.params:
            p.grad = None

    def end_round(self) -> None:
        self.leave()
        if self.last_turn is not None and not self.round_failed:
            self.syncs_buffers = self.last_turn.syncs_buffers_next

    def _versions(self) -> int:
        """Grows with every change of a parameter in place."""
        return sum(p._version for p in self.params)

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for o in self.stepping for group in o.param_groups if "lr" in group]

    def _check_nothing_stepped(self, turn: Turn) -> None:
        """Before the last turn nothing may happen that belongs to a step, since it would happen once per turn."""
        changed = ""
        if self._versions() != turn.versions:
            changed = "parameters are changed"
        elif turn.rates_at_step is not None and turn.rates_at_step != self.learning_rates():
            changed = "the learning rate is changed after optimizer.step()"
        if changed:
            raise UnsupportedScript(
                f"{changed} in the loop body by hand, which runs once per virtual worker: put that under "
                "`if session.is_last_turn:`, where it happens once per step"
            )

    def _check_same_kind(self, turn: Turn) -> None:
        other = self.last_turn
        if other is not None and (other.sync, other.backward_done) != (turn.sync, turn.backward_done):
            raise UnsupportedScript(
                f"virtual workers {other.virtual_worker} and {turn.virtual_worker} of one step disagree on whether "
                "gradients are synchronised; count with loader.index instead of enumerate(), whose count runs on "
                "over virtual workers"
            )

    # -- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        turn = self.turn
        if turn is None:
            return
        if turn.stepped and torch.is_grad_enabled():
            raise UnsupportedScript(
                "the model is used for training again after optimizer.step() in the same loop body: virtual workers "
                "that ran earlier have not seen that update. Put each optimizer step into a loop body of its own"
            )
        if turn.backward_done and torch.is_grad_enabled() and self.sync_allowed:
            raise UnsupportedScript(
                "a second synchronising forward in one loop body: put all but the last forward and backward of a body "
                "under session.no_sync()"
            )
        repeats = turn.forwards > 0 and turn.syncs_buffers_next
        if repeats and self._synced_buffers is not None and not self._buffers_unchanged():
            raise UnsupportedScript(
                "the model is called twice in one loop body and changes its buffers: DDP would broadcast them in "
                "between. Pass broadcast_buffers=False to prepare(), or call the model once per body"
            )

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
            turn.watching = True
            self._first_grad(turn)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _on_grad(self, index: int, param: Tensor) -> None:
        """Autograd has just accumulated into `param.grad`."""
        turn = self.turn
        if turn is None:
            return
        if self.options.tracks_usage:
            self.contexts[turn.virtual_worker].used[index] = True
        if not turn.sync:
            if turn.sync is None:
                raise UnsupportedScript(
                    "gradients arrived although the prepared model was not called in this loop body: call model(...) "
                    "itself, not one of its methods or parts, as DistributedDataParallel requires too"
                )
            return
        if not turn.watching:
            turn.watching = True
            self._first_grad(turn)
        if index in turn.ready:
            raise UnsupportedScript(
                f"parameter {self.names[index]} got its gradient twice in one loop body (a second backward, or "
                "reentrant activation checkpointing); use one backward per body and use_reentrant=False"
            )
        turn.ready.add(index)
        turn.ready_order.append(index)
        self._take(turn.virtual_worker, index, param)

    def _first_grad(self, turn: Turn) -> None:
        if turn.backward_done:
            raise UnsupportedScript("a second backward() in one loop body: add the losses up and call it once")
        if self._must_clear and not self._all_cleared(turn):
            raise UnsupportedScript(
                "earlier steps called optimizer.zero_grad() before backward(), this one did not: call it in every body"
            )
        call_after_backward(self._on_backward_end)

    def _all_cleared(self, turn: Turn) -> bool:
        return self.covers_all_params and len(self.contexts[turn.virtual_worker].cleared_by) == self.optimizers

    def _take(self, v: int, index: int, param: Tensor) -> None:
        """Moves a gradient, scaled as DDP scales it, from the parameter into its bucket."""
        grad = param.grad
        bucket, position = self._bucket_of[index]
        views = self._filling.get(bucket) or self._open_bucket(v, bucket)
        view = views[position]
        if grad is None:
            view.zero_()
        else:
            self._check_dense(index, grad)
            if self._lives_in_bucket(index, grad):
                torch.div(grad, self.virtual, out=view)
            else:
                torch.mul(grad, 1.0 / self.virtual, out=view)
            if self.observer is not None:
                self.observer(v, index, grad)
            param.grad = None
        self._pending[bucket] -= 1
        if self._pending[bucket] == 0:
            self.reducer.ready(v, bucket)

    def _take_all(self, turn: Turn) -> None:
        """`_take` for all parameters at once, in a few calls of torch."""
        assert isinstance(self._reducer, LocalFold)
        order = [i for bucket in self.layout.buckets for i in bucket]
        grads: list[Any] = [self.params[i].grad for i in order]
        turn.ready = {i for i, g in zip(order, grads, strict=True) if g is not None}
        if len(turn.ready) < len(grads) or self.options.gradient_as_bucket_view:
            taken, turn.ready = turn.ready, set()
            for i in sorted(taken):
                turn.ready.add(i)
                self._take(turn.virtual_worker, i, self.params[i])
            return
        for i, grad in zip(order, grads, strict=True):
            self._check_dense(i, grad)
        if self.virtual == 1:
            return  # a single term is the sum, where it is
        views = [view for b in range(len(self.layout.buckets)) for view in self._open_bucket(turn.virtual_worker, b)]
        torch._foreach_copy_(views, grads)
        self._reducer.scale(1.0 / self.virtual)
        self._reducer.all_ready(turn.virtual_worker)
        for p in self.params:
            p.grad = None

    def _check_dense(self, index: int, grad: Any) -> None:
        if grad.requires_grad:
            raise UnsupportedScript("backward(create_graph=True) gives gradients that cannot be taken out")
        if grad.layout is not torch.strided:
            raise UnsupportedScript(
                f"parameter {self.names[index]} has a sparse gradient; make its module with sparse=False"
            )

    def _open_bucket(self, v: int, bucket: int) -> list[Tensor]:
        if self.on_update is not None and self.reducer.overwrites_early:
            self.before_results()
        self._filling[bucket] = self._views_of(bucket, self.reducer.buffer(v, bucket))
        return self._filling[bucket]

    def _views_of(self, bucket: int, memory: Tensor) -> list[Tensor]:
        """One view per parameter; reducers use the same memory at every step, so they are made once."""
        key = (memory.data_ptr(), bucket)
        if key not in self._views:
            self._views[key] = self.layout.views(bucket, memory)
        return self._views[key]

    def _lives_in_bucket(self, index: int, grad: Tensor) -> bool:
        """DDP divides instead of multiplying where the gradient already is the bucket's own memory."""
        return self.options.gradient_as_bucket_view and self._handed is not None and grad is self._handed[index]

    def _on_backward_end(self) -> None:
        turn = self.turn
        assert turn is not None
        if not self._param_hooks:
            self._take_all(turn)
        missing = [i for i in range(len(self.params)) if i not in turn.ready]
        if missing and not self.options.tracks_usage:
            names = ", ".join(self.names[i] for i in missing[:5]) + (" ..." if len(missing) > 5 else "")
            raise UnsupportedScript(
                f"{len(missing)} parameters got no gradient ({names}); if that is meant, pass "
                "find_unused_parameters=True to prepare(), or freeze them with requires_grad_(False)"
            )
        for i in missing:
            self._take(turn.virtual_worker, i, self.params[i])
        turn.backward_done, turn.watching = True, False
        if turn.virtual_worker == 0:
            self._first_order = turn.ready_order + missing
        if self._all_cleared(turn):
            self._clears_first = True
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
        results = self.reducer.results()
        if self.virtual == 1 and not self._param_hooks and not self.options.gradient_as_bucket_view:
            results = []  # `_take_all` has left the gradients in place
        for b, flat in enumerate(results):
            for i, view in zip(self.layout.buckets[b], self._views_of(b, flat), strict=True):
                if used is None or used[i]:
                    self.params[i].grad = view
                else:  # nobody used it: DDP leaves what was there
                    self.params[i].grad = None if self._base is None else self._base[i]
        if order is not None:
            self.layout.rebuild(order)
            self._stale_reducer = True
        self.layout.synced_steps += 1
        self.step_done = True
        self._base_kept = False
        if self.on_reduced is not None:
            self.on_reduced()

    def _fail_round(self) -> None:
        """The user's loop body goes on as in any turn but the last: nothing steps. Then the round is run again."""
        assert self.turn is not None
        self.turn.is_last = False
        self.round_failed = True
        for p in self.params:
            p.grad = None

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
        grads = self.step_done and not (light and self._clears_first)
        return {
            "layout": self.layout.state(),
            "syncs_buffers": self.syncs_buffers,
            "static_usage": self._static_usage,
            "grads": [p.grad for p in self.params] if grads else None,
            "clears_first": self._clears_first,
        }

    def load_shared_state(self, state: dict[str, Any]) -> None:
        self.layout.load(state["layout"])
        self.syncs_buffers = state["syncs_buffers"]
        self._static_usage = state["static_usage"]
        self._clears_first = state["clears_first"]
        for p, g in zip(self.params, state["grads"] or [None] * len(self.params), strict=True):
            p.grad = None if g is None else g.clone().to(p.device)
        self._stale_reducer = True

    # -- contexts on desks -------------------------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether virtual workers hold gradients that no step has used yet: too much to be copied at every step."""
        return any(context.grads is not None for context in self.contexts.values())

    def pack_context(self, v: int, loaders: Sequence[Any]) -> bytes:
        """Virtual worker v's context; `loaders` pack their part of it."""
        if v == self.resident:
            self._save_resident()
        context = self.contexts[v]
        key: list[int | None] = [None]
        if not self.buffers and not self.options.tracks_usage:
            key = [*context.cleared_by, *(feed.pack_key(v) for feed in loaders)]
            if context.packed.stands(context.random, key):
                return context.packed.last
        writer = ContextWriter(context.packed, (context.random, key))
        head = {
            "random": pack_random(writer, context.random),
            "buffers": [writer.add(tensor_to_bytes(flat)) for flat in context.buffers],
            "cleared_by": sorted(context.cleared_by),
            "used": context.used if self.options.tracks_usage else [],
            "loaders": [feed.pack_context(v, writer) for feed in loaders],
        }
        return writer.close(head)

    def unpack_context(self, v: int, record: bytes, loaders: Sequence[Any]) -> None:
        reader = ContextReader(record)
        head = reader.head
        random = unpack_random(reader, head["random"])
        buffers = self._unpack_buffers(reader)
        self.contexts[v] = VirtualContext(
            random, buffers, cleared_by=set(head["cleared_by"]), used=head["used"] or [False] * len(self.params)
        )
        for feed, state in zip(loaders, head["loaders"], strict=True):
            feed.unpack_context(v, state, reader)

    def _unpack_buffers(self, reader: ContextReader) -> Saved:
        sizes = reader.head["buffers"]
        return [tensor_from_bytes(reader.take(n), flat) for n, flat in zip(sizes, self.buffers.flats, strict=True)]

    def adopt_contexts(self, desks: Sequence[Desk], loaders: Sequence[Any], missing: Callable[[int], None]) -> None:
        """Takes the local virtual workers' contexts from the desks, as of the last recovery point."""
        self.contexts = {}
        self.resident = None
        self.apart = True
        for v in self.order:
            found = newest_context(desks, v, self.point)
            if found is None:
                missing(v)
            else:
                self.unpack_context(v, found[0], loaders)

    def forget_context(self, keep: Sequence[int]) -> None:
        """Virtual workers that now live elsewhere."""
        if self.resident is not None and self.resident not in keep:
            self._save_resident()
            self.resident = None
        self.contexts = {v: context for v, context in self.contexts.items() if v in keep}

    def context_state(self, v: int) -> dict[str, Any]:
        self._save_resident()
        return _state_of(self.contexts[v])

    def state_of_record(self, record: bytes, loaders: Sequence[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a record on a desk would be in a checkpoint: the context, and each loader's part of it."""
        reader = ContextReader(record)
        head = reader.head
        context = VirtualContext(
            unpack_random(reader, head["random"]),
            self._unpack_buffers(reader),
            cleared_by=set(head["cleared_by"]),
            used=head["used"] or [False] * len(self.params),
        )
        parts = [feed.state_of_record(part, reader) for feed, part in zip(loaders, head["loaders"], strict=True)]
        return _state_of(context), parts

    def load_context(self, v: int, state: dict[str, Any]) -> None:
        grads = state["grads"]
        if grads is not None:
            grads = [None if g is None else g.clone().to(p.device) for g, p in zip(grads, self.params, strict=True)]
        buffers = [t.clone().to(flat.device) for t, flat in zip(state["buffers"], self.buffers.flats, strict=True)]
        self.contexts[v] = VirtualContext(
            RandomState.load(state["random"]),
            buffers,
            grads,
            state["in_bucket"],
            set(state["cleared_by"]),
            list(state["used"]),
        )
        self.apart = True
        self.resident = None


def _state_of(context: VirtualContext) -> dict[str, Any]:
    return {
        "random": context.random.state(),
        "buffers": context.buffers,
        "grads": context.grads,
        "in_bucket": context.in_bucket,
        "cleared_by": sorted(context.cleared_by),
        "used": context.used,
    }
