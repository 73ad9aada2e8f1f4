"""What besides the script decides the bits: versions, threads, instruction sets, flags, GPU model.

The record goes into every checkpoint, and the workers of a generation compare theirs before they train.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.optim import Optimizer

from concertina.core.errors import EnvironmentMismatch

Record = dict[str, str]

KERNEL_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
GPU_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")


def record(optimizers: Sequence[Optimizer] = (), on_gpu: bool = False) -> Record:
    """One line per thing that changes results, in words that make sense in an error message."""
    found = {
        "torch version": torch.__version__,
        "NumPy version": np.__version__,
        "torch threads": str(torch.get_num_threads()),
        "CPU instruction set": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    found |= {f"environment variable {name}": os.environ.get(name, "unset") for name in KERNEL_VARIABLES}
    for i, optimizer in enumerate(optimizers):
        kind = {k: optimizer.defaults[k] for k in ("foreach", "fused") if k in optimizer.defaults}
        found[f"optimizer {i}"] = f"{type(optimizer).__name__} {kind}"
    if on_gpu:
        found |= {
            "GPU model": torch.cuda.get_device_name(),
            "CUDA version": str(torch.version.cuda),
            "cuDNN version": str(torch.backends.cudnn.version()),
            "cuDNN benchmark": str(torch.backends.cudnn.benchmark),
            "cuDNN deterministic": str(torch.backends.cudnn.deterministic),
            "cuDNN TF32": str(torch.backends.cudnn.allow_tf32),
        }
        found |= {f"environment variable {name}": os.environ.get(name, "unset") for name in GPU_VARIABLES}
    return found


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Sentences, one per difference."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name} is {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there" for name in names]


def require_same(ours: Mapping[str, str], theirs: Mapping[str, str], who: str, mixed_gpus: bool = False) -> None:
    """Raises unless both records promise the same bits; with D2, the GPU model alone may differ."""
    skip = {"GPU model"} if mixed_gpus else set()
    found = differences(
        {k: v for k, v in ours.items() if k not in skip}, {k: v for k, v in theirs.items() if k not in skip}
    )
    if found:
        raise EnvironmentMismatch(
            f"{who} would compute other bits: {'; '.join(found)}. Make the two alike and start again"
        )
