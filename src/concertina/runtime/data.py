"""Batches for virtual workers, in DistributedSampler's order, with random augmentation that follows the sample.

For virtual worker v, `session.loader(...)` yields what `DataLoader(dataset, sampler=DistributedSampler(dataset, P, v))`
yields on rank v. With data-loading processes, DDP has `num_workers` of them per rank; here the virtual workers of a
worker share that many. What a DDP rank's process j would do is a *lane* (v, j): its random state travels with its
batches, so a batch that was prefetched but never trained on costs nothing and is made again elsewhere.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from concertina.core.cut_plan import CutPlan
from concertina.core.errors import UnsupportedScript, UsageError
from concertina.runtime.context_record import ContextReader, ContextWriter, LaneState, pack_lane, unpack_lane
from concertina.runtime.torch_internals import numpy_seed_of_data_worker, set_data_worker_info

Lane = tuple[int, int]  # (virtual worker, data worker it would be under DDP)


@dataclass(frozen=True, slots=True)
class LaneSeed:
    """A lane that starts anew, as a data worker process does."""


@dataclass(frozen=True, slots=True)
class Task:
    """One batch to make."""

    lane: Lane
    indices: tuple[int, ...]
    base_seed: int  # of the virtual worker's data workers
    start: LaneSeed | LaneState | None  # None: go on from this lane's previous batch


class LaneDataset(Dataset[tuple[Any, LaneState]]):
    """Runs in a data-loading process: makes batches for any lane, each under that lane's own random state."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        lanes_per_rank: int,
        init: Callable[[int], None] | None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._lanes_per_rank = lanes_per_rank
        self._init = init
        self._states: dict[Lane, LaneState] = {}

    def __getitem__(self, task: Task) -> tuple[Any, LaneState]:
        worker = task.lane[1]
        set_data_worker_info(worker, self._lanes_per_rank, task.base_seed + worker, self.dataset)
        if task.start is not None:
            self._begin(worker, task.base_seed)
        if not isinstance(task.start, LaneSeed):
            set_lane_state(task.start or self._states[task.lane])
        batch = fetch(self.dataset, task.indices, self._collate)
        state = get_lane_state()
        self._states[task.lane] = state
        return batch, state

    def _begin(self, worker: int, base_seed: int) -> None:
        """What a data worker process does first."""
        random.seed(base_seed + worker)
        torch.manual_seed(base_seed + worker)
        np.random.seed(numpy_seed_of_data_worker(base_seed, worker))
        if self._init is None:
            return
        before = dict(vars(self.dataset)) if hasattr(self.dataset, "__dict__") else {}
        self._init(worker)
        after = vars(self.dataset) if hasattr(self.dataset, "__dict__") else {}
        changed = [name for name in after if name not in before or after[name] is not before[name]]
        if changed:
            raise UnsupportedScript(
                f"worker_init_fn gives the dataset a state of its own ({', '.join(changed)}), which cannot follow its "
                "samples to another process: draw from random, np.random or torch, whose states do"
            )


def fetch(dataset: Any, indices: Sequence[int], collate: Callable[[list[Any]], Any]) -> Any:
    many = getattr(dataset, "__getitems__", None)
    return collate(many(list(indices)) if many else [dataset[i] for i in indices])


def get_lane_state() -> LaneState:
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()


def set_lane_state(state: LaneState) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(torch.frombuffer(bytearray(state[2]), dtype=torch.uint8))


def lane_state_to_plain(state: LaneState) -> list[Any]:
    """For a checkpoint: tensors and numbers only."""
    (version, words, gauss), (name, keys, position, has_gauss, cached), raw = state
    return [
        [version, torch.tensor(words, dtype=torch.int64), gauss],
        [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        torch.frombuffer(bytearray(raw), dtype=torch.uint8),
    ]


def lane_state_from_plain(plain: list[Any]) -> LaneState:
    (version, words, gauss), (name, keys, position, has_gauss, cached), raw = plain
    numpy_state = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    return (version, tuple(words.tolist()), gauss), numpy_state, raw.numpy().tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How to make batches; the names are DataLoader's and DistributedSampler's."""

    batch_size: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    timeout: float = 0.0  # seconds to wait for a data-loading process; 0 waits for ever, as DataLoader does
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r}: needs a whole number of samples, 1 or more")
        if self.num_workers < 0:
            raise UsageError(f"num_workers={self.num_workers}: needs 0 or more data-loading processes")
        if self.persistent_workers and self.num_workers == 0:
            raise UsageError("persistent_workers=True needs num_workers of 1 or more")


class TaskList:
    """The sampler of the shared DataLoader: the tasks of the coming pass, made as they are asked for."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Task]] = lambda: iter(())
        self.count = 0

    def __iter__(self) -> Iterator[Task]:
        return self.make()

    def __len__(self) -> int:
        return self.count


def batch_indices(sampler_indices: Sequence[int], batch_size: int, drop_last: bool) -> list[tuple[int, ...]]:
    """Cuts one virtual worker's samples of an epoch into batches."""
    cuts = [tuple(sampler_indices[k : k + batch_size]) for k in range(0, len(sampler_indices), batch_size)]
    return cuts[:-1] if drop_last and cuts and len(cuts[-1]) < batch_size else cuts


class Feed:
    """The batches of this worker's virtual workers: what is next, and the state to go on from."""

    def __init__(self, dataset: Any, options: LoaderOptions, virtual: int) -> None:
        check_dataset(dataset, options, virtual)
        self.dataset = dataset
        self.options = options
        self._collate = options.collate_fn or default_collate
        self._virtual = virtual
        self._orders: dict[tuple[int, int], list[int]] = {}  # by virtual worker and epoch
        self._made_cuts: dict[tuple[int, int, CutPlan | None], list[tuple[int, ...]]] = {}  # of one epoch and plan
        self.samples = len(self._sampler(0))  # of one virtual worker in an epoch
        self.plan: CutPlan | None = None  # where batches are not all of `batch_size`
        self.batches_per_epoch = len(self._cut(0, 0))
        self.lanes: dict[Lane, LaneState] = {}  # as of the last batch that was handed out
        self.base_seeds: dict[int, int] = {}  # by virtual worker, for lanes that have not begun
        self._tasks = TaskList()
        self._loader: Any = None
        self._iterator: Iterator[tuple[Any, LaneState]] | None = None
        self._cuts: dict[int, list[tuple[int, ...]]] = {}

    def _order(self, v: int, epoch: int) -> list[int]:
        """The samples of virtual worker v in an epoch; those of this epoch are kept."""
        found = self._orders.get((v, epoch))
        if found is None:
            sampler = self._sampler(v)
            sampler.set_epoch(epoch)
            found = list(sampler)
            kept = {key: order for key, order in self._orders.items() if key[1] == epoch}
            self._orders = {**kept, (v, epoch): found}  # replaced as a whole: two threads may be here
        return found

    def _sampler(self, v: int) -> DistributedSampler[Any]:
        o = self.options
        return DistributedSampler(self.dataset, self._virtual, v, shuffle=o.shuffle, seed=o.seed, drop_last=o.drop_last)

    def get_ready(self, epoch: int, order: Sequence[int]) -> None:
        """Beside training, for virtual workers that are about to come here: long lists take a while to make."""
        for v in order:
            self._cut(v, epoch)

    def _cut(self, v: int, epoch: int) -> list[tuple[int, ...]]:
        key = (v, epoch, self.plan)
        found = self._made_cuts.get(key)
        if found is None:
            found = self._cut_anew(v, epoch)
            kept = {k: cut for k, cut in self._made_cuts.items() if k[1:] == key[1:]}
            self._made_cuts = {**kept, key: found}  # replaced as a whole: two threads may be here
        return found

    def _cut_anew(self, v: int, epoch: int) -> list[tuple[int, ...]]:
        order = self._order(v, epoch)
        if self.plan is not None:
            return [tuple(order[lo:hi]) for lo, hi in self.plan.bounds()]
        return batch_indices(order, self.options.batch_size, self.options.drop_last)

    @property
    def batches(self) -> int:
        """In this epoch, as it is cut."""
        return self.batches_per_epoch if self.plan is None else self.plan.batches

    def cut_from(self, batch: int, size: int) -> None:
        """Batches from `batch` on have `size` samples; takes effect with `open`."""
        even = CutPlan.even(self.samples, self.options.drop_last, self.options.batch_size)
        plan = (self.plan or even).from_batch(batch, size)
        self.plan = None if plan == even else plan

    def sample_counts(self) -> list[int]:
        """Samples by batch, the same for every virtual worker: DistributedSampler gives all of them equally many."""
        return [len(batch) for batch in next(iter(self._cuts.values()))]

    def new_pass(self, v: int) -> None:
        """Called under virtual worker v's random state at the start of a pass.

        A new DataLoader iterator draws a seed and starts its processes with it; persistent ones run on.
        """
        if not self.options.persistent_workers or v not in self.base_seeds:
            self.base_seeds[v] = int(torch.empty((), dtype=torch.int64).random_().item())
            for lane in [lane for lane in self.lanes if lane[0] == v]:
                del self.lanes[lane]

    def open(self, epoch: int, first_batch: int, order: Sequence[int], new_pass: bool = True) -> None:
        """Prepares batches `first_batch`... of an epoch for the virtual workers in `order`.

        Later in the same pass, with another order, the data-loading processes are kept.
        """
        if new_pass and not self.options.persistent_workers:
            self.shut_down()
        self._cuts = {v: self._cut(v, epoch) for v in order}
        if self.options.num_workers == 0:
            return
        given = (tuple(order), self._cuts, dict(self.base_seeds), dict(self.lanes))  # as they are now
        self._tasks.make = lambda: self._make_tasks(first_batch, *given)
        self._tasks.count = (self.batches - first_batch) * len(order)
        if self._loader is None:
            self._loader = self._make_loader()
        self._iterator = iter(self._loader)

    def _make_tasks(
        self,
        first: int,
        order: Sequence[int],
        cuts: dict[int, list[tuple[int, ...]]],
        seeds: dict[int, int],
        lanes: dict[Lane, LaneState],
    ) -> Iterator[Task]:
        begun: set[Lane] = set()
        for batch in range(first, len(cuts[order[0]])):
            for v in order:
                lane = (v, batch % self.options.num_workers)
                start = None if lane in begun else lanes.get(lane) or LaneSeed()
                begun.add(lane)
                yield Task(lane, cuts[v][batch], seeds[v], start)

    def _make_loader(self) -> Any:
        o = self.options
        # A lane's batches are `num_workers` batches apart, so DataLoader's round robin always gives a lane to the
        # same process, and the lane's random state can stay there.
        return DataLoader(
            LaneDataset(self.dataset, self._collate, o.num_workers, o.worker_init_fn),
            batch_size=None,
            collate_fn=_as_it_is,  # LaneDataset has collated already
            sampler=self._tasks,
            num_workers=o.num_workers,
            pin_memory=o.pin_memory,
            timeout=o.timeout,
            multiprocessing_context=o.multiprocessing_context,
            prefetch_factor=o.prefetch_factor,
            persistent_workers=True,  # for a new order in the middle of a pass; `open` ends them where DDP would
            generator=torch.Generator(),  # ours: DataLoader must not draw from a virtual worker's state
        )

    def take(self, v: int, batch: int) -> Any:
        """The batch of virtual worker v; called under its random state, in the order given to `open`."""
        if self.options.num_workers == 0:
            made = fetch(self.dataset, self._cuts[v][batch], self._collate)
            return _pin(made) if self.options.pin_memory and torch.cuda.is_available() else made
        assert self._iterator is not None
        try:
            made, state = next(self._iterator)
        except UnsupportedScript as refusal:  # DataLoader has wrapped it into a traceback
            sentence = str(refusal).strip().splitlines()[-1].partition("UnsupportedScript: ")[2]
            raise UnsupportedScript(sentence or str(refusal)) from None
        self.lanes[v, batch % self.options.num_workers] = state
        return made

    def sample(self) -> Any:
        """A batch like those to come, of the first samples: for a turn that counts for nothing."""
        made = fetch(self.dataset, range(self.options.batch_size), self._collate)
        return _pin(made) if self.options.pin_memory and torch.cuda.is_available() else made

    def close(self) -> None:
        self._iterator = None

    def shut_down(self) -> None:
        """Ends the data-loading processes."""
        self._iterator = None
        self._loader = None

    def pack_key(self, v: int) -> int | None:
        """What the part of virtual worker v's record is made of, if that is a single number."""
        return None if self.lanes else self.base_seeds.get(v, -1)

    def pack_context(self, v: int, writer: ContextWriter) -> dict[str, Any]:
        """What of this loader belongs to virtual worker v, for its record on the desk."""
        mine = sorted((lane[1], state) for lane, state in self.lanes.items() if lane[0] == v) if self.lanes else ()
        lanes = {j: pack_lane(writer, (id(self), j), state) for j, state in mine}
        return {"base_seed": self.base_seeds.get(v), "lanes": lanes}

    def unpack_context(self, v: int, state: dict[str, Any], reader: ContextReader) -> None:
        self.forget(v)
        if state["base_seed"] is not None:
            self.base_seeds[v] = state["base_seed"]
        for j, size in state["lanes"].items():
            self.lanes[v, int(j)] = unpack_lane(reader, size)

    def state_of_record(self, state: dict[str, Any], reader: ContextReader) -> dict[str, Any]:
        """What such a record would be in a checkpoint."""
        lanes = {int(j): lane_state_to_plain(unpack_lane(reader, size)) for j, size in state["lanes"].items()}
        return {"base_seed": state["base_seed"], "lanes": lanes}

    def forget(self, v: int) -> None:
        self.base_seeds.pop(v, None)
        for lane in [lane for lane in self.lanes if lane[0] == v]:
            del self.lanes[lane]

    def context_state(self, v: int) -> dict[str, Any]:
        lanes = {lane[1]: lane_state_to_plain(state) for lane, state in self.lanes.items() if lane[0] == v}
        return {"base_seed": self.base_seeds.get(v), "lanes": lanes}

    def load_context(self, v: int, state: dict[str, Any]) -> None:
        if state["base_seed"] is not None:
            self.base_seeds[v] = state["base_seed"]
        for j, plain in state["lanes"].items():
            self.lanes[v, j] = lane_state_from_plain(plain)


def check_dataset(dataset: Any, options: LoaderOptions, virtual: int) -> None:
    if isinstance(dataset, IterableDataset):
        raise UnsupportedScript(
            "an IterableDataset has no sample order that could be divided again; give a dataset with __len__ and "
            "__getitem__"
        )
    if isinstance(dataset, Tensor) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} is no dataset: session.loader needs __len__ and __getitem__ "
            "(torch.utils.data.TensorDataset makes one out of tensors)"
        )
    global_batch = virtual * options.batch_size
    if len(dataset) < global_batch:
        raise UsageError(
            f"the dataset has {len(dataset)} samples, one global batch needs {global_batch} "
            f"({virtual} virtual workers x batch_size {options.batch_size}): lower batch_size or --virtual"
        )


def _as_it_is(made: Any) -> Any:
    return made


def _pin(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
