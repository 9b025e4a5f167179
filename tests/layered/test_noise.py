"""The noise scale of `onefold.measure_noise`, against gradients of single micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.engine.noise import NoiseScale
from onefold.engine.registry import engine_of
from tests.layered.test_layered import (
    assert_same,
    gradients,
    layers,
    loop,
    microbatches,
    next_token,
    notes,
    sharded,
)
from tests.support.models import Model
from tests.support.ranks import run_ranks, seeded

LENGTHS = (6, 6, 6)


def squares(batches: list[Tensor], number: int) -> Tensor:
    """Squared norm of the gradient of a mean over `number` micro-batches, in one process."""
    alone = seeded(Model)
    for batch in batches:
        (next_token(alone(batch), batch) / number).backward()
    return torch.stack([p.grad.double().square().sum() for p in alone.parameters()]).sum()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("stage", "run", "choices"),
    [
        (0, loop, {}),
        (1, loop, {}),
        (2, loop, {}),
        (3, loop, {}),
        (3, layers, {}),
        (3, loop, {"offload": "cpu"}),
        (3, layers, {"offload": "optimizer"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_noise_scale_is_that_of_the_two_batch_estimator(stage, run, choices):
    """Small batches are a rank's rows of a step, or its micro-batches where each is reduced."""
    splits = stage >= 2 and run is loop

    def body(rank: int) -> None:
        module, optimizer = sharded(stage=stage, **choices)
        noise = onefold.measure_noise(module)
        assert onefold.measure_noise(module) is noise
        batches, ranks = microbatches(rank, lengths=LENGTHS), dist.get_world_size()
        loss = run(module, batches)
        if not engine_steps_early(module):
            other = sharded(stage=stage, **choices)[0]
            assert torch.equal(run(other, batches), loss)
            assert_same(gradients(module), gradients(other))
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)  # norms are older than this
        assert noise.batches is None
        optimizer.step()
        parts = [squares([each], 1) for each in batches] if splits else [squares(batches, 3)]
        small = torch.stack(parts).sum() / len(parts) / ranks
        dist.all_reduce(small)
        everyone = [batch for r in range(ranks) for batch in microbatches(r, lengths=LENGTHS)]
        big, n = squares(everyone, 3 * ranks).item(), ranks * len(parts)
        wanted = (small.item() - big) / (n * big - small.item())
        assert noise.num_microbatches == 3
        assert noise.batches == pytest.approx(wanted, rel=1e-3)
        assert noise.suggested_microbatches == max(1, round(3 * wanted))
        assert "gradient noise scale" in notes(module)

    run_ranks(3, body)


def engine_steps_early(module: nn.Module) -> bool:
    return engine_of(module).policy.steps_in_backward


def test_a_step_on_gradients_that_were_not_cleared_is_left_out():
    def body(rank: int) -> None:
        module, optimizer = sharded(stage=3)
        noise = onefold.measure_noise(module)
        for step in range(3):
            loop(module, microbatches(rank, step))
            optimizer.step()
            assert noise.steps == 1
        optimizer.zero_grad()
        loop(module, microbatches(rank))
        optimizer.zero_grad()  # cleared without a step
        loop(module, microbatches(rank, lengths=(4,) * 2))
        optimizer.step()
        assert (noise.steps, noise.num_microbatches) == (2, 2)

    run_ranks(2, body)


class Mean(nn.Module):
    """Its gradient is the mean of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(500))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows @ self.weight).mean()


@pytest.mark.parametrize(("world_size", "stage"), [(2, 2), (2, 3), (1, 3)])
def test_rows_of_known_noise_are_found_to_have_it(world_size, stage):
    """Rows of mean 1 and variance 16 in 500 directions: |G|^2 = 500, tr(Sigma) = 8000."""

    def body(rank: int) -> None:
        module: Any = Mean()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        onefold.shard(module, optimizer, stage=stage)
        noise = onefold.measure_noise(module)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(60):
            for last in (False, False, False, True):
                with nullcontext() if last else onefold.accumulate(module):
                    (module(1 + 4 * torch.randn(2, 500, generator=generator)) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert noise.batches == pytest.approx(16 / (8 * world_size), rel=0.25)

    run_ranks(world_size, body)


def test_modules_without_two_gradients_to_compare_are_refused():
    with pytest.raises(onefold.ConfigError, match="two gradients a step"):
        onefold.measure_noise(sharded(stage=1)[0])
    with pytest.raises(onefold.ConfigError, match="a module that trains"):
        onefold.measure_noise(onefold.stream(Model()))
    with pytest.raises(onefold.StateError, match=r"onefold\.shard"):
        onefold.measure_noise(Model())


def test_gradients_that_are_not_finite_are_left_out():
    module, optimizer = sharded(stage=3)
    noise = onefold.measure_noise(module)
    for value in (torch.nan, 1.0):
        for batch in microbatches(0, lengths=LENGTHS):
            (next_token(module(batch), batch) * value / 3).backward()
        optimizer.step() if value == 1.0 else None
        optimizer.zero_grad()
    assert isinstance(noise, NoiseScale)
    assert noise.steps == 1
    assert noise.num_microbatches == 3
