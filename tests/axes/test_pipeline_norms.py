"""Norms over the pipeline axis, and tensor parallel inside stages."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor

import onefold
from onefold.errors import CheckpointError, ConfigError, StateError, WireError
from tests.axes.test_pipeline_ties import TIED, loss, one_process, stages_of, step, tokens
from tests.support.pipelines import Pipe, assert_near, blocks, plain_backward, rows
from tests.support.ranks import run_processes
from tests.support.rows import again_but

pytestmark = pytest.mark.process


def one_norm(mesh):
    dp, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for kind, stage in [("1F1B", 0), ("1F1B", 3), ("ZBVZeroBubble", 3)]:
        num = 2 if kind == "1F1B" else 4
        wanted, _ = one_process(num)
        modules, _, schedule = stages_of(kind, stage, mesh)
        onefold.pipeline(schedule, tied=TIED)
        data = tokens(size)
        loss(wanted(data[0].flatten(0, 1)), data[1].flatten(0, 1)).backward()
        step(schedule, modules, num, data, dp)
        norm = nn.utils.clip_grad_norm_(wanted.parameters(), 0.1)
        found = onefold.clip_grad_norm_(modules.values(), 0.1)
        torch.testing.assert_close(found.double(), norm.double(), rtol=1e-6, atol=0)
        for i, module in modules.items():
            for name, parameter in module.named_parameters():
                grad = parameter.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                wanted_grad = wanted[i].get_parameter(name).grad
                torch.testing.assert_close(grad, wanted_grad, rtol=1e-6, atol=1e-9)


def test_the_norm_is_that_of_all_stages_and_counts_a_tied_weight_once():
    run_processes(4, _in_process, (2, 2), one_norm)


def norm_of_stages(mesh):
    pp, size = mesh["pp"].size(), mesh["dp"].size()
    data = rows(size, torch.float64)
    for kind, stage in [("1F1B", 3), ("Interleaved1F1B", 1)]:
        wanted = blocks(torch.float64, layers=2 * pp)
        pipe = Pipe(kind, stage, mesh, model=blocks(torch.float64, layers=2 * pp))
        plain_backward(wanted, *data)
        pipe.step(*data)
        stages = list(pipe.modules.values())
        if len(stages) > 1:
            with pytest.raises(ConfigError, match="all stages of this rank"):
                onefold.clip_grad_norm_(stages[0], 0.1)
        norm = nn.utils.clip_grad_norm_(wanted.parameters(), 0.1)
        found = onefold.clip_grad_norm_(stages, 0.1)
        torch.testing.assert_close(found.double(), norm.double(), rtol=1e-6, atol=0)
        assert_near(pipe.grads(), wanted, "grad", 1e-9)
        parameters = [p for part in stages for p in part.parameters()]
        again = onefold.clip_grad_norm_(parameters, 1.0)
        torch.testing.assert_close(again.double(), torch.tensor(0.1).double(), rtol=1e-4, atol=0)
    pipe = Pipe("1F1B", 1, mesh, model=blocks(torch.float64, layers=2 * pp), drives=False)
    pipe.step(*data)
    with pytest.raises(StateError, match="that a schedule runs without"):
        onefold.clip_grad_norm_(pipe.modules.values(), 0.1)
    with pytest.raises(CheckpointError, match="a stage that no schedule drives"):
        onefold.save("never", *pipe.modules.values())


@again_but("shape1")
@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_driven_stages_know_their_pipeline_and_undriven_ones_are_refused(shape):
    run_processes(math.prod(shape), _in_process, shape, norm_of_stages)


def parts_of(mesh, parts, loss, **options):
    """The part of this rank as a driven stage, its schedule, and an optimizer if it has weights."""
    rank = mesh["pp"].get_local_rank()
    module = parts[rank]
    has_weights = any(True for _ in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if has_weights else None
    onefold.shard(module, optimizer, mesh=mesh["dp"], **options)
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    stage = PipelineStage(module, rank, len(parts), device, group=group)
    return module, optimizer, onefold.pipeline(ScheduleGPipe(stage, 2, loss_fn=loss))


def run(schedule, mesh, inputs, targets):
    rank, last = mesh["pp"].get_local_rank(), mesh["pp"].size() - 1
    schedule.step(*[inputs] * (rank == 0), **({"target": targets} if rank == last else {}))


def small(middle=nn.Tanh, last=nn.Identity):
    torch.manual_seed(0)
    return nn.Linear(4, 4).double(), middle(), last()


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def norm_without_parameters(mesh):
    whole, parts = nn.Sequential(*small()), small()
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    module, _, schedule = parts_of(mesh, parts, nn.functional.mse_loss)
    run(schedule, mesh, inputs, targets)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    found = onefold.clip_grad_norm_(module, 0.01)
    torch.testing.assert_close(found.double(), norm, rtol=1e-6, atol=0)
    for own, wanted in zip(module.parameters(), whole.parameters(), strict=False):
        torch.testing.assert_close(whole_of(own.grad), wanted.grad, rtol=1e-6, atol=0)
    if mesh["pp"].get_local_rank() == 1:  # a stage that is not named: the others wait for it
        assert onefold.clip_grad_norm_(module.parameters(), 0.01) == 0
    else:
        place = "norm of all stages: rank 0 has stage 0, rank 1 has stage 1, rank 2 has stage 2"
        with pytest.raises(WireError, match="all ranks in the same collective") as error:
            onefold.clip_grad_norm_(module, 0.01)
        assert place in str(error.value) or "rank 1 elsewhere" in str(error.value)
    dist.barrier()


def test_a_stage_without_parameters_takes_part_in_the_norm_and_is_named_where_it_does_not():
    run_processes(3, _in_process, (3, 1), norm_without_parameters)


def scaled(mesh):
    whole, parts = nn.Sequential(*small(middle)), small(middle)
    with torch.no_grad():  # large inputs then make large gradients of this weight alone
        for first in (whole[0], parts[0]):
            first.float().weight.mul_(0.002)
    plain, alone = onefold.GradScaler(init_scale=2.0**14), torch.optim.SGD(whole.parameters(), 0.1)
    scaler = onefold.GradScaler(init_scale=2.0**14)

    def loss(output, target):
        return scaler.scale(nn.functional.smooth_l1_loss(output.float(), target))

    onefold.shard(whole, alone, precision="fp16", mesh=mesh["dp"])
    module, optimizer, schedule = parts_of(mesh, parts, loss, precision="fp16")
    scaler.scale(torch.ones(()))  # stages before the last one compute no loss
    wanted = dict(whole.named_parameters())
    for size, scale in ((1, 2.0**14), (2000, 2.0**13), (1, 2.0**13)):
        inputs, targets = size * torch.randn(4, 4).half(), torch.randn(4, 4)
        plain.scale(nn.functional.smooth_l1_loss(whole(inputs).float(), targets)).backward()
        run(schedule, mesh, inputs, targets)
        for each, of in ((plain, alone), (scaler, optimizer)):
            if of is not None:  # the last stage computes the loss, and has no parameter
                each.step(of)
                of.zero_grad()
            each.update()
        assert scaler.get_scale() == plain.get_scale() == scale
        for name, own in module.named_parameters():
            of_one = whole_of(wanted[f"{mesh['pp'].get_local_rank()}.{name}"])
            torch.testing.assert_close(whole_of(own), of_one, rtol=1e-3, atol=1e-5)


def middle():
    return nn.Sequential(nn.ReLU(), nn.Linear(4, 4))


def test_stages_skip_an_overflowing_step_together_and_share_one_loss_scale():
    run_processes(3, _in_process, (3, 1), scaled)


def quantized(mesh):
    parts = [nn.Linear(64, 64), nn.Linear(64, 64)]
    wire = onefold.Wire(gradients="int8") if mesh["pp"].get_local_rank() == 1 else None
    module, optimizer, schedule = parts_of(mesh, parts, nn.functional.mse_loss, wire=wire)
    for is_bad in (False, True):
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        run(schedule, mesh, rows, rows)
        if is_bad and dist.get_rank() == 1:
            module.weight.grad._local_tensor.fill_(math.inf)  # of stage 0, on one data rank
        before = onefold.full_state_dict(module, rank0_only=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
        after = onefold.full_state_dict(module, rank0_only=False)
        assert torch.equal(before["weight"], after["weight"]) == is_bad


def test_stages_skip_a_step_of_quantized_gradients_together():
    run_processes(4, _in_process, (2, 2), quantized)


def _in_process(_, shape, body):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "ranks .* got the same first batch")
    names = ("pp", "dp", "tp")[: len(shape)]
    body(init_device_mesh("cpu", shape, mesh_dim_names=names))
