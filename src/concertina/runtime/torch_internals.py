"""The parts of torch we use that torch does not call public. All of it is here, so that a new torch release
has one file to be checked against."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.optim import Optimizer
from torch.utils.data._utils import worker as _data_worker

FIRST_BUCKET_BYTES: int = c10d._DEFAULT_FIRST_BUCKET_BYTES  # DDP closes its first bucket at this size


def assign_buckets(
    tensors: Sequence[Tensor], limits: list[int], indices: Sequence[int] | None = None
) -> list[list[int]]:
    """DDP's own cutting of parameters into buckets: tensor indices by bucket."""
    dense = [False] * len(tensors)
    if indices is None:
        buckets, _ = c10d._compute_bucket_assignment_by_size(list(tensors), limits, dense)
    else:
        buckets, _ = c10d._compute_bucket_assignment_by_size(list(tensors), limits, dense, list(indices))
    return [list(bucket) for bucket in buckets]


Store: Any = c10d.Store  # through which the members of a group find each other
LOOPBACK = "127.0.0.1"


def file_store(path: Path, size: int, timeout: timedelta) -> Any:
    """For members that share a file system."""
    store = c10d.FileStore(str(path), size)
    store.set_timeout(timeout)
    return store


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, threads: int, host: str = LOOPBACK) -> Any:
    """A gloo process group that listens at one address, outside torch's registry of groups."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = timeout
    options._threads = threads
    return gloo(store, rank, size, options)


def call_after_backward(function: Callable[[], None]) -> None:
    """Runs `function` when the backward pass in progress has ended, before backward() returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def step_without_hooks(optimizer: Optimizer) -> None:
    """One update as its class makes it. torch runs hooks for all optimizers around it, which are the user's: they must
    not see updates that are none of his, and may write to gradients that are not ours."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module), or by module.compile()."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def watch_compiled_calls(module: nn.Module, saw: Callable[[Any, Any, Any], None]) -> bool:
    """Tells of arguments, keywords and output of a module that was compiled by `module.compile()`; False for others."""
    compiled: Any = module._compiled_call_impl
    if compiled is None:
        return False

    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        saw(args, kwargs, output)
        return output

    module._compiled_call_impl = call
    return True


def numpy_seed_of_data_worker(base_seed: int, worker: int) -> Any:
    """What a DataLoader worker process seeds NumPy with."""
    return _data_worker._generate_state(base_seed, worker)


def set_data_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> None:
    """What `torch.utils.data.get_worker_info()` answers in this process."""
    info = _data_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    _data_worker._worker_info = info
