"""Two axes in real gloo processes, 2 x 2: the same bits as threads, and ends that reach all."""

from __future__ import annotations

import os

import pytest
import torch

from onefold import TierError, Wire, WireError
from onefold.engine.registry import engine_of
from onefold.wire_config import PRESETS
from tests.checkpoint.test_axes_checkpoint import same, start, step, whole_weights
from tests.support.models import token_batches
from tests.support.ranks import run_processes, run_ranks, shorten_timeout

pytestmark = pytest.mark.process
SHAPE, WORLD = (2, 2), 4
WIRES = [
    Wire(secondary="optimizer"),
    Wire(gradients=("exact", "int8"), secondary="optimizer"),
    PRESETS["hybrid"],
    PRESETS["zero++diff"],
]


def train(rank: int, wire: Wire) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches."""
    module, optimizer = start(SHAPE, 3, wire)
    for batch in token_batches(2, rows=16):
        step(rank, WORLD, module, optimizer, batch.chunk(2))
    return whole_weights(module)


def train_all(rank: int, wanted: list[dict[str, torch.Tensor]]) -> None:
    for wire, weights in zip(WIRES, wanted, strict=True):
        same(train(rank, wire), weights)


def test_processes_have_the_bits_of_threads_under_every_kind_of_wire():
    run_processes(WORLD, train_all, [run_ranks(WORLD, train, wire)[0] for wire in WIRES])


def lose_a_disk(rank: int) -> None:
    """Rank 1's tier fails, and its node ends; the other node's ranks are in their backward."""
    module, optimizer = start(SHAPE, 3, Wire(secondary="optimizer"), offload="optimizer")
    batches = token_batches(2, rows=16)
    step(rank, WORLD, module, optimizer, [batches[0]])
    unit = engine_of(module).units[0]
    unit.join_step()
    if rank == 1:
        unit.failure = TierError("expected a disk, got none\nhint: a new one")
    with pytest.raises(TierError if rank < 2 else WireError) as caught:
        step(rank, WORLD, module, optimizer, [batches[1]])
    told = str(caught.value)
    assert "expected a disk" in told if rank < 2 else f"on rank {rank} to complete" in told, told
    assert "imed out" not in told, "the end of a connection is seen at once"
    os._exit(0)  # what the process does that does not catch it, and says nothing


def test_a_tier_that_fails_on_one_node_ends_the_others_as_its_processes_end():
    run_processes(WORLD, lose_a_disk)


def edit_alone(rank: int) -> None:
    """Rank 0 edits its rows of a weight that stays from one forward to the next."""
    module, _ = start(None, 2, None)
    tokens = token_batches(1)[0]
    with torch.no_grad():
        module(tokens)
        shorten_timeout(4)
        if rank == 0:
            module.norm.weight.data.mul_(2.0)
            with pytest.raises(WireError, match=r"on rank 0, where 'norm.weight' was edited, to"):
                module(tokens)
        else:
            module(tokens)
    os._exit(0)


def test_an_edit_on_one_rank_alone_is_an_error_that_names_the_parameter():
    run_processes(2, edit_alone)
