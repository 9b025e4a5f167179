"""Quantized gradients that are not finite, whoever steps: one bad step alone is skipped."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.wire_config import PRESETS
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

WAYS = {
    "int8": (None, 3, Wire(weights="int8", gradients="int8")),
    "recommended": ((2, 2), 3, PRESETS["recommended"]),
    "zero++diff": ((2, 2), 2, PRESETS["zero++diff"]),
    "secondary": ((2, 2), 3, Wire(gradients=("exact", "int8"), secondary="optimizer")),
}
WORLD = 4


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 2))


def shard(module, optimizers, way, **options):
    shape, stage, wire = way
    mesh = init_device_mesh("cpu", shape) if shape else None
    onefold.shard(module, optimizers, stage=stage, mesh=mesh, wire=wire, **options)


def rows_of(module):
    return [p.to_local().clone() for p in module.parameters()]


def moves(before, after):
    return [not torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel()]


@again_but("int8", "secondary")
@pytest.mark.filterwarnings("ignore:step . is skipped")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_not_finite_is_stepped_by_no_optimizer_of_the_module(way):
    """The second of two optimizers, and a param group of its own, skip what the first skips."""

    def body(rank):
        module = seeded(net)
        first, *rest, last = module.parameters()
        groups = [{"params": rest}, {"params": [last], "lr": 0.1}]
        optimizers = [torch.optim.AdamW([first]), torch.optim.SGD(groups, lr=0.01)]
        shard(module, optimizers, way)
        moved = []
        for step in range(3):
            before = rows_of(module)
            x = torch.linspace(-1, 1, 16).view(2, 8)
            x[0, 0] = float("nan") if step == 1 and rank == 1 else 1.0
            module(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            after = rows_of(module)
            assert all(rows.isfinite().all() for rows in after)
            moved.append(moves(before, after))
        assert all(moved[0] + moved[2])
        assert not any(moved[1])

    run_ranks(WORLD, body)


@again_but("int8", "secondary")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_loss_scale_skips_what_overflows_on_one_rank_and_nothing_else(way):
    """In the first of two micro-batches; gradients are zeroed in place, so nothing else tells."""

    def body(rank):
        module = seeded(net)
        optimizer = torch.optim.AdamW(module.parameters())
        shard(module, optimizer, way, precision="fp16")
        scaler = onefold.GradScaler("cpu", init_scale=2.0**10)
        told = []
        for step in range(4):
            before = rows_of(module)
            for micro in range(2):
                loss = module(torch.linspace(-1, 1, 16).view(2, 8)).float().square().mean()
                if (step, rank, micro) == (1, 1, 0):
                    loss = loss * 1e38
                with onefold.accumulate(module) if micro == 0 else nullcontext():
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
            after = rows_of(module)
            assert all(rows.isfinite().all() for rows in after)
            told.append((any(moves(before, after)), scaler.get_scale()))
        return told

    wanted = [(True, 1024.0), (False, 512.0), (True, 512.0), (True, 512.0)]
    assert run_ranks(WORLD, body) == [wanted] * WORLD
