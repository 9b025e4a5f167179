"""Ranks that train on the same rows, or drop the same elements, hear of it once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.first_batch import digest_of
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn


def warned(world_size, batch_of, *, stage=3, build=Model, steps=2):
    """The warnings of a short training; `batch_of(rank, step)` is each rank's batch."""

    def body(rank):
        module = seeded(build)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        onefold.shard(module, optimizer, stage=stage)
        with torch.no_grad():
            module(batch_of(0, 0))  # an evaluation may run on equal rows
        for step in range(steps):
            next_token_loss(module, batch_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(world_size, body)
    return [str(each.message) for each in found if "ranks" in str(each.message)]


BATCHES = token_batches(8)


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_first_batches_are_named_once_with_what_to_use(world_size, stage):
    (message,) = warned(world_size, lambda rank, step: BATCHES[step], stage=stage)
    assert "ranks 0 and 1 got the same first batch" in message
    assert "DistributedSampler" in message


def test_two_of_three_ranks_with_equal_rows_are_named():
    (message,) = warned(3, lambda rank, step: BATCHES[min(rank, 1)])
    assert "ranks 1 and 2" in message


def test_rows_of_their_own_need_no_warning_nor_does_a_lone_rank():
    assert warned(2, lambda rank, step: BATCHES[2 * step + rank]) == []
    assert warned(1, lambda rank, step: BATCHES[0]) == []


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = Model(), nn.Dropout(0.1)

    def forward(self, tokens):
        return self.dropout(self.inner(tokens))


def test_equal_generators_are_named_where_dropout_draws_from_them():
    found = warned(2, lambda rank, step: BATCHES[2 * step + rank], build=WithDropout, steps=1)
    # threads share one generator, so it has moved on for one of them now and then
    assert all("torch.manual_seed(seed + rank)" in message for message in found)
    assert len(found) <= 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bool),
        torch.ones((), dtype=torch.int64),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors_of_any_dtype_have_a_digest_that_their_values_decide(tensor):
    assert digest_of({"x": [tensor]}) == digest_of(({"x": tensor.clone()},)) != ""
    assert digest_of(tensor) != digest_of(torch.zeros_like(tensor))


def test_arguments_without_tensors_have_none():
    assert digest_of(("text", {"n": 3}, torch.empty(0))) == ""
