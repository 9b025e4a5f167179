"""Quantised bases: packed weights and their side tables are sharded as they are, never cast.

The reference is one process that trains the same packed weights with bitsandbytes' own modules.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.errors import ConfigError
from tests.ranks import run_ranks, seeded

bnb = pytest.importorskip("bitsandbytes")

WIDTH, HIDDEN = 64, 128


def four_bits(ins: int, outs: int, **options: Any) -> nn.Module:
    """A 4-bit Linear that does not pack its weights anew for an evaluation on this CPU."""
    made = bnb.nn.Linear4bit(
        ins, outs, bias=False, compute_dtype=torch.float32, **({"quant_type": "nf4"} | options)
    )
    made.support_avx512bf16_for_cpu = False
    return made


def eight_bits(ins: int, outs: int, **options: Any) -> nn.Module:
    return bnb.nn.Linear8bitLt(ins, outs, bias=False, has_fp16_weights=False, **options)


LINEARS = {
    "nf4": four_bits,
    "nf4, tables not nested": partial(four_bits, compress_statistics=False),
    "fp4": partial(four_bits, quant_type="fp4"),
    "nf4 in bfloat16": partial(four_bits, quant_storage=torch.bfloat16),
    "nf4 in float32": partial(four_bits, quant_storage=torch.float32),
    "int8": eight_bits,
    "int8, outliers": partial(eight_bits, threshold=6.0),
}


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter, as PEFT adds one."""

    def __init__(self, base: nn.Module, ins: int, outs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(ins, 4, bias=False), nn.Linear(4, outs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapted(linear(WIDTH, HIDDEN), WIDTH, HIDDEN)
        self.down = Adapted(linear(HIDDEN, WIDTH), HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, kind: str, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(LINEARS[kind]) for _ in range(2))
        self.head = LINEARS[kind](WIDTH, 32)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def quantised(kind: str, recompute: bool = False) -> nn.Module:
    return seeded(lambda: Model(kind, recompute).to("cpu"))  # bitsandbytes quantises here


def adapters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def batch(index: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def train(module: nn.Module, optimizer: Any, *, steps: int = 3, accumulate: int = 1) -> list[float]:
    """Losses of some steps, each followed by that of an evaluation."""
    losses: list[float] = []
    for step in range(steps):
        for micro in range(accumulate):
            waits = micro + 1 < accumulate and onefold_shards(module)
            with onefold.accumulate(module) if waits else nullcontext():
                loss = module(batch(step * accumulate + micro)).square().mean()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            losses.append(module(batch(-1 - step)).square().mean().item())
        module.train()
    return losses


def onefold_shards(module: nn.Module) -> bool:
    return "_onefold_engine" in vars(module)


def weights_of(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in adapters(module)]


def run_plain(kind: str, **options: Any) -> tuple[list[float], list[Tensor]]:
    module = quantised(kind)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2, fused=True)
    losses = train(module, optimizer, **options)
    return losses, weights_of(module)


def run_sharded(
    rank: int, kind: str, *, recompute: bool = False, choices: Any = None, **options: Any
) -> tuple[list[float], list[Tensor], onefold.Report]:
    module = quantised(kind, recompute)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
    onefold.shard(module, optimizer, **(choices or {}))
    losses = train(module, optimizer, **options)
    with onefold.unsharded(module):
        weights = weights_of(module)
    return losses, weights, onefold.report(module)


def assert_same_bits(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", LINEARS)
def test_a_quantised_base_trains_with_the_bits_of_one_process(kind):
    wanted = run_plain(kind)
    for world_size, stage in [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]:
        for found in run_ranks(world_size, partial(run_sharded, kind=kind, choices={"stage": stage})):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", ["nf4", "nf4 in bfloat16", "int8"])
def test_every_tier_and_recompute_keep_the_bits(kind, tmp_path):
    wanted = run_plain(kind)
    for offload in ("optimizer", "cpu", f"disk:{tmp_path}"):
        choices = {"stage": 3, "offload": offload}
        run = partial(run_sharded, kind=kind, choices=choices, recompute=offload == "cpu")
        for found in run_ranks(2, run):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_accumulation_over_three_ranks_agrees_with_one_process(kind):
    wanted, _ = run_plain(kind, accumulate=2)
    found = {
        stage: run_ranks(
            3, partial(run_sharded, kind=kind, choices={"stage": stage}, accumulate=2)
        )[1]
        for stage in (1, 3)
    }
    for losses, _, _ in found.values():
        assert losses == pytest.approx(wanted, rel=1e-5)
