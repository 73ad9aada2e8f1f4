"""A cheap fingerprint of the parameters, compared between workers now and then.

Each parameter contributes a sample of its bit patterns, spread over its memory; samples are summed per bucket as
integers, so that equal replicas give equal numbers and a divergence is located to a bucket. Parameters that are not
trained, which a script may change itself, come last, together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concertina.runtime.buckets import BucketLayout, is_dense

SAMPLES = 128  # elements per parameter
REFRESH_EVERY = 256  # steps after which the samples are laid anew, should a script have replaced a parameter's memory

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_pattern(tensor: Tensor) -> Tensor:
    """The same memory seen as integers, so that comparisons see every bit, the sign of zero too."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(BITS[plain.element_size()]) if plain.is_floating_point() else plain


def sample(param: Tensor) -> Tensor:
    memory = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
    return bit_pattern(memory[:: max(1, param.numel() // SAMPLES)])


class ParameterDigest:
    """Fingerprints by bucket."""

    def __init__(self, layout: BucketLayout, frozen: Sequence[Tensor] = ()) -> None:
        self._layout = layout
        device = layout.params[0].device
        self._frozen = [p for p in frozen if p.layout is torch.strided and is_dense(p) and p.device == device]
        self._samples: list[list[Any]] = []  # by bucket: as NumPy's if they are in host memory, else as torch's
        self._in_host = False
        self._buckets: list[list[int]] | None = None
        self._uses = 0

    def compute(self) -> list[int]:
        if self._uses % REFRESH_EVERY == 0 or self._buckets is not self._layout.buckets:
            self._buckets = self._layout.buckets
            self._lay_samples(self._layout.buckets)
        self._uses += 1
        if self._in_host:  # with warm caches a fifth of the time that torch takes to set about it
            return [int(np.concatenate(parts).sum(dtype=np.int64)) for parts in self._samples]
        sums = [torch.cat(parts).sum(dtype=torch.int64) for parts in self._samples]
        return [int(value) for value in torch.stack(sums).tolist()] if sums else []

    def _lay_samples(self, buckets: list[list[int]]) -> None:
        params = self._layout.params
        self._samples = [[sample(params[i]) for i in bucket] for bucket in buckets]
        if self._frozen:
            self._samples.append([sample(param) for param in self._frozen])
        self._in_host = all(param.device.type == "cpu" for param in params)
        if self._in_host:
            self._samples = [[part.numpy() for part in parts] for parts in self._samples]
