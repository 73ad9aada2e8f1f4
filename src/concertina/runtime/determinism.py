"""Determinism levels, after EasyScale section 3.3.

D0  the same job on the same workers repeats itself: fixed seeds, deterministic kernels
D1  the result does not depend on the number of workers either: DDP's order of sums, virtual workers' own contexts
D2  nor on the GPU model: only kernels whose order of operations does not depend on the hardware

D0 and D1 cost the same here, since virtual workers always keep their contexts and their order; D0 leaves the choice
of kernels to torch's defaults.
"""

import os
from dataclasses import dataclass

import torch
from torch import nn

# Modules whose GPU kernels cuDNN picks by architecture, so that their sums differ between GPU models.
VENDOR_TUNED = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.RNNBase, nn.MultiheadAttention, nn.Linear, nn.Bilinear,
)  # fmt: skip


def apply_level(level: str) -> None:
    """Sets torch's switches for `level` in this process."""
    if level == "D0":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # Filling fresh tensors costs up to a quarter of a step and changes nothing for code that writes before it reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if level == "D2":
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(True)


@dataclass(frozen=True, slots=True)
class MixVerdict:
    """Whether a model may train on different GPU models at once with the same bits, and why."""

    may_mix: bool
    reason: str


def may_mix_gpus(model: nn.Module) -> MixVerdict:
    """Scans the modules, as EasyScale's D2 scan does: vendor-tuned kernels tie a model to one GPU type."""
    tied: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, VENDOR_TUNED):
            tied.setdefault(type(module).__name__, name or "the model itself")
    if not tied:
        return MixVerdict(True, "no module uses kernels that the vendor tunes per GPU model")
    first = ", ".join(f"{kind} ({name})" for kind, name in sorted(tied.items())[:4])
    return MixVerdict(False, f"it uses kernels that the vendor tunes per GPU model: {first}")
