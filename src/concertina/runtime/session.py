"""A training script's view of its job."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from concertina.core.checkpoints import Manifest, folder_name
from concertina.core.env import WorkerEnv
from concertina.core.errors import DivergenceError, UsageError
from concertina.runtime import environment
from concertina.runtime.buckets import DdpOptions
from concertina.runtime.checkpoint import read_checkpoint, write_checkpoint
from concertina.runtime.data import Feed, LoaderOptions
from concertina.runtime.determinism import apply_level, may_mix_gpus
from concertina.runtime.digest import ParameterDigest
from concertina.runtime.events import EventPipe
from concertina.runtime.gates import gate_average, gate_optimizer, gate_scaler, gate_scheduler
from concertina.runtime.group import Group
from concertina.runtime.interrupts import EndOfRun, HandedOver, Interrupted, stop_request
from concertina.runtime.loader import Pass, SessionLoader, check_not_left_by_break
from concertina.runtime.prepared import Prepared
from concertina.runtime.recorder import Recorder
from concertina.runtime.reducers import ReducerFactory
from concertina.runtime.rng import RandomState
from concertina.runtime.scan import check_model, check_nothing_forgotten, check_optimizer
from concertina.runtime.virtual import VirtualEngine

STOP, CHECKPOINT, INTERRUPT = 0, 1, 2  # flags that the workers agree on at every step
FLAGS = 3
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
    group = None
    if env.workers > 1:
        group = Group.build(Path(env.run_dir) / f"rendezvous-{env.generation}", env.worker, env.workers)
    _joined = Session(env, group)
    _joined.events.emit("joined", pid=os.getpid(), workers=env.workers)
    return _joined


class Session:
    """One worker's part in one generation of a job."""

    def __init__(self, env: WorkerEnv, group: Group | None) -> None:
        self._env = env
        self._group = group
        self._engine: VirtualEngine | None = None
        self._prepared = Prepared()
        self._loaders: list[SessionLoader] = []
        self._loader_states: dict[int, dict[str, Any]] = {}
        self._loader_contexts: dict[int, dict[int, Any]] = {}
        self._hooks: list[Callable[[int, int], None]] = []
        self._pass: Pass | None = None
        self._started = False
        self._over = False  # the loop over epochs has ended
        self._searched = False  # for optimizers and schedulers that were not prepared
        self._loaded: tuple[Any, dict[int, Any]] | None = None  # what was resumed from, until the first pass
        self._wants = [0] * FLAGS
        self._checkpoint_path: Path | None = None
        self._header: Tensor | None = None
        self._header_work: Any = None
        self._digest: ParameterDigest | None = None
        self._digest_step = 0  # the step after which the fingerprints on their way were taken
        self._logged: dict[str, Any] = {}
        self._unsent: tuple[int, int, dict[str, Any]] | None = None
        self.recorder: Recorder | None = None
        self.events = EventPipe(env.events_fd, env.worker, env.generation)
        self.step = 0  # optimizer steps that are complete
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
        return min(self._env.placement.workers[self._env.worker])

    @property
    def is_main(self) -> bool:
        """True on the worker where virtual worker 0 lives."""
        return 0 in self._env.placement.workers[self._env.worker]

    @property
    def is_last_turn(self) -> bool:
        """True in the turn in which the optimizer acts, and outside the loop: for what happens once per step."""
        return self._engine is None or self._engine.turn is None or self._engine.turn.is_last

    @property
    def workers(self) -> int:
        """How many workers train at the moment. Results must not depend on it."""
        return self._env.workers

    @property
    def device(self) -> torch.device:
        """The device of this worker: a GPU if there is one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self._env.worker % torch.cuda.device_count())

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
        self._require_same_environment(prepared)
        factory = ReducerFactory(self._env, self._group)
        engine = VirtualEngine(
            prepared.model, options, self._env.placement, self._env.worker, self._group, factory.make
        )
        if self._group is not None and not self._env.resume:
            home = self._env.placement.host(0)
            with torch.no_grad():
                self._group.broadcast_tensors([*prepared.model.parameters(), *engine.buffers.flats], home)
        random.restore()
        engine.start(random)
        self._gate(prepared, engine)
        self._prepared, self._engine = prepared, engine
        self._digest = ParameterDigest(engine.layout) if self._group is not None else None
        if self._env.record_dir:
            self.recorder = Recorder(Path(self._env.record_dir), self._env, engine, prepared)
        self.events.emit("prepared", reduction=engine.reducer.name, parameters=sum(p.numel() for p in engine.params))
        return things[0] if len(things) == 1 else things

    def _gate(self, prepared: Prepared, engine: VirtualEngine) -> None:
        for optimizer in prepared.optimizers:
            gate_optimizer(optimizer, engine)
        for scheduler in prepared.schedulers:
            gate_scheduler(scheduler, engine)
        for scaler in prepared.scalers:
            gate_scaler(scaler, engine)
        held = {id(p) for o in prepared.optimizers for group in o.param_groups for p in group["params"]}
        engine.covers_all_params = all(id(p) in held for p in engine.params)

    def _require_same_environment(self, prepared: Prepared) -> None:
        """Every worker compares its environment with worker 0's."""
        on_gpu = any(p.is_cuda for p in prepared.model.parameters())
        self._environment = environment.record(prepared.optimizers, on_gpu)
        may_mix = self._may_mix(prepared)
        if self._group is not None:
            first = json.loads(self._group.gather_bytes(json.dumps(self._environment).encode())[0])
            who = f"worker {self._env.worker}, compared with worker 0,"
            environment.require_same(self._environment, first, who, mixed_gpus=may_mix)

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

    def register(self, name: str, thing: Any) -> None:
        """Further state that belongs to the job: anything with state_dict() and load_state_dict().

        What changes once per step belongs under `if session.is_last_turn:`; an AveragedModel does so by itself.
        """
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
        while self.epoch < count:
            self._meet()
            if self._must_end():
                break
            self.events.emit("epoch", epoch=self.epoch, epochs=count)
            yield self.epoch
            self.close_pass()
            if self._must_end():
                break
            for loader in self._loaders:
                loader.epoch_done()
            self.epoch += 1
        self._finish()

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

    def log(self, **values: Any) -> None:
        """Numbers of the current step; those of virtual worker 0 appear in the event stream."""
        if self.recorder is not None and self._engine is not None and self._engine.turn is not None:
            self.recorder.logged(self.rank, values)
        if self.rank == 0:
            kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
            self._logged.update(kept)

    def stop(self, reason: str) -> None:
        """Ends training on all workers after the same step: the one after that in which it was called."""
        self._wants[STOP] = 1
        self.stop_reason = reason

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole state of the job to the folder `path` at the end of the next step or epoch."""
        if self._over:
            raise UsageError(
                "session.checkpoint() after the last epoch: call it in the loop, or run with --checkpoint DIR"
            )
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
        if self._loaded is not None and new.loader.resumes:
            self._apply(*self._loaded)  # what code above the loop did was done in the generation before, too
            self._wants[STOP] = self._loaded[0]["stop"]  # takes effect after the next step, as it would have there
        else:
            self.engine.come_inside()
        if not self._searched:
            check_nothing_forgotten(self._prepared.model, self._prepared.optimizers, self._prepared.schedulers)
            self._searched = True
        self._loaded = None
        self._pass = new

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
        """Starts a step: the workers' wishes and fingerprints travel while it runs."""
        self.engine.begin_round()
        self._header = self._wishes()
        if self._group is not None:
            self._header_work = self._group.max_async(self._header)

    def _wishes(self) -> Tensor:
        self._wants[INTERRUPT] = int(stop_request.asked)
        self._digest_step = self.step
        digests = self._digest.compute() if self._digest is not None else []
        return torch.tensor([*self._wants, *digests, *(-d for d in digests)], dtype=torch.int64)

    def end_round(self) -> None:
        """A step is complete on this worker: agree, and act on what was agreed."""
        stepped = self.engine.step_done
        if stepped:
            self.step += 1
            self._send_step()
            if self.recorder is not None:
                self.recorder.stepped(self.step)
        self._act_on(self._agree(), stepped)

    def _agree(self) -> list[int]:
        assert self._header is not None
        if self._header_work is not None:
            self._header_work.wait()
            self._header_work = None
        values = [int(v) for v in self._header.tolist()]
        digests = values[FLAGS:]
        half = len(digests) // 2
        for bucket, (high, low) in enumerate(zip(digests[:half], digests[half:], strict=True)):
            if high != -low:
                self._raise_divergence(bucket)
        return values[:FLAGS]

    def _raise_divergence(self, bucket: int) -> None:
        engine = self.engine
        names = [engine.names[i] for i in engine.layout.buckets[bucket]]
        raise DivergenceError(
            f"the workers' parameters differ after step {self._digest_step}, in bucket {bucket} ({', '.join(names[:4])}"
            f"{', ...' if len(names) > 4 else ''}): something changes them on some workers only"
        )

    def _meet(self) -> None:
        """An agreement outside any step."""
        if self.recorder is not None:
            self.recorder.met()
        self._header = self._wishes()
        if self._group is not None:
            self._header_work = self._group.max_async(self._header)
        self._act_on(self._agree(), stepped=False)

    def _act_on(self, agreed: list[int], stepped: bool) -> None:
        env = self._env
        if agreed[INTERRUPT]:
            self._write_final()
            self._account()
            self._leave(Interrupted())
        if agreed[CHECKPOINT]:
            self._write_requested()
        if agreed[STOP] or (env.steps and self.step >= env.steps):
            self.finishing = True
            self._serve_late_wishes()
            self._write_final()  # here, while it is known where in the pass training stands
        elif stepped and env.stop_at and self.step >= env.stop_at:
            self._serve_late_wishes()
            self._write(Path(env.handover_dir))
            self._account()
            self._leave(HandedOver())
        if stepped and not self.finishing and env.checkpoint_every and self.step % env.checkpoint_every == 0:
            self._write(Path(env.checkpoint_dir) / folder_name(self.step))

    def _leave(self, end: EndOfRun) -> NoReturn:
        """Out of the user's loop; remembered, should the script catch what it ought to let pass."""
        self.end = end
        raise end

    def _serve_late_wishes(self) -> None:
        """What was asked for in the last step of this generation, for which no further step comes to agree on it."""
        wishes = torch.tensor(self._wants, dtype=torch.int64)
        if self._group is not None:
            self._group.max_async(wishes).wait()
        self._wants[STOP] = int(wishes[STOP])
        if wishes[CHECKPOINT]:
            self._write_requested()

    def _write_requested(self) -> None:
        """The checkpoint that some worker asked for with session.checkpoint(path)."""
        self._wants[CHECKPOINT] = 0
        asked = str(self._checkpoint_path or "").encode()
        paths = [asked] if self._group is None else self._group.gather_bytes(asked)
        self._checkpoint_path = None
        self._write(Path(next(path for path in paths if path).decode()))

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
        self._unsent = (self.step, self.epoch, self._logged)
        self._logged = {}

    def _flush_step(self) -> None:
        if self._unsent is not None:
            step, epoch, values = self._unsent
            self.events.emit("step", step=step, epoch=epoch, log=numbers_among(values))
            self._unsent = None

    # -- state -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._engine is None:
            raise UsageError("call session.prepare(model, optimizer, ...) before session.epochs()")
        if self._started:
            raise UsageError("session.epochs() was called twice: use one loop over epochs")
        self._started = True
        if self._env.resume:
            self._load(Path(self._env.resume))
        for hook in self._hooks:
            hook(self._env.generation, self._env.workers)
        if self.recorder is not None:
            self.recorder.began(self.step)
        if self._env.steps and self.step >= self._env.steps:
            self.finishing = True
        self.events.emit("training", step=self.step, epoch=self.epoch)

    def _write(self, folder: Path) -> None:
        """All workers together; the one that hosts virtual worker 0 writes."""
        engine = self.engine
        shared = {
            **self._prepared.state(),
            "engine": engine.shared_state(),
            "step": self.step,
            "epoch": self.epoch,
            "stop": self._wants[STOP],
            "loaders": [
                loader.state(active=self._pass is not None and self._pass.loader is loader) for loader in self._loaders
            ],
        }
        contexts = {
            v: {**engine.context_state(v), "loaders": [loader.feed.context_state(v) for loader in self._loaders]}
            for v in engine.order
        }
        manifest = Manifest(
            step=self.step, epoch=self.epoch, virtual=self.size, environment=self._environment, files={}
        )
        write_checkpoint(folder, shared, contexts, manifest, self._group, self.is_main)
        if self.is_main:
            self.events.emit("checkpoint", step=self.step, path=str(folder))

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
        self._loader_states = dict(enumerate(shared["loaders"]))
        self._loader_contexts = {v: state["loaders"] for v, state in contexts.items()}
        for loader in self._loaders:
            self._restore_loader(loader)

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
        if self.engine.turn is None and not self.finishing:
            self._meet()
        if not self.finishing:
            self._write_final()
        self._over = True
        self._flush_step()
        self.events.emit("finished", step=self.step, epoch=self.epoch, reason=self.stop_reason)

    def _write_final(self) -> None:
        if self._env.checkpoint_dir:
            self._write(Path(self._env.checkpoint_dir) / folder_name(self.step))

    def close(self) -> None:
        """Ends what the session started; the process may go on."""
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
