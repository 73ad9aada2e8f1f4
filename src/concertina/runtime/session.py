"""A training script's view of its job."""

import contextlib
import operator
import os
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fractions import Fraction
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from concertina.core.batch_scaling import Scaling
from concertina.core.env import WorkerEnv
from concertina.core.errors import UsageError
from concertina.runtime import arrays
from concertina.runtime.buckets import DdpOptions
from concertina.runtime.course import Course
from concertina.runtime.data import Feed, LoaderOptions
from concertina.runtime.determinism import apply_level
from concertina.runtime.events import EventPipe
from concertina.runtime.gates import acts_now, gate_average
from concertina.runtime.interrupts import EndOfRun
from concertina.runtime.loader import SessionLoader
from concertina.runtime.loop import Loop
from concertina.runtime.member import Member, is_first
from concertina.runtime.prepared import Prepared
from concertina.runtime.recorder import Recorder
from concertina.runtime.rng import aside
from concertina.runtime.scaling import BatchScale, parts_of, script_factor
from concertina.runtime.scan import check_model, check_optimizer
from concertina.runtime.shards import ShardStream, make_stream
from concertina.runtime.story import Story
from concertina.runtime.virtual import VirtualEngine
from concertina.runtime.wishes import Wishes

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
        self._prepared = Prepared()
        self._wishes = Wishes()
        self._course = Course(BatchScale(Scaling(env.scaling), env.virtual, env.from_workers, env.ramp))
        self._loop: Loop | None = None  # until prepare()
        self.events = EventPipe(env.events_fd, env.worker)
        self._story = Story(self.events, self._course)

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of virtual workers; it never changes."""
        return self._env.virtual

    @property
    def rank(self) -> int:
        """The virtual worker whose turn it is; between loops, the first of this worker."""
        if self._loop is None:
            if self.size == 1:
                return 0
            raise UsageError(
                "session.rank before prepare(): a worker is several ranks at once, whose turns come in the loop; use "
                "session.is_main for what one process does, and session.seed(n) after prepare() for seeds by rank"
            )
        engine = self._loop.engine
        if engine.turn is not None:
            return engine.turn.virtual_worker
        if engine.rehearses:
            return self.size - 1
        return min(engine.contexts, default=0)

    @property
    def is_main(self) -> bool:
        """True on the worker where virtual worker 0 lives."""
        return is_first(self._env) if self._loop is None else self._loop.member.is_main

    @property
    def is_last_turn(self) -> bool:
        """True in the turn in which the optimizer acts, and outside the loop: for what happens once per step."""
        return self._loop is None or acts_now(self._loop.engine)

    @property
    def rehearsing(self) -> bool:
        """True while the loop's body is run once for nothing, by a newcomer before it is let in, or where a job resumes
        at the end of an epoch: what it does besides training (writing files, counting) should not happen then."""
        return self._loop is not None and self._loop.engine.rehearses

    @property
    def workers(self) -> int:
        """How many workers train at the moment. Results must not depend on it."""
        return max(1, len(self._env.members)) if self._loop is None else self._loop.member.workers

    @property
    def keeps_batch(self) -> bool:
        """Whether the number of workers leaves the batch alone: under --scaling consistent and strong."""
        return self._course.scale.mode in (Scaling.CONSISTENT, Scaling.STRONG)

    @property
    def device(self) -> torch.device:
        """The device of this worker: a GPU if there is one."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self._env.worker % torch.cuda.device_count())

    @property
    def step(self) -> int:
        """Optimizer steps that are complete."""
        return self._course.step

    @property
    def epoch(self) -> int:
        return self._course.epoch

    @property
    def engine(self) -> VirtualEngine:
        return self.loop.engine

    @property
    def loop(self) -> Loop:
        """What the loaders work with."""
        if self._loop is None:
            raise UsageError("call session.prepare(model, optimizer, ...) first")
        return self._loop

    @property
    def end(self) -> EndOfRun | None:
        """Why this worker left the loop, if something other than its end made it."""
        return None if self._loop is None else self._loop.boundary.end

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
        if self._loop is not None:
            raise UsageError("prepare() was called twice: give it the model and everything that steps with it at once")
        prepared = Prepared.sort(things)
        prepared.registered = self._prepared.registered  # what came before prepare() belongs to the job, too
        if prepared.arrays and self._course.loaders:
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
        member = Member(self._env, prepared, options, self._course, self.events)
        self._prepared = prepared
        self._loop = Loop(self._env, member, self._course, self._wishes, self._story)
        member.begin()
        engine = member.engine
        for thing in prepared.registered.values():
            self._gate_average(thing)
        if self._env.record_dir:
            self._story.recorder = Recorder(Path(self._env.record_dir), self._env, engine, prepared)
        name = "" if engine.generation is None else engine.reducer.name
        self.events.emit("prepared", reduction=name, parameters=sum(p.numel() for p in engine.params))
        return things[0] if len(things) == 1 else things

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
        unknown = sorted(set(options) - set(LoaderOptions.__dataclass_fields__))
        if unknown:
            misspelt = [name for name in unknown if name not in signature(DataLoader).parameters]
            meant = get_close_matches(misspelt[0], LoaderOptions.__dataclass_fields__, 1) if misspelt else []
            why = f"did you mean {meant[0]}?" if meant else "it makes sampler, batches and seeds itself"
            raise UsageError(f"session.loader does not take {', '.join(unknown)}: {why}")
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
        loader = SessionLoader(self, Feed(dataset, settings, self.size), len(self._course.loaders))
        self._course.add(loader)
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
            len(self._course.loaders),
            items,
            read,
            arrays=bool(self._prepared.arrays),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            collate_fn=collate_fn,
        )
        self._course.add(stream)
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
        if self._loop is not None and self._loop.started:
            raise UsageError(f"register({name!r}, ...) must come before session.epochs()")
        self._prepared.registered[name] = thing
        if self._loop is not None:
            self._gate_average(thing)

    def _gate_average(self, thing: Any) -> None:
        if isinstance(thing, AveragedModel):
            gate_average(thing, self.engine)

    def on_rescale(self, hook: Callable[[int, int], None]) -> None:
        """`hook(generation, workers)` runs in every worker when a generation begins to train."""
        self._story.hooks.append(hook)

    def seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch as if rank v of a DDP job had seeded them with `seed + v`."""
        if self._loop is None:
            raise UsageError(
                "session.seed() seeds the virtual workers, which exist from prepare() on: seed the building of the "
                "model with torch.manual_seed(), then call prepare(), then session.seed()"
            )
        self._loop.engine.seed(seed)

    # -- the user's loop ---------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers up to `count`; after a restart, from the epoch that was under way."""
        if self._loop is None:
            raise UsageError("call session.prepare(model, optimizer, ...) before session.epochs()")
        try:
            whole = operator.index(count)
        except TypeError:
            raise UsageError(f"session.epochs({count!r}) needs a whole number of epochs") from None
        return self._loop.epochs(whole)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, as DistributedDataParallel.no_sync."""
        engine = self.engine
        before, engine.sync_allowed = engine.sync_allowed, False
        try:
            yield
        finally:
            engine.sync_allowed = before

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Code outside the loop that may draw random numbers (evaluation, samples to look at) without any effect on
        training: Python's, NumPy's and torch's random states are afterwards what they were before."""
        return aside()

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
        if self._course.current is not None:
            raise UsageError("scale_batch() inside the loop over the data: call it above that loop, once per epoch")
        if self._course.scale.by_script(script_factor(factor), self.step, ramp):
            self._story.batch(self.is_main)

    def request_workers(self, workers: int) -> None:
        """Asks for another number of workers; training goes on, and they come when they are ready, or not at all."""
        try:
            workers = operator.index(workers)
        except TypeError:
            raise UsageError(
                f"request_workers({workers!r}): workers are counted in whole numbers (divide with //, or use round())"
            ) from None
        if not 1 <= workers <= self.size:
            raise UsageError(
                f"request_workers({workers}): a job of {self.size} virtual workers takes 1 to {self.size} workers"
            )
        loop = self.loop
        if self.is_main and not loop.follows:
            loop.member.membership.say(op="resize", workers=workers)

    def step_took(self, seconds: float) -> None:
        """How long this step takes on this worker, where the script knows better than a clock around it (a GPU's own
        events, a simulated device). Hybrid scaling goes by it."""
        if not self.rehearsing:
            self._course.scale.told = float(seconds)

    def reduce(self, *gradients: Any) -> list[arrays.Array] | None:
        """For NumPy arrays that prepare() was given: the mean over all virtual workers of the gradients that each gives
        in its turn, one per array. It is there in the last turn of a step, in which to change the arrays; before, None.
        """
        return None if self.rehearsing else arrays.mean_over_virtual_workers(self.engine, gradients)

    def log(self, **values: Any) -> None:
        """Numbers of the current step; those of virtual worker 0 appear in the event stream."""
        if self.rehearsing:
            return
        recorder = self._story.recorder
        if recorder is not None and self._loop is not None and self._loop.engine.turn is not None:
            recorder.logged(self.rank, values)
        if self.rank == 0:
            self._story.log(values)

    def stop(self, reason: str) -> None:
        """Ends training on all workers after the same step: the one after that in which it was called."""
        if not self.rehearsing:
            self._wishes.stop(reason)
            if self._loop is not None and not self._loop.follows:
                self._loop.boundary.stop_asked()

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole state of the job to the folder `path` at the end of the next step or epoch."""
        if self._loop is not None and self._loop.over:
            raise UsageError(
                "session.checkpoint() after the last epoch: call it in the loop, or run with --checkpoint DIR"
            )
        if not self.rehearsing:
            self._wishes.checkpoint(Path(path).absolute())

    # -- the end -----------------------------------------------------------------------------------------------------

    def close_pass(self) -> None:
        """The script is through; what is left of its last loop over data is settled."""
        if self._loop is not None:
            self._loop.close_pass()

    def close(self) -> None:
        """Ends what the session started; the process may go on."""
        if self._loop is not None:
            self._loop.close()
        self._story.flush_step()
        for feed in self._course.feeds():
            feed.shut_down()
        self._story.close()


def current() -> Session | None:
    """The session of this process, if it has joined."""
    return _joined
