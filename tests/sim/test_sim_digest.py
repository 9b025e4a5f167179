"""The digest of a step on the simulated device, and what CPUs do in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold import Offload, TierError, WireError
from onefold.engine.registry import engine_of
from tests.sim import building
from tests.sim.ranks import run_sim
from tests.sim.training import device
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_processes, seeded

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


def small() -> Model:
    return Model(1)


def built(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Any]:
    module = seeded(build)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, **options)
    return module, optimizer


# a rank that fails


def break_disk(module: nn.Module) -> None:
    """This rank reads nothing from now on."""
    engine = engine_of(module)
    for unit in engine.units:
        unit.wait_step()
        unit.rows.give_back()
    for file in engine.context.tiers.weight.files:
        os.close(file.fd)
        file.fd = os.open(os.devnull, os.O_RDONLY)


def lose_a_disk(rank: int, folder: str, last: int, at: torch.device | None = None) -> str:
    """Rank 1's disk fails before step `last`: where that raises, and what."""
    offload = Offload(optimizer="disk", parameters="disk", disk=folder)
    module, optimizer = built(small, stage=3, offload=offload)
    tokens = token_batches()[0].to(at or device())
    for number in range(1, last + 1):
        if number == last and rank == 1:
            break_disk(module)
        place = "forward"
        try:
            loss = next_token_loss(module, tokens)
            loss.backward()
            place = "step"
            optimizer.step()
        except TierError as error:
            with pytest.raises(TierError):  # and it stays
                next_token_loss(module, tokens).backward()
                optimizer.step()
            return f"{number} {place} {error}"
        optimizer.zero_grad()
    return "no error"


def lose_it_on_cpu(rank: int, folder: str, last: int) -> None:
    said = lose_a_disk(rank, folder, last, torch.device("cpu"))
    assert said.startswith(f"{last} forward "), said
    assert "only 0 bytes" in said, said


STEPS = pytest.mark.parametrize("last", [1, 50])


@STEPS
def test_a_disk_that_fails_on_one_rank_is_named_on_all_before_the_optimizer_steps(last, tmp_path):
    told = run_sim(3 if last == 1 else 2, lose_a_disk, str(tmp_path), last)
    assert len(set(told)) == 1, told
    assert told[0].startswith(f"{last} step "), told
    assert "only 0 bytes" in told[0]


@STEPS
def test_on_cpus_a_disk_that_fails_is_named_on_all_ranks_where_they_gather(last, tmp_path):
    run_processes(2, lose_it_on_cpu, str(tmp_path), last)


# other units on each rank


class Twins(nn.Module):
    """Layers alike, some of which a rank may skip."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[::3] if self.skips else self.blocks:
            x = block(x)
        return x


def train_once(module: nn.Module, optimizer: Any) -> None:
    module(torch.ones(1, 4, device=device())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def mix_units(rank: int, folder: str, saves: bool) -> tuple[str, str, bool]:
    """What a step after other units on each rank raises, or a checkpoint, and what the next one."""
    module, optimizer = built(Twins, stage=3)
    for _ in range(3):
        train_once(module, optimizer)
    unit = engine_of(module).units[rank]
    unit.unshard()
    unit.reshard(release=True)
    said: list[str] = []
    for act in (
        lambda: onefold.save(folder, module, optimizer) if saves else train_once(module, optimizer),
        lambda: train_once(module, optimizer),
    ):
        try:
            act()
            said.append("")
        except WireError as error:
            said.append(str(error))
            optimizer.zero_grad()
    train_once(module, optimizer)  # nothing is left of it
    return said[0], said[1], os.path.exists(folder)


@pytest.mark.parametrize("saves", [False, True], ids=["step", "save"])
def test_units_that_mix_on_a_device_are_an_error_one_step_later_or_of_a_save(saves, tmp_path):
    """A device's host waits for no digest, unless it saves."""
    found = run_sim(2, mix_units, str(tmp_path / "checkpoint"), saves)
    for rank, (first, second, is_saved) in enumerate(found):
        error, other = (first, second) if saves else (second, first)
        assert error.startswith(
            f"expected gather of unit 'blocks.{rank}' on every rank, got gather"
        )
        assert f"gather of unit 'blocks.{1 - rank}' on rank {1 - rank} (rank {rank})" in error
        assert other == ""
        assert not is_saved


def skip_layers(rank: int, stage: int) -> bool:
    module, optimizer = built(Twins, stage=stage)
    for number in range(6):
        module.skips = number % 3 == rank
        train_once(module, optimizer)
    return True


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_layer_that_some_ranks_skip_is_no_other_order(stage):
    assert run_sim(3, skip_layers, stage) == [True] * 3
