"""What is trained: the sizes, one case of the comparison, its model and its data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onefold.planner.models.gpt import GPT, VOCAB, GPTConfig

MALLOC = {"default": {}, "mmap": {"MALLOC_MMAP_THRESHOLD_": "1048576"}}
"""Environment of the ranks: glibc as it is, and giving every freed block of 1 MiB back at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT and the rows it reads per rank and micro-batch."""

    num_layers: int
    width: int
    num_heads: int
    rows: int
    positions: int
    steps: int  # measured, after the warm-up

    @property
    def config(self) -> GPTConfig:
        """The shape of the model."""
        return GPTConfig(self.num_layers, self.width, self.num_heads, lr=3e-4)


SIZES = {
    "tiny": Size(4, 256, 8, rows=4, positions=128, steps=20),  # 3 M parameters
    "small": Size(8, 768, 12, rows=4, positions=128, steps=4),  # 57 M
    "medium": Size(8, 384, 6, rows=8, positions=128, steps=4),  # 14 M
    "wide": Size(2, 1536, 12, rows=4, positions=128, steps=4),  # 57 M in few large layers
    "deep": Size(48, 256, 8, rows=4, positions=128, steps=4),  # 38 M in many small layers
    "large": Size(24, 1024, 16, rows=4, positions=512, steps=10),  # 302 M, for a GPU
    "1.3b": Size(24, 2048, 16, rows=8, positions=1024, steps=3),  # and these, with offloading
    "2.7b": Size(32, 2560, 20, rows=8, positions=1024, steps=3),
    "7b": Size(32, 4096, 32, rows=4, positions=1024, steps=2),
}
WARMUP_STEPS = 2
WIDE = 1024
"""Of models that no CPU is compared with."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the comparison: everything that all engines have in common."""

    size: str = "small"
    ranks: int = 2
    dtype: str = "fp32"
    accumulate: int = 1
    recompute: bool = False
    malloc: str = "default"
    threads: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    steps: int = 0  # measured; 0: as many as the size says
    compiled: bool = False  # every block by torch.compile, in the warm-up

    @property
    def name(self) -> str:
        """A short name in which only what departs from the ordinary is said."""
        parts = [self.size, f"{self.ranks} rank{'s' * (self.ranks > 1)}", self.dtype]
        parts += [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        parts += ["recompute"] * self.recompute
        parts += [f"malloc {self.malloc}"] * (self.malloc != "default")
        parts += ["compiled"] * self.compiled
        parts += [self.device] * (self.device != "cpu")
        return ", ".join(parts)

    @property
    def shape(self) -> Size:
        """The model and its rows."""
        return SIZES[self.size]

    @property
    def num_steps(self) -> int:
        """Steps in the measured window."""
        return self.steps or self.shape.steps

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class Recomputed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def build_model(case: Case) -> GPT:
    """The same weights for every engine and on every rank. A GPU draws its own: it is minutes."""
    torch.manual_seed(0)
    with torch.device(case.device if case.shape.width >= WIDE else "cpu"):
        model = GPT(case.shape.config, case.shape.positions)
    if case.recompute:
        model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    return model.to(case.device)


def touch_libraries(case: Case) -> None:
    """Run a model of one tiny layer: pages of code that every engine needs count as imports."""
    size = replace(case.shape, num_layers=1, width=64, num_heads=4)
    model = GPT(size.config, 16).to(case.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=case.device)
    with torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bf16"):
        loss_of(model(tokens), tokens).backward()
    optimizer.step()


def batches(case: Case, rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one rank and step: tokens and their successors, int64 [rows, T].

    Each row walks through the bytes in steps of its own, so there is something to learn.
    """
    generator = torch.Generator().manual_seed(1 + rank + 1000 * step)
    size = case.shape
    found = []
    for _ in range(case.accumulate):
        strides = torch.randint(1, 4, (size.rows, size.positions + 1), generator=generator)
        rows = strides.cumsum(1).remainder(VOCAB).to(case.device)
        found.append((rows[:, :-1], rows[:, 1:]))
    return found


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
