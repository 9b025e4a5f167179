"""A gradient that a user assigns between micro-batches counts as in plain PyTorch."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from torch import nn

import onefold
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import worlds_in_turn

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, 3]


def build():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def rows():
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))


def assign(module):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)


def double(module):
    for parameter in module.parameters():
        parameter.grad = parameter.grad * 2


def whole_gradients(module):
    return [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in module.parameters()
    ]


def run(module, edits, rank=0, world_size=1, accumulate=None):
    """Run four micro-batches; `edits` are made before the micro-batch of their number."""
    for number, batch in enumerate(rows()):
        for edit in edits.get(number, ()):
            edit(module)
        loss = lambda: module(batch.chunk(world_size)[rank]).pow(2).mean().backward()
        if accumulate is None or number == 3:
            loss()
        else:
            with accumulate(module):
                loss()
    return whole_gradients(module)


CASES = {
    "before all": {0: [assign]},
    "before the last": {3: [assign]},
    "in between": {2: [assign]},
    "doubled before the last": {3: [double]},
    "doubled twice": {1: [double], 3: [double]},
    "doubled, then assigned": {1: [double], 2: [assign]},
}


@worlds_in_turn
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_an_assigned_gradient_survives_accumulate(case, stage, world_size):
    wanted = run(seeded(build), CASES[case])

    def body(rank):
        module = onefold.shard(seeded(build), stage=stage)
        return run(module, CASES[case], rank, world_size, onefold.accumulate)

    for gradients in run_ranks(world_size, body):
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
@every_rank()
def test_replacing_a_gradient_that_hides_a_sum_is_refused(rank, stage, world_size):
    module = onefold.shard(seeded(build), stage=stage)
    with pytest.raises(onefold.StateError, match=r"another tensor in its place[^$]*hint: "):
        run(module, {0: [assign], 2: [double]}, rank, world_size, onefold.accumulate)


@worlds_in_turn
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_assigned_gradient_survives_accumulate_layers(stage, world_size):
    def squared(output, _):
        return output.pow(2).mean()

    plain = seeded(build)
    assign(plain)
    for batch in rows():
        (plain(batch).pow(2).mean() / 4).backward()

    def body(rank):
        module = onefold.shard(seeded(build), stage=stage)
        assign(module)
        batches = [batch.chunk(world_size)[rank] for batch in rows()]
        onefold.accumulate_layers(module, batches, squared)
        return whole_gradients(module)

    for gradients in run_ranks(world_size, body):
        for ours, theirs in zip(gradients, whole_gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_one_rank_cleared_are_freed_before_its_next_forward(stage, precision):
    """On one H200, bf16 held them: 4 bytes a parameter, next to all activations."""
    module = seeded(build)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=stage, precision=precision)
    for batch in rows():
        module(batch).pow(2).mean().backward()
        optimizer.step()
        grads = [ref(parameter.grad) for parameter in module.parameters()]
        optimizer.zero_grad()
        loss = module(batch).pow(2).mean()
        assert [grad() for grad in grads] == [None] * len(grads)
        del loss
