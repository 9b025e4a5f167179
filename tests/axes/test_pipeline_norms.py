"""Norms over the pipeline axis, and tensor parallel inside stages."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import onefold
from onefold.errors import CheckpointError, ConfigError, StateError
from tests.axes.test_pipeline_ties import TIED, loss, one_process, stages_of, step, tokens
from tests.support.pipelines import Pipe, assert_near, blocks, plain_backward, rows
from tests.support.ranks import run_processes

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


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (2, 2)])
def test_driven_stages_know_their_pipeline_and_undriven_ones_are_refused(shape):
    run_processes(math.prod(shape), _in_process, shape, norm_of_stages)


def three_axes(mesh):
    data = rows(mesh["dp"].size(), torch.float64)
    for kind, stage in [("1F1B", 3), ("InterleavedZeroBubble", 3), ("1F1B", 1)]:
        wanted = blocks(torch.float64)
        optimizer = torch.optim.AdamW(wanted.parameters(), lr=1e-3)
        model = blocks(torch.float64)
        for block in model:
            plan = {"norm": Replicated(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        pipe = Pipe(kind, stage, mesh, model=model)
        for _ in range(2):
            plain_backward(wanted, *data)
            pipe.step(*data)
            assert_near(pipe.grads(), wanted, "grad", 1e-12)
            norm = nn.utils.clip_grad_norm_(wanted.parameters(), 0.1)
            found = onefold.clip_grad_norm_(pipe.modules.values(), 0.1)
            torch.testing.assert_close(found.double(), norm.double(), rtol=1e-6, atol=0)
            optimizer.step()
            pipe.update()
        assert_near(pipe.weights(), wanted, "data", 1e-9)


class Replicated(ParallelStyle):
    """Parameters of a norm are the same on all tensor ranks, and so are their gradients."""

    def _apply(self, module, device_mesh):
        def enter(_, inputs, mesh):
            return tuple(DTensor.from_local(each, mesh, [Replicate()]) for each in inputs)

        return distribute_module(
            module, device_mesh, None, enter, lambda _, output, __: output.to_local()
        )


def test_tensor_parallel_stages_equal_one_process():
    run_processes(8, _in_process, (2, 2, 2), three_axes)


def _in_process(_, shape, body):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "ranks .* got the same first batch")
    names = ("pp", "dp", "tp")[: len(shape)]
    body(init_device_mesh("cpu", shape, mesh_dim_names=names))
