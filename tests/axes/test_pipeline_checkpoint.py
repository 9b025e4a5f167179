"""Stages of a pipeline are saved and loaded as the one model that they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import onefold
from onefold.errors import CheckpointError
from tests.support.pipelines import Pipe, blocks, mean_loss, mesh_of, rows
from tests.support.ranks import run_processes

pytestmark = pytest.mark.process

LR = 1e-2


def whole_of(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, moments and step counts, whole, by name. A collective of the module's ranks."""
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = whole_of(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole_of(value)
    return found


def state_of_pipe(pipe: Pipe) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module, optimizer in zip(pipe.modules.values(), pipe.optimizers, strict=True):
        found |= state_of(module, optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: value for each in everyone for name, value in each.items()}


def changed_blocks() -> nn.Sequential:
    """Blocks with other values than those that were saved."""
    made = blocks()
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.5)
    return made


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def moves(rank: int, folder: str) -> None:
    """Pipelines of one and of two stages a rank, ranks of data alone, and one process."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Logical operators 'and' and 'or' are deprecated")
    mesh, path = mesh_of(2, 2), Path(folder)
    data = rows(2)
    pipe = Pipe("Interleaved1F1B", 3, mesh, lr=LR)
    for _ in range(2):
        pipe.step(*data)
        pipe.update()
    wanted = state_of_pipe(pipe)
    modules, optimizers = list(pipe.modules.values()), pipe.optimizers
    saving = {"extra": {"rank": rank}}
    onefold.save(path / "stages", modules, optimizers, **saving)

    for kind, stage in (("1F1B", 2), ("Interleaved1F1B", 1), ("ZBVZeroBubble", 3)):
        other = Pipe(kind, stage, mesh, model=changed_blocks(), lr=LR / 2)
        loading = list(other.modules.values()), other.optimizers
        extra = onefold.load(path / "stages", *loading)
        assert extra == {"rank": rank}
        assert_same(state_of_pipe(other), wanted)
        assert other.optimizers[0].param_groups[0]["lr"] == LR
        other.step(*data)
        other.update()
        if kind == "1F1B":
            ticket = onefold.save(path / "more", *loading, wait=False)
            ticket.wait()
            wanted_more = state_of_pipe(other)

    alone = changed_blocks()  # on four ranks of data
    optimizer = torch.optim.AdamW(alone.parameters(), lr=LR / 2)
    onefold.shard(alone, optimizer)
    onefold.load(path / "more", alone, optimizer)
    assert_same(state_of(alone, optimizer), wanted_more)
    onefold.save(path / "data", alone, optimizer)
    back = Pipe("1F1B", 3, mesh, model=changed_blocks(), lr=LR / 2)
    onefold.load(path / "data", list(back.modules.values()), back.optimizers)
    assert_same(state_of_pipe(back), wanted_more)

    with pytest.raises(CheckpointError, match="all 2 stages of this rank, got 1 modules"):
        onefold.save(path / "part", modules[0], optimizers[0])
    pipe.step(*data)
    with pytest.raises(CheckpointError, match="a pipeline that is saved between steps"):
        onefold.save(path / "between", modules, optimizers)
    if rank == 0:
        torch.save((data, wanted_more), path / "wanted.pt")


def test_checkpoints_move_between_pipelines_ranks_of_data_and_one_process(tmp_path):
    run_processes(4, moves, str(tmp_path))
    data, wanted = torch.load(tmp_path / "wanted.pt")
    module = changed_blocks()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR / 2)
    onefold.shard(module, optimizer)
    onefold.load(tmp_path / "more", module, optimizer)
    assert_same(state_of(module, optimizer), wanted)
    assert optimizer.param_groups[0]["lr"] == LR
    mean_loss(module(data[0].flatten(0, 1)), data[1].flatten(0, 1)).backward()
    optimizer.step()
