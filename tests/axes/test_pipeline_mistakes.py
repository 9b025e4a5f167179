"""Schedules and axes that do not go together end in a named error on every rank, within seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import onefold
from onefold.engine.pipelined import Pipeline
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, ConfigError
from onefold.wire.collectives import Group
from tests.support.pipelines import mean_loss
from tests.support.ranks import run_processes

pytestmark = pytest.mark.process
SECONDS = 30.0  # far less than the minutes after which a wait for other ranks ends


def module(mesh: DeviceMesh, *, is_cut: bool = False) -> nn.Module:
    made: nn.Module = nn.Sequential(nn.Linear(4, 4))
    if is_cut:
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    return onefold.shard(made, mesh=mesh["dp"])


def stage(of: nn.Module, mesh: DeviceMesh, index: int | None = None, num: int = 2) -> Any:
    group = mesh.get_group("pp")
    index = dist.get_rank(group) if index is None else index
    return PipelineStage(of, index, num, torch.device("cpu"), group=group)


def one_at_a_time(mesh: DeviceMesh, is_other: bool) -> Any:
    number = 8 if is_other else 4
    return Schedule1F1B(stage(module(mesh), mesh), number, loss_fn=mean_loss)


def another_kind(mesh: DeviceMesh, is_other: bool) -> Any:
    kind = ScheduleGPipe if is_other else Schedule1F1B
    return kind(stage(module(mesh), mesh), 4, loss_fn=mean_loss)


def another_scale(mesh: DeviceMesh, is_other: bool) -> Any:
    return Schedule1F1B(stage(module(mesh), mesh), 4, loss_fn=mean_loss, scale_grads=is_other)


def fewer_stages(mesh: DeviceMesh, is_other: bool) -> Any:
    """A rank drives one of its two stages alone."""
    modules = [module(mesh), module(mesh)]
    if is_other:
        return Schedule1F1B(stage(modules[0], mesh), 4, loss_fn=mean_loss)
    rank = mesh.get_local_rank("pp")
    both = [stage(each, mesh, rank + 2 * i, 4) for i, each in enumerate(modules)]
    return ScheduleInterleaved1F1B(both, 4, loss_fn=mean_loss)


def another_program(mesh: DeviceMesh, is_other: bool) -> Any:
    modules, rank = [module(mesh), module(mesh)], mesh.get_local_rank("pp")
    both = [stage(each, mesh, rank + 2 * i, 4) for i, each in enumerate(modules)]
    made = ScheduleInterleaved1F1B(both, 4, loss_fn=mean_loss)
    if is_other:  # as one that a file describes
        actions = made.pipeline_order_with_comms[0]
        actions[0], actions[1] = actions[1], actions[0]
    return made


UNEVEN: dict[Callable[[DeviceMesh, bool], Any], str] = {
    one_at_a_time: "'4 micro-batches' on rank .* but '8 micro-batches' on rank|'8 .* but '4",
    another_kind: "'a Schedule1F1B' on rank .* but 'a ScheduleGPipe|ScheduleGPipe' .* but 'a Sch",
    another_scale: "scale_grads=",
    fewer_stages: "'a ScheduleInterleaved1F1B' on rank .* but 'a Schedule1F1B'|1F1B' .* but 'a Sch",
    another_program: "'a program of actions with digest .* but 'a program of actions",
}


def refused(match: str, act: Callable[[], object], error: type[Exception] = ConfigError) -> None:
    dist.barrier()
    begun = time.monotonic()
    with pytest.raises(error, match=match):
        act()
    assert time.monotonic() - begun < SECONDS


def uneven(rank: int) -> None:
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for build, message in UNEVEN.items():
        for others in ([3], [2, 3], [1, 3]):  # one rank, one stage, or one data rank
            made = build(mesh, rank in others)
            refused(message, lambda made=made: onefold.pipeline(made, tied=[]))
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    made = Schedule1F1B(stage(module(mesh, is_cut=True), mesh), 4 + rank % 2, loss_fn=mean_loss)
    refused("micro-batches' on rank", lambda: onefold.pipeline(made, tied=[]))


def test_uneven_schedules_are_named_on_every_rank():
    run_processes(4, uneven, timeout_s=120)


def axes(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    rows = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    columns = [dist.new_group(each) for each in ([0, 3], [1], [2])]
    row, column = rows[rank // 3], columns[rank % 3]
    part = onefold.shard(nn.Linear(4, 4), mesh=column)
    place = dist.get_rank(row), dist.get_world_size(row)
    made = Schedule1F1B(
        PipelineStage(part, *place, torch.device("cpu"), group=row), 4, loss_fn=mean_loss
    )
    message = "axes whose lengths multiply to the world, got a pipeline of 3 times"
    refused(message, lambda: onefold.pipeline(made, tied=[]))
    engine_of(part).join_pipeline(Pipeline(Group.from_handle(dist.group.WORLD), 1))
    message = "a pipeline axis and the ranks of a stage that multiply to 4, got 4 and "
    refused(message, lambda: onefold.save(f"{folder}/saved", part), CheckpointError)


def in_tiles(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    made = nn.Sequential(nn.Linear(8, 8))
    onefold.shard(made, mesh=mesh["dp"], stage=3, offload=onefold.Offload(tile=64))
    schedule = Schedule1F1B(stage(made, mesh), 4, loss_fn=mean_loss)
    refused("gathered in row blocks", lambda: onefold.pipeline(schedule))


def test_a_stage_with_weights_in_tiles_is_refused_for_its_gradients_were_wrong():
    run_processes(2, in_tiles)


def test_axes_that_do_not_multiply_to_the_world_are_refused(tmp_path):
    run_processes(4, axes, str(tmp_path), timeout_s=120)
