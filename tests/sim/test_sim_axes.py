"""Experts, tensor parallelism, pipelines and split sequences on the simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import onefold
from tests.axes import test_sequence as sequences
from tests.axes import test_tensor_parallel as tensors
from tests.sim import building
from tests.sim.device import check
from tests.sim.ranks import run_sim
from tests.sim.training import device
from tests.support import experts, pipelines
from tests.support.rows import again_but

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

Named = dict[str, Tensor]
STEPS, LIMIT = 3, 1e-5
HALVES = 2, 2
"""Data ranks, and ranks of the other axis."""


def moe(stage: int) -> experts.Axis:
    return experts.Axis(*HALVES, stage, STEPS, dtype=torch.float32)


def with_experts(rank: int, stage: int) -> Named:
    axis = moe(stage)
    model, optimizer = experts.sharded(axis, "sim")
    for number in range(STEPS):
        rows = experts.rows_of(rank, axis.world_size, number, axis.dtype).to(device())
        experts.loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def with_tensors(rank: int, stage: int) -> Named:
    mesh = init_device_mesh("sim", HALVES, mesh_dim_names=("dp", "tp"))
    model = tensors.made().to(device())
    parallelize_module(model, mesh["tp"], tensors.plan())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer, mesh=mesh["dp"], stage=stage)
    for number in range(STEPS):
        tokens = tensors.rows(number, HALVES[0])[mesh["dp"].get_local_rank()].to(device())
        tensors.loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def with_stages(kind: str, rank: int, stage: int) -> Named:
    pipe = pipelines.Pipe(kind, stage, pipelines.mesh_of(*HALVES, "sim"))
    data = [each.to(device()) for each in pipelines.rows(HALVES[1])]
    for _ in range(STEPS):
        pipe.step(*data)
        pipe.update()
    return {name: value.cpu() for name, value in pipe.weights().items()}


def with_sequences(rank: int, stage: int) -> Named:
    work = sequences.Work(steps=STEPS, stage=stage)
    _, weights = sequences.together(rank, work, *HALVES, device="sim")
    return {name: value.cpu() for name, value in weights.items()}


def weights_of(model: nn.Module) -> Named:
    return {name: tensors.whole(p).cpu() for name, p in model.named_parameters()}


def trained_blocks() -> Named:
    model = pipelines.blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        pipelines.plain_backward(model, *pipelines.rows(HALVES[1]))
        optimizer.step()
    return dict(model.named_parameters())


PIPES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
AXES: dict[str, tuple[Callable[..., Named], Callable[[], Named]]] = {
    "experts": (with_experts, lambda: experts.plain_weights_after(moe(1))),
    "tensors": (with_tensors, lambda: tensors.one_process(HALVES[0], STEPS, torch.float32)[1]),
    "sequences": (with_sequences, lambda: sequences.alone(sequences.Work(steps=STEPS))[1]),
    **{kind: (partial(with_stages, kind), trained_blocks) for kind in PIPES},
}

STAGES = {name: (3,) for name in AXES} | {"tensors": (1, 3), "1F1B": (1,)}


def every_axis(rank: int) -> dict[tuple[str, int], Named]:
    """Each axis at each stage, without a race."""
    results = {}
    for name, (body, _) in AXES.items():
        for stage in STAGES[name]:
            results[name, stage] = body(rank, stage)
            try:
                check()
            except AssertionError as error:
                error.add_note(f"{name}, stage {stage}, rank {rank}")
                raise
    return results


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[tuple[str, int], Named]]:
    return run_sim(math.prod(HALVES), every_axis)


@again_but("sequences", "ZBVZeroBubble")
@pytest.mark.parametrize("name", AXES)
def test_an_axis_has_the_weights_of_one_process(name: str, of_ranks: Any) -> None:
    wanted = AXES[name][1]()
    for stage in STAGES[name]:
        found: Named = {}
        for results in of_ranks:  # a rank of a pipeline has its stages alone
            for parameter, value in results[name, stage].items():
                assert torch.equal(found.setdefault(parameter, value), value), parameter
        same = {n: p.detach().to(found[n].dtype) for n, p in wanted.items()}
        tensors.check_close(found, same, LIMIT)
