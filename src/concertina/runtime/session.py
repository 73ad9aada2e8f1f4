"""A training script's view of its job."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from concertina.core.batch_scaling import Scaling
from concertina.core.checkpoints import Manifest, folder_name
from concertina.core.env import WorkerEnv
from concertina.core.errors import StateLost, UsageError
from concertina.runtime import arrays, environment
from concertina.runtime.buckets import DdpOptions
from concertina.runtime.catch_up import CatchUp
from concertina.runtime.checkpoint import copy_checkpoint, pack_parts, read_checkpoint, to_bytes, unpack_parts
from concertina.runtime.checkpoint_writer import CheckpointWriter
from concertina.runtime.context_record import tensor_from_bytes, tensor_to_bytes
from concertina.runtime.data import Feed, LoaderOptions
from concertina.runtime.desk import Desk, is_final
from concertina.runtime.determinism import apply_level, may_mix_gpus
from concertina.runtime.elastic import CHECKPOINT, INTERRUPT, STOP, WISHES, Agreement, Elastic
from concertina.runtime.events import EventPipe
from concertina.runtime.fabric import PeersLost
from concertina.runtime.follow import Follower
from concertina.runtime.gates import acts_now, gate_average, gate_optimizer, gate_scaler, gate_scheduler
from concertina.runtime.interrupts import EndOfRun, Interrupted, Left, stop_request
from concertina.runtime.loader import Pass, SessionLoader, check_not_left_by_break
from concertina.runtime.membership import Generation, Membership
from concertina.runtime.prepared import Prepared
from concertina.runtime.recorder import Recorder
from concertina.runtime.reducers import ReducerFactory
from concertina.runtime.rehearsal import rehearse
from concertina.runtime.rng import RandomState
from concertina.runtime.scaling import BatchScale, gate_rate, parts_of, script_factor
from concertina.runtime.scan import check_model, check_nothing_forgotten, check_optimizer
from concertina.runtime.segments import Segment, connect
from concertina.runtime.shards import ShardStream, make_stream
from concertina.runtime.together import Together
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.wire import WireThread

CONTEXT_BYTES = 1 << 20  # room on the desk for a virtual worker's random states and data lanes
CHECKPOINT_SHARE = 20  # training waits for checkpoints by time for at most one part in so many of it
MOST_LOGGED = 40  # values per step in the event stream

_joined: "Session | None" = None


def join() -> "Session":
    """Makes this process a worker of its job. Started with plain `python`, it is a job of one worker."""
    global _joined
    if _joined is not None:
        raise UsageError("join() was called twice: keep the session that the first call returned")
    env = WorkerEnv.from_environ(os.environ)
    apply_level(env.level)
    if env.threads:
        torch.set_num_threads(env.threads)
    _joined = Session(env)
    _joined.events.emit("joined", pid=os.getpid(), newcomer=env.joins)
    return _joined


class Session:
    """One worker's part in a job, through all generations that it takes part in."""

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env
        self._engine: VirtualEngine | None = None
        self._membership: Membership | None = None
        self._elastic: Elastic | None = None
        self._follower: Follower | None = None  # while this worker is a newcomer
        self._rehearsed = False
        self._prepared = Prepared()
        self._loaders: list[SessionLoader] = []
        self._loader_states: dict[int, dict[str, Any]] = {}
        self._loader_contexts: dict[int, dict[int, Any]] = {}
        self._hooks: list[Callable[[int, int], None]] = []
        self._pass: Pass | None = None
        self._started = False
        self._over = False  # the loop over epochs has ended
        self._let_in = False  # a newcomer that has just become a member
        self._searched = False  # for optimizers and schedulers that were not prepared
        self._loaded: tuple[Any, dict[int, Any]] | None = None  # what was resumed from, until the first pass
        self._wants = [0] * WISHES
        self._round_wishes = [0] * WISHES
        self._checkpoint_path: Path | None = None
        self._written = (-1, time.monotonic(), 0.0)  # step of the last checkpoint, when, and how long all waited for it
        self._step_began = 0.0
        self._logged: dict[str, Any] = {}
        self._unsent: tuple[int, int, float, dict[str, Any]] | None = None
        self._writer = CheckpointWriter(self._told_of_checkpoint)
        self.recorder: Recorder | None = None
        self.events = EventPipe(env.events_fd, env.worker)
        self.scale = BatchScale(Scaling(env.scaling), env.virtual, env.from_workers, env.ramp)
        self.step = 0  # optimizer steps that are complete
        self.rounds = 0  # that counted, in the whole job: steps, accumulation and evaluation
        self.epoch = 0
        self.finishing = False
        self.stop_reason = ""
        self.end: EndOfRun | None = None  # why this generation left the loop

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of virtual workers; it never changes."""
        return self._env.virtual

    @property
    def rank(self) -> int:
        """The virtual worker whose turn it is; between loops, the first of this worker."""
        if self._engine is None and self.size > 1:
            raise UsageError(
                "session.rank before prepare(): a worker is several ranks at once, whose turns come in the loop; use "
                "session.is_main for what one process does, and session.seed(n) after prepare() for seeds by rank"
            )
        if self._engine is not None and self._engine.turn is not None:
            return self._engine.turn.virtual_worker
        if self.rehearsing:
            return self.size - 1
        return 0 if self._engine is None or not self._engine.contexts else min(self._engine.contexts)

    @property
    def is_main(self) -> bool:
        """True on the worker where virtual worker 0 lives."""
        if self.rehearsing:
            return False
        if self._engine is None or self._engine.generation is None:
            return self._env.members[:1] == (self._env.worker,)
        return self.elastic.is_main

    @property
    def is_last_turn(self) -> bool:
        """True in the turn in which the optimizer acts, and outside the loop: for what happens once per step."""
        return self._engine is None or acts_now(self._engine)

    @property
    def rehearsing(self) -> bool:
        """True while a newcomer runs the loop's body once, for nothing, before it is let in: what the body does besides
        training (writing files, counting) should not happen then."""
        return self._engine is not None and self._engine.rehearses

    @property
    def workers(self) -> int:
        """How many workers train at the moment. Results must not depend on it."""
        if self._engine is None or self._engine.generation is None:
            return max(1, len(self._env.members))
        return self._engine.generation.fabric.size

    @property
    def keeps_batch(self) -> bool:
        """Whether the number of workers leaves the batch alone: under --scaling consistent and strong."""
        return self.scale.mode in (Scaling.CONSISTENT, Scaling.STRONG)

    @property
    def device(self) -> torch.device:
        """The device of this worker: a GPU if there is one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self._env.worker % torch.cuda.device_count())

    @property
    def elastic(self) -> Elastic:
        assert self._elastic is not None
        return self._elastic

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    @property
    def engine(self) -> VirtualEngine:
        if self._engine is None:
            raise UsageError("call session.prepare(model, optimizer, ...) first")
        return self._engine

    # -- set-up ------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        *things: Any,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
    ) -> Any:
        """Takes a model and any optimizers, schedulers and gradient scalers; gives the same objects back, in order.

        The keyword arguments are DistributedDataParallel's and mean the same.
        """
        if self._engine is not None:
            raise UsageError("prepare() was called twice: give it the model and everything that steps with it at once")
        prepared = Prepared.sort(things)
        if prepared.arrays and self._loaders:
            raise UsageError("prepare() the NumPy arrays before session.loader(), so that its batches are arrays, too")
        check_model(prepared.model)
        for optimizer in prepared.optimizers:
            check_optimizer(optimizer, prepared.model)
        options = DdpOptions(
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        random = RandomState.capture()
        factory = ReducerFactory(self._env)
        engine = VirtualEngine(prepared.model, options, self.size, factory.make)
        self._environment = environment.record(prepared.optimizers, any(p.is_cuda for p in engine.params))
        self._may_mix_gpus = self._may_mix(prepared)
        self._prepared, self._engine = prepared, engine
        self._meet_the_others(engine, factory)
        random.restore()
        if engine.generation is not None:
            engine.start(random)
        self._gate(prepared, engine)
        if self._env.record_dir:
            self.recorder = Recorder(Path(self._env.record_dir), self._env, engine, prepared)
        name = "" if engine.generation is None else engine.reducer.name
        self.events.emit("prepared", reduction=name, parameters=sum(p.numel() for p in engine.params))
        return things[0] if len(things) == 1 else things

    def _meet_the_others(self, engine: VirtualEngine, factory: ReducerFactory) -> None:
        """Forms the first generation with those who start together; a newcomer is let in later."""
        buffers = sum(flat.numel() * flat.element_size() for flat in engine.buffers.flats)
        wire = WireThread(self._env.host, self._env.key, self._env.worker) if self._env.host else None
        connect(wire)
        desk = Desk.create(self.size, CONTEXT_BYTES + 2 * buffers)
        desk.say_rack(self._env.rack)
        membership = Membership(self._env, desk, wire)
        elastic = Elastic(engine, membership, desk)
        self._desk, self._membership, self._elastic = desk, membership, elastic
        membership.introduce = self._introduction
        membership.furnish = lambda generation: self._furnish(factory, generation)
        elastic.prepared = self._prepared
        elastic.feeds = lambda: [loader.feed for loader in self._loaders]
        elastic.wishes = lambda: self._round_wishes
        elastic.rest_of_state = lambda: self._rest_of_state(light=True)
        engine.commit = self._commit
        engine.on_take_up = membership.enter
        if self._env.joins:
            return
        try:
            self._start_together(engine, membership)
        except PeersLost as loss:
            raise StateLost(f"{loss} before training began") from None

    def _start_together(self, engine: VirtualEngine, membership: Membership) -> None:
        generation = membership.first()
        engine.take_up(generation)
        if generation.fabric.size > 1 and not self._env.resume:
            self._take_parameters_of_first(engine, generation)

    def _introduction(self) -> bytes:
        """A newcomer has nothing to tell that the others do not know better."""
        if self._env.joins and self.engine.generation is None:
            return b""
        return self.elastic.introduction(self._environment)

    def _furnish(self, factory: ReducerFactory, generation: Generation) -> Any:
        """In every member of a new generation, maybe beside training: what the step of that generation needs."""
        engine = self.engine
        known = [json.loads(said) for said in generation.introductions if said]
        told = [
            member for member, said in zip(generation.formation.members, generation.introductions, strict=True) if said
        ]
        if known and told[0] != self._env.worker:
            who = f"worker {self._env.worker}, compared with worker {told[0]},"
            environment.require_same(self._environment, known[0]["environment"], who, mixed_gpus=self._may_mix_gpus)
        layout = engine.layout.copy()  # while this is built, DDP's rebuild may change the one in use
        if known:
            layout.load(known[0]["layout"])
        generation.buckets = layout.buckets
        reducer = factory.make(layout, generation)
        if engine.generation is not None or self._env.joins:
            reducer.warm()
            for loader in list(self._loaders):
                loader.feed.get_ready(self.epoch, generation.placement.workers[generation.rank])
        return reducer

    def _take_parameters_of_first(self, engine: VirtualEngine, generation: Generation) -> None:
        """As DDP does: what the worker of virtual worker 0 has initialised is what all start with."""
        home, fabric = generation.placement.host(0), generation.fabric
        tensors = [*self._prepared.model.parameters(), *engine.buffers.flats]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        segment = Segment.create(sum(sizes)) if generation.rank == home else None
        if segment is not None:
            for at, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False):
                data = tensor_to_bytes(tensor)
                segment.memory[at : at + len(data)] = data
        address = fabric.gather_bytes(segment.address.encode() if segment is not None else b"")[home]
        if segment is None:
            try:
                theirs = Segment.open(address.decode()).memory
            except OSError:
                raise PeersLost([generation.formation.members[home]]) from None
            with torch.no_grad():
                for at, size, tensor in zip(accumulate(sizes, initial=0), sizes, tensors, strict=False):
                    tensor.copy_(tensor_from_bytes(memoryview(theirs[at : at + size]), tensor.detach()))
        fabric.meet()  # everybody has taken them

    def _gate(self, prepared: Prepared, engine: VirtualEngine) -> None:
        for optimizer in prepared.optimizers:
            gate_optimizer(optimizer, engine)
            gate_rate(optimizer, engine, lambda: self.scale.rate_factor(self.step))
        for scheduler in prepared.schedulers:
            gate_scheduler(scheduler, engine)
        for scaler in prepared.scalers:
            gate_scaler(scaler, engine)
        held = {id(p) for o in prepared.optimizers for group in o.param_groups for p in group["params"]}
        engine.covers_all_params = all(id(p) in held for p in engine.params)

    def _may_mix(self, prepared: Prepared) -> bool:
        """Whether GPU models may differ: only at level D2, and only if the model's modules allow it."""
        if self._env.level != "D2":
            return False
        verdict = may_mix_gpus(prepared.model)
        if self.is_main:
            self.events.emit("gpu_mix", may_mix=verdict.may_mix, reason=verdict.reason)
        return verdict.may_mix

    def loader(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        **options: Any,
    ) -> SessionLoader:
        """Batches of `dataset`; on virtual worker v those of a DataLoader with a DistributedSampler of rank v.

        Further keyword arguments are DataLoader's. `set_epoch` is called for every epoch of `session.epochs`.
        """
        unknown = set(options) - set(LoaderOptions.__dataclass_fields__)
        if unknown:
            raise UsageError(
                f"session.loader does not take {', '.join(sorted(unknown))}: it makes sampler, batches and seeds itself"
            )
        if self._prepared.arrays:
            options.setdefault("collate_fn", arrays.stack)
        settings = LoaderOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_workers=num_workers,
            **options,
        )
        loader = SessionLoader(self, Feed(dataset, settings, self.size), len(self._loaders))
        self._loaders.append(loader)
        self._restore_loader(loader)
        return loader

    def shards(
        self,
        items: Any,
        read: Callable[[Any], Any] | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> ShardStream:
        """Batches of a stream that comes in pieces, such as files: `read(item)` gives the records of one of `items`.

        Virtual workers take items on demand, each exactly once per epoch; `read` runs in the background. Used like
        `session.loader(...)`; without `read`, an item is itself the sequence of its records.
        """
        stream = make_stream(
            self,
            len(self._loaders),
            items,
            read,
            arrays=bool(self._prepared.arrays),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            collate_fn=collate_fn,
        )
        self._loaders.append(stream)
        self._restore_loader(stream)
        return stream

    def register(self, name: str, thing: Any) -> None:
        """Further state that belongs to the job: anything with state_dict() and load_state_dict().

        What changes once per step belongs under `if session.is_last_turn:`; an AveragedModel does so by itself. A NumPy
        array may be registered as it is.
        """
        thing = arrays.carried(thing)
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(f"register({name!r}, ...): {type(thing).__name__} has no state_dict and load_state_dict")
        if name in self._prepared.registered:
            raise UsageError(f"register({name!r}, ...): the name is taken")
        if self._started:
            raise UsageError(f"register({name!r}, ...) must come before session.epochs()")
        self._prepared.registered[name] = thing
        if isinstance(thing, AveragedModel):
            gate_average(thing, self.engine)

    def on_rescale(self, hook: Callable[[int, int], None]) -> None:
        """`hook(generation, workers)` runs in every worker when a generation begins to train."""
        self._hooks.append(hook)

    def seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch as if rank v of a DDP job had seeded them with `seed + v`."""
        if self._engine is None:
            raise UsageError(
                "session.seed() seeds the virtual workers, which exist from prepare() on: seed the building of the "
                "model with torch.manual_seed(), then call prepare(), then session.seed()"
            )
        self._engine.seed(seed)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers up to `count`; after a restart, from the epoch that was under way."""
        self._start()
        self._tell_plan(count)
        while self.epoch < count:
            if not self.follows:
                self._meet()
            if self._must_end():
                break
            self.events.emit("epoch", epoch=self.epoch, epochs=count, step=self.step)
            yield self.epoch
            self.close_pass()
            if self._must_end():
                break
            for loader in self._loaders:
                loader.epoch_done()
            self.epoch += 1
        self._finish()

    def _tell_plan(self, epochs: int) -> None:
        """What the script will make, as far as it can be told: it mostly trains on its first loader."""
        first = self._loaders[0].feed if self._loaders else None
        batches = first.batches_per_epoch if isinstance(first, Feed) else 0  # a stream's are known when it was read
        self.events.emit("planned", epochs=epochs, batches=batches, step=self.step)

    def _must_end(self) -> bool:
        return self.finishing

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, as DistributedDataParallel.no_sync."""
        engine = self.engine
        before, engine.sync_allowed = engine.sync_allowed, False
        try:
            yield
        finally:
            engine.sync_allowed = before

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Code outside the loop that may draw random numbers (evaluation, samples to look at) without any effect on
        training: Python's, NumPy's and torch's random states are afterwards what they were before."""
        before = RandomState.capture()
        try:
            yield
        finally:
            before.restore()

    def parts(self, batch: Any, largest: int = 0) -> Iterator[tuple[float, Any]]:
        """A batch in parts that fit the device, each with the weight that its loss gets; all but the last without a
        reduction. `largest` samples per part, or what `--largest-batch` says; with neither, the batch as it is."""
        before = self.engine.sync_allowed
        try:
            for weight, part, last in parts_of(batch, largest or self._env.largest_batch):
                self.engine.sync_allowed = before and last
                yield weight, part
        finally:
            self.engine.sync_allowed = before

    def scale_batch(self, factor: float | Fraction, ramp: int | None = None) -> None:
        """From the next pass on, batches of `factor` times the loaders' batch_size (not times the present one).

        The learning rate becomes `factor` times that of the script's own schedule, in equal increments over `ramp`
        steps. To be called between loops over the data, where all workers come by.
        """
        if self._pass is not None:
            raise UsageError("scale_batch() inside the loop over the data: call it above that loop, once per epoch")
        if self.scale.by_script(script_factor(factor), self.step, ramp):
            self._told_of_batch()

    def request_workers(self, workers: int) -> None:
        """Asks for another number of workers; training goes on, and they come when they are ready, or not at all."""
        if not 1 <= workers <= self.size:
            raise UsageError(
                f"request_workers({workers}): a job of {self.size} virtual workers takes 1 to {self.size} workers"
            )
        if self.is_main and not self.follows:
            self.membership.say(op="resize", workers=workers)

    def step_took(self, seconds: float) -> None:
        """How long this step takes on this worker, where the script knows better than a clock around it (a GPU's own
        events, a simulated device). Hybrid scaling goes by it."""
        if not self.rehearsing:
            self.scale.told = float(seconds)

    def _told_of_batch(self) -> None:
        if self.is_main and self.scale.total:
            self.events.emit("batch", step=self.step, total=self.scale.total, reason=self.scale.reason)

    def reduce(self, *gradients: Any) -> list[arrays.Array] | None:
        """For NumPy arrays that prepare() was given: the mean over all virtual workers of the gradients that each gives
        in its turn, one per array. It is there in the last turn of a step, in which to change the arrays; before, None.
        """
        return None if self.rehearsing else arrays.mean_over_virtual_workers(self.engine, gradients)

    def log(self, **values: Any) -> None:
        """Numbers of the current step; those of virtual worker 0 appear in the event stream."""
        if self.rehearsing:
            return
        if self.recorder is not None and self._engine is not None and self._engine.turn is not None:
            self.recorder.logged(self.rank, values)
        if self.rank == 0:
            kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
            self._logged.update(kept)

    def stop(self, reason: str) -> None:
        """Ends training on all workers after the same step: the one after that in which it was called."""
        if not self.rehearsing:
            self._wants[STOP] = 1
            self.stop_reason = reason

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole state of the job to the folder `path` at the end of the next step or epoch."""
        if self._over:
            raise UsageError(
                "session.checkpoint() after the last epoch: call it in the loop, or run with --checkpoint DIR"
            )
        if not self.rehearsing:
            self._wants[CHECKPOINT] = 1
            self._checkpoint_path = Path(path).absolute()

    # -- passes and rounds, driven by the loader ---------------------------------------------------------------------

    def check_may_iterate(self, loader: SessionLoader) -> None:
        if not self._started:
            raise UsageError("iterate over session.loader(...) inside `for epoch in session.epochs(n):`")
        if self._pass is not None and not self._pass.begun:
            raise UsageError("two session loaders cannot be iterated at the same time: combine the datasets")
        self.close_pass()

    def enter_pass(self, new: Pass) -> None:
        if self._let_in:
            self._let_in = False  # state and contexts are those of the step at which the others let us in
        elif self._loaded is not None and new.loader.resumes:
            self._apply(*self._loaded)  # what code above the loop did was done in the generation before, too
            self._restore_scale(self._loaded[0])
            self._wants[STOP] = self._loaded[0]["stop"]  # takes effect after the next step, as it would have there
        else:
            self.engine.come_inside()
        self._search_once()
        self._loaded = None
        self._pass = new

    def _search_once(self) -> None:
        """For what the script forgot to prepare. A newcomer does so before anybody waits for it."""
        if not self._searched:
            check_nothing_forgotten(self._prepared.model, self._prepared.optimizers, self._prepared.schedulers)
            self._searched = True

    def leave_pass(self, completed: bool) -> None:
        self._pass = None
        self.engine.go_outside()

    def close_pass(self) -> None:
        """Settles a loop that was left by `break`, which only a single virtual worker may do."""
        current = self._pass
        if current is None:
            return
        check_not_left_by_break(current, self.size)
        if self.engine.turn is not None:
            current.complete_round()
        if not current.ended:
            current.end(completed=True)

    def begin_round(self) -> None:
        """Starts a step. Raises PeersLost if a worker that is needed for it is gone."""
        assert self._pass is not None
        loader = self._pass.loader
        self._desk.place = (self.epoch, loader.number, loader.passes, loader.index)
        self.elastic.agreement = None
        self._note_wishes()
        self.elastic.fingerprint()
        self.engine.begin_round()
        self._step_began = time.monotonic()

    def _note_wishes(self) -> None:
        """As they stand when a round begins: when in its body something was asked for must make no difference."""
        self._wants[INTERRUPT] = int(stop_request.asked)
        if self._env.checkpoint_seconds and self.is_main and self._is_due():
            self._wants[CHECKPOINT] = 1
        self._round_wishes = list(self._wants)

    def _is_due(self) -> bool:
        """Whether it is time for a checkpoint; where they take long, less often, so that training hardly waits."""
        step, at, cost = self._written
        patience = max(self._env.checkpoint_seconds, cost * CHECKPOINT_SHARE)
        return self.step != step and self._writer.is_idle and time.monotonic() - at >= patience

    def _commit(self) -> None:
        """Inside the last backward of a round: from here on its step counts, on all workers or on none."""
        assert self._pass is not None
        self.elastic.agree(advances=True, next_batch=self._pass.loader.index + 1, steps=1)

    def end_round(self) -> None:
        """A round is complete on this worker: act on what was agreed. Raises PeersLost if it does not count."""
        assert self._pass is not None
        stepped, elastic = self.engine.step_done, self.elastic
        agreed = elastic.agreement
        if agreed is None:  # without a reduction, nobody has met yet
            advances = not self.engine.accumulates
            agreed = elastic.agree(advances, self._pass.loader.index, steps=0)
        if stepped:
            self.step += 1
            feed = self._pass.loader.feed
            self.scale.stepped(time.monotonic(), feed.options.batch_size, feed.samples)
            elastic.step = self.membership.step = self.step
            self.membership.pace = time.monotonic() - self._step_began
            self._send_step()
            if self.recorder is not None:
                self.recorder.stepped(self.step)
        if not self.engine.accumulates:
            self.engine.syncs_at_point = self.engine.syncs_buffers
            if elastic.needs_final():
                elastic.make_final()
        elastic.show_state()
        self._writer.check()
        self._act_until_done(agreed, stepped)

    def _act_until_done(self, agreed: Agreement, stepped: bool) -> None:
        """The round counts; should a worker be lost while the others act on it, they act again without it."""
        while True:
            try:
                self._act_on(agreed, stepped)
                return
            except PeersLost:
                self.recover()

    def recover(self) -> None:
        """Goes on without those who are gone."""
        lost = self.elastic.generation.fabric.lost
        self.events.emit("recovering", step=self.step, lost=list(lost))
        if self._pass is not None:
            self._pass.account(self.elastic.point_batch)  # for all, since those who are gone cannot
        try:
            self.elastic.recover(self._pass)
        except EndOfRun as end:  # the others have long gone on without this worker
            self._leave(end)
        self._scale_to_workers()
        if self._pass is not None:
            self._pass.rewind(self.elastic.point_batch)
        self._told_of_generation("recovered")

    def _told_of_generation(self, event: str) -> None:
        generation = self.elastic.generation
        self.events.emit(
            event,
            step=self.step,
            joined=generation.formation.generation,
            workers=generation.fabric.size,
            seconds=self.elastic.switched_at,
        )
        if self.recorder is not None:
            self.recorder.began(self.step)
        for hook in self._hooks:
            hook(generation.formation.generation, generation.fabric.size)

    def _meet(self) -> None:
        """An agreement outside any step."""
        if self.recorder is not None:
            self.recorder.met()
        self._desk.place = (self.epoch, -1, 0, 0)
        while True:
            try:
                self._note_wishes()
                self.elastic.fingerprint()
                agreed = self.elastic.agree(advances=False, next_batch=0, steps=0)
                break
            except PeersLost:
                self.recover()
        self._act_until_done(agreed, stepped=False)

    def _act_on(self, agreed: Agreement, stepped: bool) -> None:
        env = self._env
        if agreed.wishes[INTERRUPT]:
            self._write_final()
            self._account()
            self._leave(Interrupted())
        if agreed.wishes[CHECKPOINT]:
            self._write_requested()
        if agreed.wishes[STOP] or (env.steps and self.step >= env.steps):
            self.finishing = True
            self._serve_late_wishes()
            self._write_final()  # here, while it is known where in the pass training stands
        if stepped and not self.finishing and env.checkpoint_every and self.step % env.checkpoint_every == 0:
            self._write(Path(env.checkpoint_dir) / folder_name(self.step))
        if stepped and not self.finishing and agreed.change_to > self.elastic.generation.formation.generation:
            self._change_over(agreed.change_to)
        if stepped and not self.finishing:
            self._learn_step_time()
        self.membership.confirm_dropped()

    def _change_over(self, generation: int) -> None:
        assert self._pass is not None
        self.elastic.announce(generation)
        self._account()
        try:
            self.elastic.change_over(generation)
        except EndOfRun as end:
            self._leave(end)
        self._scale_to_workers()
        self._pass.rewind(self._pass.loader.index)
        self._told_of_generation("changed_over")

    def _scale_to_workers(self) -> None:
        if self.scale.by_workers(self.workers, self.step):
            self._told_of_batch()

    def _learn_step_time(self) -> None:
        """Hybrid scaling, some steps after a change: the slowest member's time decides whether the batch grows."""
        if not self.scale.due(self.step):
            return
        times = [row[0] for row in self.elastic.generation.fabric.exchange([self.scale.microseconds])]
        if min(times) > 0 and self.scale.learn(self.step, max(times) * 1e-6):
            assert self._pass is not None
            self._pass.rewind(self._pass.loader.index)
            self._told_of_batch()

    def _leave(self, end: EndOfRun) -> NoReturn:
        """Out of the user's loop; remembered, should the script catch what it ought to let pass."""
        self._writer.wait()
        self.end = end
        raise end

    def _serve_late_wishes(self) -> None:
        """What was asked for in the last step of this generation, for which no further step comes to agree on it."""
        rows = self.elastic.generation.fabric.exchange(self._wants)
        self._wants[STOP] = max(row[STOP] for row in rows)
        if any(row[CHECKPOINT] for row in rows):
            self._write_requested()

    def _write_requested(self) -> None:
        """The checkpoint that some worker asked for with session.checkpoint(path), or the one that is due by time."""
        asked = str(self._checkpoint_path or "").encode()
        paths = self.elastic.generation.fabric.gather_bytes(asked)
        self._wants[CHECKPOINT] = 0
        self._checkpoint_path = None
        usual = str(Path(self._env.checkpoint_dir) / folder_name(self.step)).encode()
        self._write(Path(next((path for path in paths if path), usual).decode()))

    def _account(self) -> None:
        self._flush_step()
        if self._pass is not None:
            self._pass.account()

    def _send_step(self) -> None:
        """Reports the step before this one, whose numbers the GPU has surely computed by now."""
        if not self.is_main or not self.events.connected:
            self._logged = {}
            return
        self._flush_step()
        self._unsent = (self.step, self.epoch, time.monotonic(), self._logged)
        self._logged = {}

    def _flush_step(self) -> None:
        if self._unsent is not None:
            step, epoch, at, values = self._unsent
            self.events.emit("step", step=step, epoch=epoch, at=at, log=numbers_among(values))
            self._unsent = None

    # -- state -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._engine is None:
            raise UsageError("call session.prepare(model, optimizer, ...) before session.epochs()")
        if self._started:
            raise UsageError("session.epochs() was called twice: use one loop over epochs")
        self._started = True
        if self._env.joins:
            self._follower = Follower(self.engine, self.membership, self.elastic, self._desk, self._prepared)
            self._follower.on_synced = self._tell_of_catching_up
            self.events.emit("ready")
            self.epoch = self._follower.wait_until_let_in()
            self.events.emit("following", epoch=self.epoch)
            return
        if self._env.resume:
            self._load(Path(self._env.resume))
        if self.scale.workers != self.workers:
            self._scale_to_workers()
        elastic = self.elastic
        elastic.step = self.membership.step = self.step
        self._desk.clock = 2 * self.step
        if not elastic.alone:
            # So that a worker lost before the first pass can be made up for. What the script has drawn meanwhile is
            # not part of it: the pass will look at that.
            live, self.engine.resident = self.engine.resident, None
            elastic.make_final()
            self.engine.resident = live
        for hook in self._hooks:
            hook(elastic.generation.formation.generation, self.workers)
        if self.recorder is not None:
            self.recorder.began(self.step)
        if self._env.steps and self.step >= self._env.steps:
            self.finishing = True
        begun = {"generation": self._env.generation, "rounds": self.rounds}
        self.events.emit("training", step=self.step, epoch=self.epoch, **begun)

    def _rest_of_state(self, light: bool = False) -> dict[str, Any]:
        """What is equal on all workers besides the user's own objects."""
        return {
            "engine": self.engine.shared_state(light),
            "point": self.engine.point,
            "step": self.step,
            "rounds": self.rounds,
            "epoch": self.epoch,
            "stop": self._wants[STOP],
            "scaling": self.scale.state(),
            "loaders": [
                loader.state(active=self._pass is not None and self._pass.loader is loader) for loader in self._loaders
            ],
        }

    def _write(self, folder: Path) -> None:
        """The worker that hosts virtual worker 0 writes; it finds the others' virtual workers on their desks."""
        if self._loaded is not None:
            self._write_again(folder)
            return
        began = time.monotonic()
        contexts = self._gather_contexts()
        self._written = (self.step, began, 0.0)
        if not self.is_main:
            return
        if self._pass is not None:
            self._pass.account()  # whoever goes on from here knows nothing of what was trained on before
        shared = {**self._prepared.state(), **self._rest_of_state()}
        manifest = Manifest(
            step=self.step, epoch=self.epoch, virtual=self.size, environment=self._environment, files={}
        )
        self._writer.write(folder, shared, contexts, manifest)
        self._written = (self.step, began, time.monotonic() - began)

    def _write_again(self, folder: Path) -> None:
        """Nothing was trained since the job was resumed. Where in its pass it stands is known again only when the
        script comes there; so what it was resumed from is the checkpoint, as it is."""
        known = Path(self._env.resume)
        if self.is_main and folder.resolve() != known.resolve():
            copy_checkpoint(known, folder)
            self._told_of_checkpoint(self.step, folder)

    def _told_of_checkpoint(self, step: int, folder: Path) -> None:
        self.events.emit("checkpoint", step=step, path=str(folder))

    def _gather_contexts(self) -> dict[int, bytes]:
        """All virtual workers' contexts as file contents; complete on the main worker only."""
        engine, generation = self.engine, self.elastic.generation
        own = {v: to_bytes(self._own_context(v)) for v in engine.order}
        if generation.fabric.size == 1:
            return own
        if engine.accumulates:  # gradients in between steps are not on the desks
            packed = generation.fabric.gather_bytes(pack_parts(own))
            return {v: data for part in packed for v, data in unpack_parts(part).items()}
        if not self.is_main:
            return {}
        feeds = [loader.feed for loader in self._loaders]
        for v in range(self.size):
            if v in own:
                continue
            owner = generation.formation.members[generation.placement.host(v)]
            desk = generation.desks[owner]
            generation.fabric.wait_for(owner, lambda desk=desk, v=v: is_final(desk, v, engine.point))  # type: ignore[misc]
            record = desk.context(v, engine.point)
            assert record is not None
            state, parts = engine.state_of_record(record[0], feeds)
            own[v] = to_bytes({**state, "loaders": parts})
        return own

    def _own_context(self, v: int) -> dict[str, Any]:
        return {**self.engine.context_state(v), "loaders": [x.feed.context_state(v) for x in self._loaders]}

    def _load(self, folder: Path) -> None:
        engine = self.engine
        manifest, shared, contexts = read_checkpoint(folder, engine.order, self.size)
        environment.require_same(
            self._environment, manifest.environment, f"this machine, compared with the checkpoint {folder},"
        )
        self._prepared.check_fits(shared, str(folder))
        self._loaded = (shared, contexts)
        self._apply(shared, contexts)
        self.step, self.epoch = shared["step"], shared["epoch"]
        self.rounds = shared.get("rounds", 0)
        self._restore_scale(shared)
        self._loader_states = dict(enumerate(shared["loaders"]))
        self._loader_contexts = {v: state["loaders"] for v, state in contexts.items()}
        for loader in self._loaders:
            self._restore_loader(loader)

    def _restore_scale(self, shared: Any) -> None:
        state = shared.get("scaling")
        if state is not None:
            self.scale.load(state)
            if self.scale.workers != self.workers:
                self.scale.by_workers(self.workers, self.step)

    def _apply(self, shared: Any, contexts: dict[int, Any]) -> None:
        self._prepared.load(shared)
        self.engine.load_shared_state(shared["engine"])
        for v, state in contexts.items():
            self.engine.load_context(v, state)
        self.engine.go_outside()

    def _restore_loader(self, loader: SessionLoader) -> None:
        state = self._loader_states.pop(loader.number, None)
        if state is not None:
            loader.load(state)
            for v, contexts in self._loader_contexts.items():
                loader.feed.load_context(v, contexts[loader.number])

    def _finish(self) -> None:
        if self.follows:
            raise Left()  # the others have finished before they let us in
        if self.engine.turn is None and not self.finishing:
            self._meet()
        if not self.finishing:
            self._write_final()
        self._writer.wait()
        self._over = True
        self._flush_step()
        self.events.emit("finished", step=self.step, epoch=self.epoch, reason=self.stop_reason)

    def _write_final(self) -> None:
        if self._env.checkpoint_dir:
            self._write(Path(self._env.checkpoint_dir) / folder_name(self.step))

    # -- a newcomer's way in -----------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        return self._follower is not None

    def _tell_of_catching_up(self, catch_up: CatchUp | Together | None) -> None:
        assert self._follower is not None
        if catch_up is None:
            self.events.emit("handed_over", reason=self._follower.handed_over)
            return
        self.events.emit("copied", at=catch_up.copied_at, bytes=catch_up.copied_bytes)
        told = self._follower.told
        self.events.emit("synced", replayed=catch_up.replayed, differing=catch_up.differing, **told)

    def rehearse(self, loader: SessionLoader) -> Iterator[Any]:
        """Once per newcomer, in the loop over the data that it comes to first; a stream's records belong to others."""
        if self._rehearsed or not isinstance(loader.feed, Feed):
            return
        self._rehearsed = True
        with self.aside():
            batch = loader.feed.sample()
        yield from rehearse(self.engine, batch)
        self.events.emit("rehearsed")

    def follow(self, loader: SessionLoader) -> bool:
        """Whether this newcomer trains from here on; False if the others are in another pass."""
        self._search_once()
        assert self._follower is not None
        rest = self._follower.follow(self.epoch, loader.number, loader.passes)
        if rest is None:
            return False
        late, replayed = self._follower.late, self._follower.replayed
        self._follower = None
        self.step, self.epoch, self.rounds = rest["step"], rest["epoch"], rest["rounds"]
        self.membership.step = self.step
        self._desk.clock = 2 * self.step
        self._wants = [0] * WISHES
        self._wants[STOP] = rest["stop"]
        for other, state in zip(self._loaders, rest["loaders"], strict=True):
            other.join(state)
        self.scale.load(rest["scaling"])
        self.scale.by_workers(self.workers, self.step)
        self.elastic.point_batch = loader.index
        self._let_in = True
        self.events.emit("training", step=self.step, epoch=self.epoch, late=late, replayed=replayed)
        self._told_of_generation("joined_generation")
        return True

    def close(self) -> None:
        """Ends what the session started; the process may go on."""
        self._writer.close()
        if self._membership is not None:
            self._membership.close()
        self._flush_step()
        for loader in self._loaders:
            loader.feed.shut_down()
        if self.recorder is not None:
            self.recorder.close()


def numbers_among(values: dict[str, Any]) -> dict[str, float]:
    """What of logged values can be shown as numbers; logging must never end a training run."""
    found: dict[str, float] = {}
    for name, value in list(values.items())[:MOST_LOGGED]:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            found[name[:40]] = float(value)
    return found


def current() -> Session | None:
    """The session of this process, if it has joined."""
    return _joined
