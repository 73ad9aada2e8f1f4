"""Training jobs that the DDP reference and the elastic run share, to the line."""

import contextlib
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Images(torch.utils.data.Dataset):
    """Random images; every sample is augmented with Python's, NumPy's and torch's generators."""

    def __init__(self, n: int = 150) -> None:
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 3, 8, 8, generator=g)
        self.y = torch.randint(0, 10, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[i]
        if random.random() < 0.5:
            x = x.flip(-1)
        x = torch.roll(x, int(np.random.randint(-2, 3)), -1) + 0.1 * torch.randn(x.shape)
        return x + 0.01 * float(np.random.randn()), self.y[i]


class Tokens(torch.utils.data.Dataset):
    def __init__(self, n: int = 150, length: int = 9, vocabulary: int = 53) -> None:
        g = torch.Generator().manual_seed(8)
        self.x = torch.randint(0, vocabulary, (n, length + 1), generator=g)
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.x[i].clone()
        z[random.randrange(len(z))] = int(np.random.randint(self.vocabulary))
        if torch.rand(()) < 0.3:
            z = z.flip(0)
        return z[:-1], z[1:]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 48), nn.GELU(),
            nn.Dropout(0.2), nn.Linear(48, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Cnn(nn.Module):
    """BatchNorm, a residual, and the head registered first, so that parameter order is not ready order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 10)
        self.c1, self.b1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 24, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(24)
        self.c3, self.b3 = nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        x = F.relu(x + self.b3(self.c3(x)))
        return self.head(self.drop(x.mean((2, 3))))


class TinyLm(nn.Module):
    """A transformer whose output weights are its embedding."""

    def __init__(self, vocabulary: int = 53, width: int = 32, length: int = 9) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.pos
        for layer in self.layers:
            x = layer(x, src_mask=self.mask.to(x.dtype))
        return self.head(self.norm(x))


class Lstm(nn.Module):
    def __init__(self, vocabulary: int = 53, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(x))[0])


class Branchy(nn.Module):
    """Which branch is used depends on the data, and one part is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.a, self.b = nn.Linear(192, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.never, self.o = nn.Linear(8, 8), nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.i(x.flatten(1)))
        x = self.a(x) if float(x.sum()) % 1 < 0.5 else self.b(x)
        return self.o(F.relu(x))


class HalfUsed(Branchy):
    """The same part is unused at every step, as static_graph demands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(F.relu(self.a(F.relu(self.i(x.flatten(1))))))


class ResNet18(nn.Module):
    """torchvision's, for GPUs."""

    def __init__(self) -> None:
        super().__init__()
        import torchvision

        self.net = torchvision.models.resnet18(num_classes=10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(F.interpolate(x, scale_factor=8.0))


class Replacing(nn.Module):
    """Replaces its buffer instead of changing it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.register_buffer("mean", torch.zeros(192))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls = self.calls + 1
        return self.fc(x - self.mean)


MODELS = {
    "mlp": (Mlp, Images), "cnn": (Cnn, Images), "lm": (TinyLm, Tokens), "lstm": (Lstm, Tokens),
    "branchy": (Branchy, Images), "halfused": (HalfUsed, Images), "replacing": (Replacing, Images),
    "resnet18": (ResNet18, Images),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One job; every field changes what is computed."""

    name: str
    model: str = "lm"
    opt: str = "adamw"
    steps: int = 12
    batch: int = 4
    num_workers: int = 0
    persistent: bool = False
    samples: int = 150
    drop_last: bool = True
    clip: float = 0.0
    accumulate: int = 1
    set_to_none: bool = True
    zero_first: bool = False
    zero_by_hand: bool = False
    channels_last: bool = False
    amp: bool = False
    scaler: bool = False
    dtype: str = "float32"
    freeze: str = ""
    groups: bool = False
    device: str = "cpu"
    fused: bool = False
    tf32: bool = False
    compiled: str = ""  # by this backend of torch.compile
    ddp: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_model(job: Job) -> nn.Module:
    torch.manual_seed(42)
    model = MODELS[job.model][0]().to(job.device, getattr(torch, job.dtype))
    if job.channels_last:
        model = model.to(memory_format=torch.channels_last)
    for name, p in model.named_parameters():
        if job.freeze and job.freeze in name:
            p.requires_grad_(False)
    if job.compiled:
        model.compile(backend=job.compiled)
    return model


def set_flags(job: Job) -> None:
    """What the elastic run gets from its determinism level and the script; the reference sets it by hand."""
    if job.device == "cuda":
        from concertina.runtime.determinism import apply_level

        apply_level("D1")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job.tf32


def make_dataset(job: Job) -> torch.utils.data.Dataset:
    return MODELS[job.model][1](job.samples)


def make_optimizer(job: Job, model: nn.Module) -> tuple[Any, Any]:
    params: Any = list(model.parameters())
    if job.groups:
        params = [{"params": params[::2], "lr": 1e-3}, {"params": params[1::2], "weight_decay": 0.0}]
    if job.opt == "sgd":
        opt: Any = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    else:
        opt = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01, fused=job.fused or None)
    return opt, torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05 if job.opt == "sgd" else 5e-3, total_steps=200)


def make_scaler(job: Job) -> Any:
    # A scale this large overflows bfloat16-free float32 sums now and then, so that steps are skipped too.
    return torch.amp.GradScaler(job.device, init_scale=2.0**126, growth_interval=3, enabled=job.scaler)


def loss_of(job: Job, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = (t.to(job.device) for t in batch)
    if x.is_floating_point():
        x = x.to(getattr(torch, job.dtype))
    if job.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(job.device, torch.bfloat16, enabled=job.amp):
        out = model(x)
    out = out if job.dtype == "float64" else out.float()
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def body(job: Job, model: Any, opt: Any, sched: Any, scaler: Any, batch: Any, index: int, no_sync: Any) -> torch.Tensor:
    """What happens with one batch, on a DDP rank and on a virtual worker alike."""
    sync = (index + 1) % job.accumulate == 0
    if job.zero_first and index % job.accumulate == 0:
        opt.zero_grad(set_to_none=job.set_to_none)
    with contextlib.nullcontext() if sync else no_sync():
        loss = loss_of(job, model, batch) / job.accumulate
        scaler.scale(loss).backward()
    if sync:
        if job.clip:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if not job.zero_first:
            if job.zero_by_hand:
                for p in model.parameters():
                    p.grad = None
            else:
                opt.zero_grad(set_to_none=job.set_to_none)
    return loss.detach()


def seed_rank(rank: int) -> None:
    seed = 1234 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
