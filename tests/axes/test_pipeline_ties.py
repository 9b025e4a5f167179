"""A weight on the first and on the last stage of a pipeline trains as one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import onefold
from onefold.axes.clipping import IS_COPY
from onefold.errors import ConfigError, OnefoldError
from tests.support.pipelines import MICROBATCHES, SCHEDULES, WIDTH, Block, mesh_of
from tests.support.programs.meshes import EACH_ONE
from tests.support.ranks import run_processes, seeded

pytestmark = pytest.mark.process
WORDS, ROWS = 10, 8
TIED = [("embed.weight", "head.weight")]


class Part(nn.Module):
    """A stage: an embedding, a block or a head, or several."""

    def __init__(self, *, embeds: bool = False, heads: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if embeds else None
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if heads else None

    def forward(self, x):
        x = self.block(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


def parts(num):
    made = seeded(lambda: [Part(embeds=i == 0, heads=i == num - 1) for i in range(num)])
    return [part.double() for part in made]


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens(dp, seed=1):
    made = seeded(lambda: torch.randint(WORDS, (2, dp, ROWS, 3)), seed=seed)
    return made[0], made[1]


def stages_of(kind, stage, mesh, made=None):
    """This rank's stage modules, sharded, their optimizers and a schedule."""
    pp, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    num = size if kind in EACH_ONE else 2 * size
    mine = (
        [pp] if kind in EACH_ONE else [pp, num - 1 - pp if kind == "ZBVZeroBubble" else pp + size]
    )
    made = made or parts(num)
    optimizers, stages = [], []
    for i in mine:
        optimizers.append(torch.optim.AdamW(made[i].parameters(), lr=1e-2))
        onefold.shard(made[i], optimizers[-1], stage=stage, mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        stages.append(PipelineStage(made[i], i, num, torch.device("cpu"), group=group))
    built = SCHEDULES[kind](stages[0] if kind in EACH_ONE else stages, MICROBATCHES, loss_fn=loss)
    return {i: made[i] for i in mine}, optimizers, built


def step(schedule, modules, num, data, dp):
    inputs, targets = data
    target = {"target": targets[dp]} if num - 1 in modules else {}
    schedule.step(*([inputs[dp]] if 0 in modules else []), **target)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def one_process(num):
    wanted = nn.Sequential(*parts(num))
    wanted[-1].head.weight = wanted[0].embed.weight
    return wanted, torch.optim.AdamW(wanted.parameters(), lr=1e-2)


def trains_as_one(mesh):
    dp, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for kind, stage in [
        ("1F1B", 0), ("GPipe", 2), ("ZBVZeroBubble", 3),
    ]:  # fmt: skip
        num = mesh["pp"].size() * (1 if kind in EACH_ONE else 2)
        wanted, optimizer = one_process(num)
        modules, optimizers, schedule = stages_of(kind, stage, mesh)
        onefold.pipeline(schedule, tied=TIED)
        copies = {
            i: getattr(modules[i], name).weight
            for i, name in ((0, "embed"), (num - 1, "head")) if i in modules
        }  # fmt: skip
        assert [hasattr(each, IS_COPY) for each in copies.values()] == [i > 0 for i in copies]
        for seed in range(4):
            data = tokens(size, seed)
            optimizer.zero_grad()
            loss(wanted(data[0].flatten(0, 1)), data[1].flatten(0, 1)).backward()
            for each in optimizers:
                each.zero_grad()
            step(schedule, modules, num, data, dp)
            grad = wanted[0].embed.weight.grad
            for copy in copies.values():
                torch.testing.assert_close(full(copy.grad), grad, rtol=1e-12, atol=1e-13)
            optimizer.step()
            for each in optimizers:
                each.step()
        for i, module in modules.items():
            for name, parameter in module.named_parameters():
                reference = wanted[i].get_parameter(name)
                torch.testing.assert_close(full(parameter.data), reference, rtol=1e-9, atol=1e-11)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [full(each.data) for each in copies.values()])
        found = [each for several in everyone for each in several]
        assert len(found) == 2 * size
        assert all(torch.equal(each, found[0]) for each in found), (kind, stage)


def test_tied_weights_have_the_gradients_of_one_process_and_the_same_bits():
    run(2, 2, trains_as_one)


def adds_up(mesh):
    """Two steps of the schedule without a step of the optimizer: nothing counts twice."""
    dp, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for stage in (0, 3):
        modules, _, schedule = stages_of("1F1B", stage, mesh)
        schedule.scale_grads = False
        onefold.pipeline(schedule, tied=TIED)
        name, module = ("embed", modules[0]) if 0 in modules else ("head", modules[1])
        data = tokens(size)
        step(schedule, modules, 2, data, dp)
        once = full(getattr(module, name).weight.grad).clone()
        step(schedule, modules, 2, data, dp)
        torch.testing.assert_close(full(getattr(module, name).weight.grad), 2 * once)


def test_gradients_of_two_steps_add_up():
    run(2, 2, adds_up)


def undeclared(mesh):
    made = parts(2)
    made[1].head.weight.data.copy_(made[0].embed.weight.data)
    made[1].embed, made[1].head = made[1].head, None  # as a library that cuts one model does
    made[1].forward = lambda x: made[1].embed(made[1].block(x))
    _, _, schedule = stages_of("1F1B", 3, mesh, made)
    with pytest.raises(ConfigError, match=r"'embed[.]weight' on one stage alone"):
        onefold.pipeline(schedule)
    onefold.pipeline(schedule, tied=["embed.weight"])
    # copies of one stage from one seed are no tie
    alike = [parts(3)[1] for _ in range(2)]
    onefold.pipeline(stages_of("1F1B", 3, mesh, alike)[2])
    # one tensor on two stages of a rank
    made = parts(4)
    made[3].head.weight = made[0].embed.weight
    if mesh["pp"].get_local_rank() == 0:
        with pytest.raises(OnefoldError, match="weight"):
            onefold.pipeline(stages_of("ZBVZeroBubble", 3, mesh, made)[2])


def test_stages_that_share_a_weight_must_say_so():
    run(2, 2, undeclared)


def run(pp, dp, body):
    run_processes(pp * dp, _in_process, pp, dp, body)


def _in_process(_, pp, dp, body):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "ranks .* got the same first batch")
    body(mesh_of(pp, dp))
