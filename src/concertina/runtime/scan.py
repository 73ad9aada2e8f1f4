"""Refusals at prepare(): what in a model cannot work on virtual workers, found before it gives wrong numbers.

Virtual workers of one worker run one after another, so nothing inside the model may wait for another rank.
"""

import gc
import types
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from concertina.core.errors import UnsupportedScript, UsageError

COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "broadcast", "reduce_scatter", "reduce_scatter_tensor", "barrier", "batch_isend_irecv",
})  # fmt: skip


def check_model(model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedScript("prepare() takes the plain model: remove the DistributedDataParallel wrapper")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient: there is nothing to train")
    if dist.is_available() and dist.is_initialized():
        raise UnsupportedScript(
            "the script called torch.distributed.init_process_group: virtual workers share a process, so remove it and "
            "use session.rank and session.size"
        )
    for name, module in model.named_modules():
        _check_module(name or type(model).__name__, module)


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise UnsupportedScript(
            f"{name} is a SyncBatchNorm, which waits for all ranks inside the forward; use BatchNorm, or GroupNorm"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise UnsupportedScript(f"{name} has sparse gradients; make it with sparse=False")
    for attribute, value in vars(module).items():
        if isinstance(value, dist.ProcessGroup):
            raise UnsupportedScript(
                f"{name}.{attribute} is a process group: the model cannot talk to other ranks itself"
            )
    collective = _collective_called_by(type(module))
    if collective:
        raise UnsupportedScript(
            f"{name} ({type(module).__name__}) calls torch.distributed.{collective} while it computes: the virtual "
            "workers of one process run one after another and cannot wait for each other"
        )


def _collective_called_by(kind: type[nn.Module]) -> str | None:
    if kind.__module__.partition(".")[0] == "torch":
        return None
    for value in vars(kind).values():
        function = getattr(value, "__wrapped__", value)
        if isinstance(function, types.FunctionType):
            for name in _distributed_names(function):
                return name
    return None


def _distributed_names(function: types.FunctionType) -> Iterator[str]:
    """Collectives that the function's code names, if it also refers to torch.distributed."""
    names = _all_names(function.__code__)
    refers = "distributed" in names or any(function.__globals__.get(n) is dist for n in names)
    for name in sorted(names & COLLECTIVES):
        if refers or getattr(function.__globals__.get(name), "__module__", "").startswith("torch.distributed"):
            yield name


def _all_names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_all_names(c) for c in inner))


def check_nothing_forgotten(model: nn.Module, optimizers: list[Optimizer], schedulers: list[LRScheduler]) -> None:
    """Optimizers and schedulers that act on the model but were not given to prepare(); looks at all living objects."""
    ours = {id(p) for p in model.parameters()}
    inner = [part for scheduler in schedulers for part in getattr(scheduler, "_schedulers", ())]  # SequentialLR's
    known = {id(thing) for thing in (*optimizers, *schedulers, *inner)}
    for thing in gc.get_objects():
        kind = type(thing)
        if id(thing) in known or not issubclass(kind, Optimizer | LRScheduler):
            continue
        optimizer = thing.optimizer if issubclass(kind, LRScheduler) else thing
        held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        if held & ours:
            raise UnsupportedScript(
                f"{kind.__name__} acts on the prepared model but was not given to prepare(): it would step once per "
                "virtual worker, and a change of workers would lose its state. Give it to prepare() with the model"
            )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    ours = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in ours]
    if foreign:
        raise UsageError(
            f"{type(optimizer).__name__} holds {len(foreign)} parameters that are not the prepared model's: build the "
            "optimizer after the model is on its device, and prepare them together"
        )
