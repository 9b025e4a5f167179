"""An expert axis beside others: nodes, tensor parallelism, tiers, and a part of the world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import onefold
from onefold.config import Offload
from onefold.recording.report import Report
from tests.support import experts
from tests.support.experts import Axis
from tests.support.ranks import run_ranks
from tests.support.rows import again_but


def gradients_and_norm(model: nn.Module, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    experts.loss_of(model, rows).backward()
    norm = onefold.clip_grad_norm_(model, 1e9)
    return {name: experts.whole(p.grad) for name, p in model.named_parameters()}, norm


def assert_plain(results: list[tuple[dict[str, Tensor], Tensor]], axis: Axis) -> None:
    """Every rank has the gradients and the norm of one process."""
    wanted = experts.plain_gradients(axis)
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    for found, of_rank in results:
        assert experts.error(found, wanted) < 1e-12
        torch.testing.assert_close(of_rank, norm, rtol=1e-12, atol=0)


@again_but("gradients")
@pytest.mark.parametrize("secondary", ["optimizer", "gradients"])
def test_experts_train_where_the_other_units_know_nodes(secondary):
    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
        model = experts.build()
        units = dict.fromkeys(onefold.experts.distribute(model, mesh["expert"]), mesh["replica"])
        onefold.shard(model, mesh=mesh, units=units, wire=onefold.Wire(secondary=secondary))
        return gradients_and_norm(model, experts.rows_of(rank, 4))

    assert_plain(run_ranks(4, body), Axis(2, 2))


@again_but("3")
@pytest.mark.filterwarnings("ignore:While redistributing")
@pytest.mark.parametrize("stage", [0, 3])
def test_experts_and_tensor_parallel_layers_train_as_in_one_process(stage, tmp_path):
    """dp 2 x tp 2, where the data axis is the expert axis; saved, and loaded by one process."""

    def on_axis(part: nn.Module, inputs: tuple[Tensor], mesh: Any) -> tuple[DTensor]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

    def body(rank: int) -> Any:
        names = ("replica", "expert", "tensor")
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
        model = experts.build()
        units = dict.fromkeys(onefold.experts.distribute(model, mesh["expert"]), mesh["replica"])
        inside = [part for block in model.blocks for part in (block.norm, block.router)]
        for part in [model.first, *inside, model.last]:
            distribute_module(
                part, mesh["tensor"], input_fn=on_axis, output_fn=lambda m, out, _: out.to_local()
            )
        data = mesh["replica", "expert"]._flatten("data")
        onefold.shard(model, stage=stage, mesh=data, units=units)
        onefold.save(tmp_path / "step", model)
        return gradients_and_norm(model, experts.rows_of(data.get_local_rank(), 2))

    assert_plain(run_ranks(4, body), Axis(1, 2))
    model, wanted = experts.build(), experts.build()
    nn.init.zeros_(model.last.weight)
    onefold.shard(model)
    onefold.load(tmp_path / "step", model)
    for name, parameter in model.named_parameters():
        assert torch.equal(experts.whole(parameter.detach()), wanted.get_parameter(name)), name


def test_two_halves_of_the_world_train_models_of_their_own():
    """As the stages of a pipeline do."""

    def body(rank: int) -> Any:
        names = ("half", "replica", "expert")
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
        model = experts.build()
        units = dict.fromkeys(onefold.experts.distribute(model, mesh["expert"]), mesh["replica"])
        onefold.shard(model, mesh=mesh["replica", "expert"]._flatten("data"), units=units)
        return gradients_and_norm(model, experts.rows_of(rank % 2, 2))

    assert_plain(run_ranks(4, body), Axis(1, 2))


def test_states_of_experts_rest_on_disk_and_are_stepped_in_backward(tmp_path):
    first = Axis(2, 2, 3, 3, dtype=torch.float32)
    wanted = experts.run(first, experts.weights_after)
    for offload in (f"disk:{tmp_path}", Offload(optimizer="cpu", step_in_backward=True)):
        found = experts.run(replace(first, options={"offload": offload}), experts.weights_after)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), offload


def test_a_model_on_meta_is_read_by_the_ranks_that_hold_its_experts(tmp_path):
    model = experts.build(torch.float32)
    onefold.shard(model)
    onefold.save_pretrained(model, tmp_path / "export")

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
        with torch.device("meta"):
            model = experts.MoeModel()
        units = dict.fromkeys(onefold.experts.distribute(model, mesh["expert"]), mesh["replica"])
        onefold.load_pretrained(model, tmp_path / "export")
        onefold.shard(model, units=units)
        wanted = experts.build(torch.float32)
        for name, parameter in model.named_parameters():
            assert torch.equal(experts.whole(parameter.detach()), wanted.get_parameter(name)), name

    run_ranks(4, body)


def test_the_plan_knows_the_bytes_of_units_with_their_own_mesh():
    def body(rank: int) -> Report:
        axis = Axis(2, 2, dtype=torch.float32)
        model, optimizer = experts.sharded(axis)
        for step in range(1, 3):
            experts.loss_of(model, experts.rows_of(rank, 4, step, axis.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return onefold.report(model)

    report = run_ranks(4, body)[0]
    for kind in ("weight", "grad", "optimizer", "unsharded"):
        found = sum(each.peak for each in report.memory[kind].values())
        assert report.predicted[kind] == found, kind
