"""One training loop for all tests: plain in one process, or sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.support.ranks import run_ranks, seeded

RELATIVE = 1e-6
"""Law 1: agreement with one process per step, where the order of sums differs."""


@dataclass
class Job:
    """What to train: a module, an optimizer, global batches, a loss."""

    build: Callable[[], nn.Module]
    batches: Sequence[Any]  # per step: tensors or tuples, cut along dim 0 by rank
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    clip: float | None = None
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """Losses (global mean) and final weights of a run."""

    losses: Tensor
    weights: dict[str, Tensor]


def train_plain(job: Job) -> Result:
    """The job in one process, without Onefold."""
    module = seeded(job.build)
    optimizer = job.optimizer(module.parameters())
    losses = [_step(module, optimizer, job, batch, 0, 1, False) for batch in job.batches]
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Result(torch.stack(losses), weights)


def train_sharded(rank: int, job: Job, world_size: int, stage: int) -> Result:
    """The job on one of `world_size` ranks; call it inside `run_ranks`."""
    module = seeded(job.build)
    optimizer = job.optimizer(module.parameters())
    onefold.shard(module, optimizer, stage=stage, **job.options)
    losses = []
    for batch in job.batches:
        loss = _step(module, optimizer, job, batch, rank, world_size, True)
        if world_size > 1:
            dist.all_reduce(loss)
        losses.append(loss / world_size)
    with onefold.unsharded(module):
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Result(torch.stack(losses), weights)


def run_job(job: Job, world_size: int, stage: int) -> Result:
    """The job at a stage and world size: rank 0's result, which all ranks must share."""
    results = run_ranks(world_size, train_sharded, job, world_size, stage)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    return results[0]


def _step(
    module: nn.Module, optimizer: Any, job: Job, batch: Any, rank: int, world: int, sharded: bool
) -> Tensor:
    total = torch.zeros(())
    micros = cut(batch, job.accumulate)
    for index, micro in enumerate(micros):
        waits = sharded and index + 1 < len(micros)
        with onefold.accumulate(module) if waits else nullcontext():
            loss = job.loss(module, cut(micro, world)[rank]) / job.accumulate
            loss.backward()
        total += loss.detach().float()
    if job.clip is not None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def cut(batch: Any, parts: int) -> list[Any]:
    """A batch in equal parts along dim 0 of each tensor."""
    if isinstance(batch, Tensor):
        assert len(batch) % parts == 0, "test batches divide by the world size"
        return list(batch.chunk(parts))
    columns = [cut(tensor, parts) for tensor in batch]
    return list(zip(*columns, strict=True))


def assert_same_bits(got: Result, wanted: Result) -> None:
    """Losses and every weight are equal bit for bit."""
    assert torch.equal(got.losses, wanted.losses), (got.losses, wanted.losses)
    assert got.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(got.weights[name], weight), name


def assert_close(got: Result, wanted: Result, relative: float = RELATIVE) -> None:
    """Losses agree to `relative` per step, weights to what that many steps can add up to."""
    steps = len(wanted.losses)
    torch.testing.assert_close(got.losses, wanted.losses, rtol=relative * steps, atol=0)
    assert got.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        scale = weight.abs().max().clamp_min(1e-3).item() if weight.numel() else 1.0
        torch.testing.assert_close(
            got.weights[name], weight, rtol=0, atol=20 * relative * steps * scale, msg=name
        )
