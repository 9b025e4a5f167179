"""`torch.nn.utils.clip_grad_norm_` of sharded gradients: plain torch's, by few operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import onefold
from onefold.unit.logical import LogicalValues
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import cut


class Calls(TorchFunctionMode):
    """Names of torch's functions, in the order of their calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Scaled(Model):
    """Its scale has one row, so most ranks have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 50))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def model(world: int, rank: int, stage: int) -> nn.Module:
    """A model with gradients, of this rank's rows."""
    built = seeded(Scaled)
    if world > 1:
        onefold.shard(built, stage=stage)
    next_token_loss(built, cut(token_batches(steps=1)[0], world)[rank]).backward()
    return built


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clipped(
    rank: int, world: int, stage: int, **options: Any
) -> tuple[float, dict[str, Tensor], list[str]]:
    module = model(world, rank, stage)
    with Calls() as calls:
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, **options)
    grads = {name: whole(p.grad) for name, p in module.named_parameters()}
    return float(norm), grads, calls.names


@again_but("2.0-False-1", "inf-None-3", "inf-True-1", "inf-False-3")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_clipped_as_in_one_process(stage, foreach, norm_type):
    """Also where two of three ranks have no row of a parameter."""
    options = {"norm_type": norm_type, "foreach": foreach}
    norm, wanted, _ = clipped(0, 1, stage, **options)
    for found, grads, _ in run_ranks(3, lambda r: clipped(r, 3, stage, **options)):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-7)


def test_all_gradients_are_clipped_by_one_operation_each():
    """DTensor dispatches one by one at the cost of the host: 2 operations, not 2 a parameter."""
    _, _, names = run_ranks(2, lambda r: clipped(r, 2, 3))[0]
    assert names.count("_foreach_norm") == names.count("_foreach_mul_") == 1
    assert names.count("linalg_vector_norm") == 1, "of the norms"


def test_plain_gradients_among_sharded_ones_have_none_gathered(monkeypatch):
    gathered, full_tensor = [0], LogicalValues.full_tensor

    def counted(self: LogicalValues, **options: Any) -> Tensor:
        gathered.append(self.numel())
        return full_tensor(self, **options)

    def body(rank: int) -> Tensor:
        head = seeded(lambda: nn.Linear(3, 1))
        head(torch.ones(3)).sum().backward()
        both = [*model(2, rank, 3).parameters(), *head.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(both, 0.1)
        return whole(norm).clone()

    monkeypatch.setattr(LogicalValues, "full_tensor", counted)
    norms = run_ranks(2, body)
    assert max(gathered) <= 1, "norms alone"
    assert norms[0] == norms[1] > 0
