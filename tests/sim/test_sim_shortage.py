"""A device without memory: what its allocator says of other tensors is in the note."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.registry import engine_of
from onefold.tier import accelerator
from onefold.unit.shortage import explained
from tests.sim.ranks import run_sim
from tests.sim.training import device

MIB = 1 << 20


class Greedy(nn.Module):
    """Keeps one MiB, and then wants more than the device has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.others = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        kept = torch.empty(MIB, dtype=torch.uint8, device=x.device)
        usage = engine_of(self).ledger.usage
        held = sum(used.now for (_, tier), used in usage.items() if tier == "device")
        self.others = accelerator.allocated(x.device) - held
        return x + kept[0] + torch.empty(1 << 40, dtype=torch.uint8, device=x.device)[0]


def starve(rank: int) -> tuple[str, int]:
    module = Greedy().to(device())
    onefold.shard(module, torch.optim.AdamW(module.parameters()), stage=2)
    with pytest.raises(torch.OutOfMemoryError) as error:
        module(torch.full((2, 64), float(rank), device=device()))
    (note,) = error.value.__notes__
    return note, module.others


def test_the_note_of_a_device_counts_the_bytes_of_other_tensors_as_its_allocator_does():
    for rank, (note, others) in enumerate(run_sim(2, starve, memory=1 << 30)):
        assert note.startswith(f"onefold: out of memory on rank {rank} of 2, in forward\n")
        assert others >= MIB
        assert f"; other tensors, such as activations, {others:,} bytes\n" in note


class GreedyBackward(torch.autograd.Function):
    """The identity, whose backward wants more memory than the device has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.empty(1 << 40, dtype=torch.uint8, device=grad.device)[0]


def starve_in_backward(rank: int) -> tuple[str, str]:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device())
    onefold.shard(module, torch.optim.AdamW(module.parameters()), stage=3, units=list(module))
    x = module[0](torch.full((2, 64), float(rank), device=device()))
    loss, ledger = module[1](GreedyBackward.apply(x)).sum(), engine_of(module).ledger
    with pytest.raises(torch.OutOfMemoryError) as error, explained(ledger):
        loss.backward()
    return error.value.__notes__[0], ledger.describe()


def test_a_backward_that_fails_in_the_thread_of_a_device_is_explained_where_it_is_caught():
    found = run_sim(2, starve_in_backward, checks_races=False, memory=1 << 30)
    for rank, (note, held) in enumerate(found):
        first, second, _ = note.splitlines()
        assert first == f"onefold: out of memory on rank {rank} of 2, in backward of unit '1'"
        assert second.startswith(f"onefold holds, besides activations, {held}; other tensors")
