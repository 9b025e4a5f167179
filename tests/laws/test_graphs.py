"""Graphs that live side by side, or run twice, where a weight is used outside its own module.

A head that reads an embedding by `x @ embed.weight.t()` leaves the weight itself in the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import onefold
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn

VOCAB, WIDTH = 50, 8


class Tied(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x) @ self.embed.weight.t()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return model(torch.randint(0, VOCAB, (3, 5), generator=made)).square().mean()


def in_turn(model: nn.Module) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    first.backward()
    second.backward()


def in_reverse(model: nn.Module) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    second.backward()
    first.backward()


def twice(model: nn.Module) -> None:
    loss = loss_of(model, 1)
    loss.backward(retain_graph=True)
    loss.backward()


def around_a_look(model: nn.Module) -> None:
    loss = loss_of(model, 1)
    with onefold.unsharded(model):
        pass
    loss.backward()


def after_a_forward_alone(model: nn.Module) -> None:
    loss = loss_of(model, 1)
    with torch.no_grad():
        loss_of(model, 2)
    loss.backward()


def gradients(model: nn.Module, run: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    run(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


PROGRAMS = [in_turn, in_reverse, twice, around_a_look, after_a_forward_alone]


@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("units", [None, lambda module: True], ids=["blocks", "modules"])
@pytest.mark.parametrize("run", PROGRAMS)
def test_a_weight_in_several_graphs_has_the_gradients_of_one_process(run, units, stage, world_size):
    plain = seeded(Tied)
    wanted = gradients(
        plain, run if run is not around_a_look else lambda m: loss_of(m, 1).backward()
    )

    def body(rank: int) -> dict[str, Tensor]:
        model = seeded(Tied)
        onefold.shard(model, stage=stage, units=units)
        return gradients(model, run)

    for found in run_ranks(world_size, body):
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)


@worlds_in_turn
@pytest.mark.parametrize("width", [WIDTH, 512], ids=["small weights", "large weights"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_a_graph_from_before_a_step_is_an_error_that_says_so(width, stage, offload):
    """Large weights travel alone, straight to where modules read them, and rest in own pages."""

    def body(rank: int) -> str:
        model = seeded(Tied, width)
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=stage, offload=offload)
        loss = loss_of(model, 1)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(onefold.OnefoldError) as error:
            loss.backward()
        return str(error.value)

    for message in run_ranks(2, body):
        assert "run backward before the optimizer steps" in message, message
