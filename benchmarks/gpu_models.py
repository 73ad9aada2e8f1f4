"""The two models of the GPU benchmark, with ready-made batches that live on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gpt(nn.Module):
    """A decoder of about 110 million parameters with dropout and tied embeddings."""

    def __init__(self, vocabulary: int = 32000, width: int = 768, heads: int = 12, depth: int = 12, length: int = 512):
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(self.embed(x) + self.position.weight[: x.shape[1]], 0.1, self.training)
        for block in self.blocks:
            z = block(z)
        return self.norm(z) @ self.embed.weight.t()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, z: Tensor) -> Tensor:
        b, t, _ = z.shape
        q, k, v = self.qkv(self.norm1(z)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        z = z + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, -1)), 0.1, self.training)
        return z + F.dropout(self.down(F.gelu(self.up(self.norm2(z)))), 0.1, self.training)


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer and four batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    batch_size: int
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def make(name: str, device: torch.device) -> Workload:
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(1)
    if name == "resnet50":
        return _resnet50(device, generator, bf16=False)
    if name == "resnet50-bf16":
        return _resnet50(device, generator, bf16=True)
    return _gpt(device, generator)


def _resnet50(device: torch.device, generator: torch.Generator, bf16: bool) -> Workload:
    import torchvision

    model: Any = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    batches = [
        (
            torch.randn(32, 3, 224, 224, device=device, generator=generator).contiguous(
                memory_format=torch.channels_last
            ),
            torch.randint(0, 1000, (32,), device=device, generator=generator),
        )
        for _ in range(4)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, optimizer, batches, 32, _loss(bf16))


def _gpt(device: torch.device, generator: torch.Generator) -> Workload:
    model = Gpt().to(device)
    tokens = [torch.randint(0, 32000, (32, 513), device=device, generator=generator) for _ in range(4)]
    batches = [(z[:, :-1].contiguous(), z[:, 1:].contiguous()) for z in tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, batches, 32, _loss(bf16=True))


def _loss(bf16: bool) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            out = model(batch[0])
        return F.cross_entropy(out.float().flatten(0, -2), batch[1].flatten())

    return loss
