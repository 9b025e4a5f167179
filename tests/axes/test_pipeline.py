"""Schedules of torch.distributed.pipelining over sharded stages equal one process."""

from __future__ import annotations

import inspect
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.distributed.pipelining import stage as stages

import onefold
from onefold.compat import LEARN_SHAPES
from onefold.engine import pipelined
from onefold.engine.driving import Verb
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from tests.support.pipelines import (
    MICROBATCHES,
    SCHEDULES,
    Pipe,
    assert_near,
    blocks,
    mean_loss,
    mesh_of,
    plain_backward,
    rows,
)
from tests.support.ranks import run_processes
from tests.support.rows import again_but

pytestmark = pytest.mark.process

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules with backwards of inputs and of weights apart."""


def run(pp, dp, body, *args):
    run_processes(pp * dp, _in_process, pp, dp, body, args)


def _in_process(_, pp, dp, body, args):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Logical operators 'and' and 'or' are deprecated")
    body(mesh_of(pp, dp), *args)


def accumulated(mesh, precision, order, stage=1):
    """Gradients of micro-batches in this order, inside `onefold.accumulate`, without a pipeline."""
    model = blocks()
    onefold.shard(model, stage=stage, mesh=mesh["dp"], precision=precision)
    inputs, targets = (each[mesh["dp"].get_local_rank()] for each in rows(mesh["dp"].size()))
    pairs = list(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True))[::order]
    for x, y in pairs[:-1]:
        with onefold.accumulate(model):
            mean_loss(model(x), y).backward()
    mean_loss(model(pairs[-1][0]), pairs[-1][1]).backward()
    return {name: p.grad.full_tensor() / MICROBATCHES for name, p in model.named_parameters()}


def stages_of(kind, precision):
    """In fp32 stage 3 and one of the others, in bf16 one, in turn."""
    number = list(SCHEDULES).index(kind)
    return [1 + number % 2, 3] if precision is None else [1 + number % 3]


def every_schedule(mesh):
    data = rows(mesh["dp"].size())
    wanted = blocks()
    plain_backward(wanted, *data)
    for precision in (None, "bf16"):
        sums = {
            (order, reduces): accumulated(mesh, precision, order, 2 if reduces else 1)
            for order in (1, -1)
            for reduces in (False, True)
        }
        for kind in SCHEDULES:
            for stage in stages_of(kind, precision):
                reduces_each = stage == 2 and kind not in SPLIT
                bits = sums[-1 if kind == "LoopedBFS" else 1, reduces_each]
                pipe = Pipe(kind, stage, mesh, precision=precision)
                pipe.step(*data)
                grads = pipe.grads()
                assert_near(grads, wanted, "grad", 1e-6 if precision is None else 0.03)
                for name, grad in grads.items():
                    assert torch.equal(grad, bits[name]), f"{kind}, stage {stage}: {name}"
                # the inference of shapes, too, left no gather and no gradient behind
                reductions = MICROBATCHES if reduces_each else 1
                assert pipe.per_unit(Verb.GATHER) == [1]
                assert pipe.per_unit(Verb.REDUCE) == [reductions]
                if stage < 3 or precision:
                    continue
                pipe.update()
                pipe.step(*data)
                assert (pipe.per_unit(Verb.GATHER), pipe.per_unit(Verb.REDUCE)) == ([1], [1])


def test_every_schedule_gives_the_gradients_of_accumulation_and_reduces_as_its_stage_does():
    """Once a step; at stage 2 in each micro-batch, where backwards are whole."""
    run(2, 2, every_schedule)


def ten_steps(mesh):
    for kind, stage in [("1F1B", 3), ("InterleavedZeroBubble", 3), ("GPipe", 1)]:
        wanted = blocks()
        optimizer = torch.optim.AdamW(wanted.parameters(), lr=1e-3)
        pipe = Pipe(kind, stage, mesh)
        for seed in range(10):
            data = rows(mesh["dp"].size(), seed=seed)
            plain_backward(wanted, *data)
            optimizer.step()
            pipe.step(*data)
            pipe.update()
        assert_near(pipe.weights(), wanted, "data", 1e-6)


def test_weights_after_ten_steps_equal_one_process():
    run(2, 2, ten_steps)


def windows(mesh, layers):
    data = rows(mesh["dp"].size())
    wanted = blocks(layers=layers)
    plain_backward(wanted, *data)
    m = MICROBATCHES
    for kind, window, gathers, reductions in [
        ("1F1B", 0, [2 * m], [m]),
        ("1F1B", 1, [1, 2 * m], [1, m]),
        ("GPipe", "1 TiB", [1], [1]),
        ("Interleaved1F1B", "1 KiB", [2 * m], [m]),
        ("LoopedBFS", 0, [2 * m], [m]),
        ("InterleavedZeroBubble", 0, None, [1]),
    ]:
        pipe = Pipe(kind, 3, mesh, model=blocks(layers=layers), window=window)
        for _ in range(2):
            pipe.clear()
            pipe.step(*data)
            assert_near(pipe.grads(), wanted, "grad", 1e-6)
        if gathers is not None:
            assert pipe.per_unit(Verb.GATHER) == gathers, (kind, window)
        else:  # the first stage's backward of weights is a whole one
            for stage in pipe.modules:
                assert pipe.per_unit(Verb.GATHER, stage) == [3 * m if stage else 2 * m]
        assert pipe.per_unit(Verb.REDUCE) == reductions, (kind, window)
        for module in pipe.modules.values():
            assert not any(unit.unsharded.is_held for unit in engine_of(module).units)


@again_but("a unit a block")
@pytest.mark.parametrize("layers", [4, 8], ids=["a unit of several modules", "a unit a block"])
def test_units_outside_the_window_are_gathered_for_each_use(layers):
    run(2, 2, windows, layers)


def between_steps(mesh):
    """Evaluation, steps that add up, and a loop without the schedule."""
    data = rows(mesh["dp"].size())
    pipe = Pipe("InterleavedZeroBubble", 3, mesh, scale_grads=False)
    pipe.step(*data)
    once = pipe.grads()
    with torch.no_grad():
        pipe.step(*data, call="eval")
    assert (pipe.per_unit(Verb.GATHER), pipe.per_unit(Verb.REDUCE)) == ([1], [])
    for name, grad in pipe.grads().items():
        assert torch.equal(grad, once[name])
    pipe.step(*data)
    for name, grad in pipe.grads().items():
        torch.testing.assert_close(grad, 2 * once[name])
    pipe.update()
    with ExitStack() as accumulating:  # the first of two steps: nothing is reduced
        for module in pipe.modules.values():
            accumulating.enter_context(onefold.accumulate(module))
        pipe.step(*data)
    assert pipe.per_unit(Verb.REDUCE) == []
    pipe.step(*data)
    assert pipe.per_unit(Verb.REDUCE) == [1]
    twice = pipe.grads()
    pipe.clear()
    pipe.step(*data)
    for name, grad in pipe.grads().items():
        torch.testing.assert_close(2 * grad, twice[name])
    pipe.clear()
    for module in pipe.modules.values():  # without the schedule, as ever
        module(data[0][0]).sum().backward()
        assert not engine_of(module).schedule.driven.walks_apart
        assert all(p.grad is not None for p in module.parameters())


def test_evaluation_and_accumulation_between_steps():
    run(2, 2, between_steps)


def undriven(mesh):
    data = rows(mesh["dp"].size())
    wanted = blocks()
    plain_backward(wanted, *data)
    for stage in (2, 3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pipe = Pipe("1F1B", stage, mesh, drives=False)
            for _ in range(2):
                pipe.clear()
                pipe.step(*data)
                assert_near(pipe.grads(), wanted, "grad", 1e-6)
        told = [each for each in seen if "call onefold.pipeline(schedule)" in str(each.message)]
        assert len(told) == (stage == 3), [str(each.message) for each in seen]
        assert not any("first batch" in str(each.message) for each in seen)


def test_a_schedule_without_the_adapter_is_right_and_warns_once():
    run(2, 2, undriven)


def bad_input(mesh):
    device, group = torch.device("cpu"), mesh["pp"].get_group()
    pp = mesh["pp"].get_local_rank()

    def schedule(module, group=group):
        stage = PipelineStage(module, dist.get_rank(group), 2, device, group=group)
        return Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_loss)

    def refused(match, made, **arguments):
        with pytest.raises(ConfigError, match=match):
            onefold.pipeline(made, **arguments)

    # one stage alone is not sharded: every rank hears of it
    first = nn.Linear(4, 4)
    if pp == 0:
        onefold.shard(first, mesh=mesh["dp"])
    refused("a stage module that onefold.shard has sharded", schedule(first))
    # the data axis is the whole world
    whole = onefold.shard(nn.Linear(4, 4))
    refused("axes that share this rank alone", schedule(whole))
    refused("a schedule of torch.distributed.pipelining", "1F1B")
    module = onefold.shard(nn.Linear(4, 4), mesh=mesh["dp"])
    made = schedule(module)
    refused("window to be a number of units", made, window=-1)
    refused("window to be a number above 0 with a unit", made, window="much")
    refused("the same schedule and arguments", made, window=pp)
    refused("'head' on two stages or more", made, tied=["head"])
    other = onefold.shard(nn.Linear(4, 4 + pp), mesh=mesh["dp"])
    refused("'weight' to be alike on all stages", schedule(other), tied=["weight"])
    onefold.pipeline(made)
    refused("a stage that no schedule drives yet", made)


def test_bad_input_ends_in_the_same_error_on_every_rank():
    run(2, 2, bad_input)


def test_the_names_of_torch_that_pipelines_rely_on():
    """Where one fails, see src/onefold/pipelines and engine/pipelined.py for its use."""
    assert stages.__name__ == pipelined.STAGES
    assert LEARN_SHAPES & vars(PipelineStage).keys()
    for name in (
        "clear_runtime_states", "backward_maybe_with_nosync", "perform_reduce_grad", "scale_grads",
    ):  # fmt: skip
        assert callable(getattr(PipelineStage, name))
    base = inspect.getsource(schedules._PipelineSchedule)
    single = inspect.getsource(schedules.PipelineScheduleSingle)
    several = inspect.getsource(schedules.PipelineScheduleMulti)
    runtime = inspect.getsource(schedules._PipelineScheduleRuntime)
    assert "self._n_microbatches = n_microbatches" in base
    assert "self._stage = stage" in single
    assert "self._stage.clear_runtime_states()" in single
    assert "self._stages = stages" in several
    assert "stage.clear_runtime_states()" in several
    assert "self.pipeline_order_with_comms" in runtime
