"""Training on the simulated device, to be compared with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import onefold
from tests.support.models import Block, Model
from tests.support.ranks import seeded
from tests.support.training import Job, Result, cut


class Recomputing(Model):
    """Blocks that keep nothing for backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Spared(Model):
    """Blocks with a parameter that no rank uses, and one that some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SparedBlock() for _ in range(2))


class SparedBlock(Block):
    uses_rare = False

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.rare = (nn.Parameter(torch.zeros(16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.rare if self.uses_rare else x)


def device() -> torch.device:
    """This rank's device."""
    return torch.device("sim", torch.accelerator.current_device_index())


def train_sim(
    rank: int,
    job: Job,
    world_size: int,
    stage: int,
    around: Callable[[nn.Module], Any] | None = None,
) -> Result:
    """The job on one of the ranks; `around` makes the context of a step."""
    module = seeded(job.build)
    optimizer = job.optimizer(module.parameters())
    options = dict(job.options)
    if "mesh" in options:  # its shape
        options["mesh"] = init_device_mesh("sim", options["mesh"], mesh_dim_names=("node", "rank"))
    onefold.shard(module, optimizer, stage=stage, **options)
    losses = []
    for batch in list(map(on_device, job.batches)):  # beforehand: the host waits for such copies
        with nullcontext() if around is None else around(module):
            losses.append(step(module, optimizer, job, batch, rank, world_size))
    with onefold.unsharded(module):
        weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
    return Result(torch.stack(losses).cpu(), weights)


def step(
    module: nn.Module, optimizer: Any, job: Job, batch: Any, rank: int, world_size: int
) -> Tensor:
    """One step; the mean loss of all ranks, on the device."""
    total = torch.zeros((), device=device())
    micros = cut(batch, job.accumulate)
    for index, micro in enumerate(micros):
        with onefold.accumulate(module) if index + 1 < len(micros) else nullcontext():
            loss = job.loss(module, cut(micro, world_size)[rank]) / job.accumulate
            loss.backward()
        total += loss.detach().float()
    if job.clip is not None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.clip)
    optimizer.step()
    optimizer.zero_grad()
    if world_size > 1:
        dist.all_reduce(total)
    return total / world_size


def on_device(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device())
    return tuple(map(on_device, batch))
