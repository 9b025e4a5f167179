"""A small mixture of experts for tests, plain or spread over an expert axis, and its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onefold
from tests.support.ranks import run_ranks, seeded

WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 12, 7, 2  # cut into 4 and 3, or 3, 3 and 1, or 2, 2, 2 and 1


class StackedExperts(nn.Module):
    """Experts as transformers stacks them: a row of every parameter for each."""

    def __init__(
        self, num_experts: int = EXPERTS, width: int = WIDTH, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden, width) / 3)
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, hidden) / 3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            rows, choice = torch.where(top_k_index == expert)
            if len(rows) == 0:
                continue
            gate, up = F.linear(hidden_states[rows], self.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            found = found.index_add(0, rows, made * top_k_weights[rows, choice, None])
        return found


class Expert(nn.Module):
    """One of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Doubled(nn.Linear):
    """A layer of the same parameters that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ListedExperts(nn.ModuleList):
    """A list of experts, with the call of stacked ones."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rows, choice = torch.where(top_k_index == number)
            made = expert(hidden_states[rows]) * top_k_weights[rows, choice, None]
            found = found.index_add(0, rows, made)
        return found


class MoeBlock(nn.Module):
    """Norm, router, experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Tensor, logits: list[Tensor]) -> Tensor:
        x = self.norm(x)
        logits.append(self.router(x))
        weights, index = logits[-1].softmax(-1).topk(CHOICES, -1)
        return x + self.experts(x, index, weights)


class MoeModel(nn.Module):
    """Two blocks between two Linears."""

    def __init__(self, is_listed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            MoeBlock(
                ListedExperts(Expert() for _ in range(EXPERTS)) if is_listed else StackedExperts()
            )
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, logits = self.first(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, logits)
        return self.last(x), logits


def build(dtype: torch.dtype = torch.float64, is_listed: bool = False) -> MoeModel:
    with torch.no_grad():
        return seeded(MoeModel, is_listed).to(dtype)


def rows_of(
    rank: int, world_size: int, step: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Tokens of a rank: unequal numbers, and none on the last of several ranks in step 0."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = 0 if rank == world_size - 1 and step == 0 else 3 + 2 * rank + step % 2
    rows = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return (rows + 1.5).to(dtype)  # a mean that leaves some experts without tokens


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    out, _ = model(rows)
    return out.square().sum() / max(1, len(rows))


@dataclass(frozen=True)
class Axis:
    """`replicas` x `experts` ranks, a stage, and steps to train."""

    replicas: int
    experts: int
    stage: int = 3
    steps: int = 0
    is_listed: bool = False
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.replicas * self.experts


def sharded(axis: Axis, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on this rank, its experts spread; call it inside ranks."""
    mesh = init_device_mesh(
        device, (axis.replicas, axis.experts), mesh_dim_names=("replica", "expert")
    )
    model = build(axis.dtype, axis.is_listed)
    if axis.is_listed:
        experts = spread(model, mesh["expert"])
    else:
        experts = onefold.experts.distribute(model, mesh["expert"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units = dict.fromkeys(experts, mesh["replica"])
    onefold.shard(model, optimizer, stage=axis.stage, units=units, **axis.options)
    return model, optimizer


def spread(model: nn.Module, mesh: Any) -> list[nn.Module]:
    """Put the listed experts of a model on an axis, or stack them for every rank (None)."""
    for block in model.blocks:
        block.experts = onefold.experts.ExpertParallel(block.experts, mesh)
    return [block.experts for block in model.blocks]


def whole(value: Tensor) -> Tensor:
    """All experts, from the ranks that have some. A collective."""
    full = getattr(value, "full_tensor", None)
    return full() if full else value.clone()


def gradients(rank: int, axis: Axis) -> dict[str, Tensor]:
    """Unsharded gradients of one backward on all ranks."""
    model, _ = sharded(axis)
    loss_of(model, rows_of(rank, axis.world_size, dtype=axis.dtype)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = whole(parameter.grad)
    return found


def plain_gradients(axis: Axis) -> dict[str, Tensor]:
    """Of one process with all experts: the mean over ranks of their losses."""
    model = build(axis.dtype, axis.is_listed)
    for rank in range(axis.world_size):
        (
            loss_of(model, rows_of(rank, axis.world_size, dtype=axis.dtype)) / axis.world_size
        ).backward()
    return stacked({n: p.grad for n, p in model.named_parameters()})


def stacked(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of listed experts under the names of stacked ones."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        before, mark, rest = name.partition(".experts.")
        number, _, tail = rest.partition(".")
        if mark and number.isdigit():
            found.setdefault(f"{before}.experts.stacked.{tail}", []).append(value)
        else:
            found[name] = value
    return {n: torch.stack(v) if isinstance(v, list) else v for n, v in found.items()}


def weights_after(rank: int, axis: Axis) -> dict[str, Tensor]:
    """Unsharded weights after some AdamW steps."""
    model, optimizer = sharded(axis)
    for step in range(axis.steps):
        loss_of(model, rows_of(rank, axis.world_size, step, axis.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with onefold.unsharded(model):
        return {name: whole(p.detach()) for name, p in model.named_parameters()}


def plain_weights_after(axis: Axis) -> dict[str, Tensor]:
    """Of one process with all experts."""
    model = build(axis.dtype, axis.is_listed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(axis.steps):
        for rank in range(axis.world_size):
            rows = rows_of(rank, axis.world_size, step, axis.dtype)
            (loss_of(model, rows) / axis.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stacked({n: p.detach() for n, p in model.named_parameters()})


def run(axis: Axis, body: Any) -> dict[str, Tensor]:
    """Rank 0's result, which all ranks must share."""
    results = run_ranks(axis.world_size, body, axis)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(other[name], value), name
    return results[0]


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest value of each."""
    assert found.keys() == wanted.keys()
    errors = [
        (found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-30) for n in wanted
    ]
    return torch.stack(errors).max().item()
