"""Buffers of messages are kept from one to the next, and no longer than something may follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.engine.registry import engine_of
from onefold.layout.ledger import Usage
from onefold.wire.exchange import SpareBuffers
from tests.support.models import WIDTH, Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded


def trained(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    onefold.shard(module, optimizer, stage=stage)
    return module, optimizer


def wire(module: nn.Module) -> Usage:
    return onefold.report(module).memory["wire"]["device"]


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_message_buffer_outlives_what_it_was_kept_for(stage):
    def body(rank: int) -> None:
        module, optimizer = trained(stage)
        batch = token_batches()[0]
        loss = next_token_loss(module, batch)
        loss.backward()
        assert wire(module).peak > 0
        assert wire(module).now == 0, "after a backward"
        optimizer.step()
        with torch.no_grad():
            module(batch)
        assert wire(module).now == 0, "after a forward that no backward follows"
        with onefold.unsharded(module):
            pass
        assert wire(module).now == 0, "after all were whole"
        with onefold.accumulate(module):
            next_token_loss(module, batch).backward()
        assert stage == 3 or wire(module).now == 0, "between micro-batches"
        module(batch)
        optimizer.zero_grad()
        optimizer.step()
        assert wire(module).now == 0, "after a forward without its backward"

    run_ranks(2, body)


@pytest.mark.usefixtures("sharing")
def test_a_backward_that_fails_leaves_no_message_buffer():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise ArithmeticError

    def body(rank: int) -> None:
        module, optimizer = trained(3)
        batch = token_batches()[0]
        next_token_loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = module.blocks[0].register_forward_hook(lambda m, args, out: Broken.apply(out))
        with pytest.raises(ArithmeticError):
            next_token_loss(module, batch).backward()
        handle.remove()
        module(batch)
        engine_of(module).rest()
        assert wire(module).now == 0

    run_ranks(2, body)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_inference_mode_has_gathered_is_not_kept_for_training(stage):
    def body(rank: int) -> list[float]:
        module, optimizer = trained(stage)
        found = []
        for batch in token_batches():
            with torch.inference_mode():
                module.blocks[0](torch.zeros(1, 3, WIDTH))
            loss = next_token_loss(module, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    first, second = run_ranks(2, body)
    assert first == second


def test_a_spare_buffer_is_taken_once_and_freed_after_the_next_message():
    counted: list[int] = []
    spare = SpareBuffers[str](counted.append)
    first = spare.take_spare("int8", 64, lambda: "first")
    spare.give("int8", 64, first, keeps=True)
    assert spare.take_spare("fp32", 256, lambda: "other kind") == "other kind"
    assert spare.take_spare("int8", 64, lambda: "second") == "first"
    assert spare.take_spare("int8", 64, lambda: "second") == "second"
    assert counted == [64, 256, 64]
    spare.give("int8", 64, "first", keeps=True)
    spare.give("int8", 64, "second", keeps=False)
    spare.clear()
    assert counted[3:] == [-64, -64]
