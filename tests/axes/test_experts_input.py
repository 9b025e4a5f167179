"""Wrong meshes of units end in an error that names the unit, on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import onefold
from tests.support import experts
from tests.support.ranks import every_rank, run_ranks


def refusals(units: Any, world_size: int = 4, main: Any = None, prepare: Any = None) -> list[str]:
    """What each rank raises where `units(model, mesh, rank)` is passed."""

    def body(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
        model = experts.build()
        if prepare is None:
            onefold.experts.distribute(model, mesh["expert"])
        else:
            prepare(model, mesh, rank)
        with pytest.raises(onefold.ConfigError) as caught:
            onefold.shard(model, units=units(model, mesh, rank), mesh=main and main(mesh))
        dist.barrier()  # every rank comes here
        assert isinstance(model.first.weight, nn.Parameter), "it was left as it was"
        return str(caught.value)

    return run_ranks(world_size, body)


def all_experts(model: Any, mesh: Any) -> dict[Any, Any]:
    return {block.experts: mesh for block in model.blocks}


def at_replicas(model: Any, mesh: Any, rank: int) -> dict[Any, Any]:
    return all_experts(model, mesh["replica"])


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (lambda m, mesh, r: all_experts(m, mesh["expert"]), "the same experts in unit"),
        (lambda m, mesh, r: None, "the same experts in unit"),
        (
            lambda m, mesh, r: all_experts(m, mesh["replica" if r % 2 else "expert"]),
            "do not overlap",
        ),
        (lambda m, mesh, r: all_experts(m, mesh), "a mesh of one axis for units"),
        (lambda m, mesh, r: all_experts(m, "replica"), "a DeviceMesh of one axis"),
        (lambda m, mesh, r: {m.blocks: mesh["replica"]}, "a ModuleList, which is never called"),
        (lambda m, mesh, r: {nn.Linear(1, 1): mesh["replica"]}, "a Linear in a mapping"),
        (lambda m, mesh, r: {lambda part: False: mesh["replica"]}, "which is none of them"),
        (lambda m, mesh, r: {m: mesh["replica"]}, "a MoeModel in a mapping"),
    ],
    ids=[
        "expert axis",
        "forgotten",
        "overlap",
        "two axes",
        "a word",
        "list",
        "foreign",
        "none",
        "root",
    ],
)
def test_a_wrong_mesh_is_refused_on_every_rank(units, words):
    told = refusals(units)
    assert all(words in each for each in told), told


def test_ranks_outside_of_the_mesh_of_the_module_are_named():
    for told in refusals(at_replicas, main=lambda mesh: mesh["expert"]):
        assert "to be a part of the ranks" in told
        assert "whole data axis" in told


def test_a_mesh_without_this_rank_is_refused_on_all():
    def units(model: Any, mesh: Any, rank: int) -> Any:
        return all_experts(model, DeviceMesh("cpu", [0, 1]))

    told = refusals(units)
    assert "a mesh that contains this rank" in told[2]
    assert all("contains this rank" in each for each in told)


def test_meshes_of_other_lengths_are_refused():
    def units(model: Any, mesh: Any, rank: int) -> Any:
        alone = [DeviceMesh("cpu", [each]) for each in range(4)][rank]
        return all_experts(model, mesh["replica"] if rank else alone)

    for told in refusals(units):
        assert "ranks [0] on rank 0, but" in told or "but [0] on rank 0" in told


def test_other_shapes_on_one_mesh_are_named():
    def prepare(model: Any, mesh: Any, rank: int) -> None:
        for block in model.blocks:
            block.experts = experts.StackedExperts(2 + rank // 2).double()
            for name, parameter in list(block.experts.named_parameters()):
                shown = DTensor.from_local(parameter.detach(), mesh["expert"], [Shard(0)])
                block.experts.register_parameter(name, nn.Parameter(shown))

    for told in refusals(at_replicas, prepare=prepare):
        assert "the same parameters in unit 'blocks.0.experts'" in told


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_a_parameter_that_every_mesh_would_train_by_itself_is_named(is_dtensor):
    def prepare(model: Any, mesh: Any, rank: int) -> None:
        onefold.experts.distribute(model, mesh["expert"])
        shared = torch.zeros(2, 2).double()
        if is_dtensor:
            shared = DTensor.from_local(shared, mesh["expert"], [Replicate()])
        model.blocks[1].experts.shared = nn.Parameter(shared)

    for told in refusals(at_replicas, prepare=prepare):
        assert "parameter 'blocks.1.experts.shared' of unit 'blocks.1.experts'" in told
        assert ("R over expert" if is_dtensor else "got a plain tensor") in told


def test_a_parameter_that_is_tied_to_one_outside_of_its_mesh_is_named():
    def prepare(model: Any, mesh: Any, rank: int) -> None:
        model.blocks[0].norm.other = model.blocks[1].experts.down_proj

    for told in refusals(at_replicas, prepare=prepare):
        assert "parameter 'blocks.0.norm.other' in one unit" in told


@every_rank(4)
def test_experts_that_cannot_be_spread_are_refused(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))
    with pytest.raises(onefold.ConfigError, match="an expert for each rank"):
        onefold.experts.ExpertParallel(experts.StackedExperts(5), mesh)
    with pytest.raises(onefold.ConfigError, match="a model with stacked experts"):
        onefold.experts.distribute(nn.Linear(2, 2), mesh)
    with pytest.raises(onefold.ConfigError, match="a row for each expert"):
        onefold.experts.ExpertParallel(nn.Linear(2, 2), mesh)
    with pytest.raises(onefold.ConfigError, match="a mesh of one axis for the expert axis"):
        two = init_device_mesh("cpu", (2, 2))
        onefold.experts.ExpertParallel(experts.StackedExperts(), two)
    with pytest.raises(onefold.ConfigError, match="experts with equal parameters"):
        onefold.experts.ExpertParallel(
            nn.ModuleList([nn.Linear(2, width) for width in (1, 2, 1, 1)]), mesh
        )


def _freeze(listed):
    listed[2].up.weight.requires_grad_(False)


def _freeze_first(listed):
    listed[0].requires_grad_(False)


def _hook(listed):
    listed[1].register_forward_hook(lambda *_: None)


def _hook_of_a_gradient(listed):
    listed[1].up.weight.register_hook(lambda grad: 2 * grad)


def _other_class(listed):
    listed[1].up = experts.Doubled(*listed[1].up.weight.shape[::-1])


def _other_attribute(listed):
    listed[3].scale = 2.0


def _twice(listed):
    listed[3] = listed[0]


def _other_dtype(listed):
    listed[1].double()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_freeze, "requires_grad of 'up.weight' = True in expert 0, but False in expert 2"),
        (_freeze_first, "requires_grad of 'up.weight' = False in expert 0, but True in expert 1"),
        (_hook, "a hook of '1', which would see no call or gradient"),
        (_hook_of_a_gradient, "a hook of '1.up', which would see no call or gradient"),
        (_other_class, "class of 'up' = 'Linear' in expert 0, but 'Doubled' in expert 1"),
        (_other_attribute, "scale = 'nothing' in expert 0, but 2.0 in expert 3"),
        (_twice, "one parameter as '0.up.weight' and '3.up.weight'"),
        (_other_dtype, "dtype of 'up.weight' = torch.float32 in expert 0, but torch.float64"),
    ],
)
def test_listed_experts_that_differ_in_more_than_values_are_refused_by_name(change, words):
    listed = experts.ListedExperts(experts.Expert() for _ in range(4))
    for expert in listed:  # of which each has its own, all alike
        expert.act, expert.config = functools.partial(torch.relu), {"widths": [1, 2]}
        expert.near = lambda x, expert=expert: x
    onefold.experts.ExpertParallel(listed, None)
    change(listed)
    with pytest.raises(onefold.ConfigError, match=words):
        onefold.experts.ExpertParallel(listed, None)


@every_rank(2)
def test_a_parameter_that_joins_experts_after_shard_is_refused(rank):
    axis = experts.Axis(1, 2)
    model, _ = experts.sharded(axis)
    model.requires_grad_(False)
    model.blocks[0].experts.late = nn.Parameter(torch.zeros(2, 2, dtype=axis.dtype))
    with pytest.raises(onefold.ConfigError, match="one that joined a unit with a mesh"):
        model(experts.rows_of(0, 2))
