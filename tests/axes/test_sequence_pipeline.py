"""Stages of a pipeline over a split sequence, by a schedule of torch as it comes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import onefold
from tests.axes.test_sequence import (
    LENGTH,
    UNEVEN,
    Net,
    Work,
    alone,
    assert_close,
    gradients,
    loss_sum,
)
from tests.support.ranks import run_processes, seeded


class First(nn.Module):
    """Tokens and their positions [rows, positions, 2] to the output of the first block."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.tokens, self.places = net.tokens, net.places
        self.blocks = nn.ModuleDict({"0": net.blocks[0]})

    def forward(self, both: Tensor) -> Tensor:
        return self.blocks["0"](self.tokens(both[..., 0]) + self.places(both[..., 1]), None)


class Last(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleDict({"1": net.blocks[1]}), net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks["1"](x, None))


@pytest.mark.process
def test_stages_exchange_their_own_heads_and_have_the_gradients_of_one_process():
    run_processes(4, train)


def train(rank: int) -> None:
    work = Work(ignored=UNEVEN)
    wanted, _ = alone(work)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    index = mesh.get_local_rank("pp")
    module = (First, Last)[index](seeded(Net))
    onefold.shard(module, stage=2, mesh=mesh["cp"])
    sequence = onefold.split_sequence(module, mesh["cp"], inputs=False)
    tokens, labels = work.batch()
    positions = torch.arange(LENGTH)[None].expand(4, -1)
    mine = sequence.labels(labels)
    count = (mine != -100).sum()  # of all micro-batches

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return onefold.weigh(loss_sum(logits, target), count, mesh=mesh["cp"])

    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss, scale_grads=False)
    if index == 0:
        schedule.step(sequence.split(torch.stack([tokens, positions], -1)))
    else:
        schedule.step(target=mine)
    got = gradients(module)
    assert got.keys() == dict(module.named_parameters()).keys()
    assert_close(got, {name: wanted[name] for name in got}, 1e-12)
