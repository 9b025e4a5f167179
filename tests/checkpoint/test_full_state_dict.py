"""`full_state_dict`: one plain state dict, whatever is sharded and wherever it rests."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import onefold
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn


class WithState(nn.Module):
    """Tied weights, a buffer, one that is not saved, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(tied=True)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens):
        return self.inner(tokens)

    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state):
        assert state == {"epoch": 3}


def gather(rank, choices, **wanted):
    module = seeded(WithState)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, **choices)
    for batch in token_batches(2):
        next_token_loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = onefold.full_state_dict(module, **wanted)
    with onefold.unsharded(module):
        plain = {name: value for name, value in module.state_dict().items()}
        values = {n: v.clone() if torch.is_tensor(v) else v for n, v in plain.items()}
    return found, values


PLACES = [{"stage": stage} for stage in (0, 1, 2, 3)] + [
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3, "offload": "cpu", "precision": "bf16"},
]


@again_but(
    "{'stage': 2}-3", "{'stage': 3}-1", "{'stage': 2, 'offload': 'optimizer'}-2",
    "{'stage': 3, 'offload': 'cpu', 'precision': 'bf16'}-3",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("choices", PLACES, ids=str)
def test_rank_0_gets_every_value_and_the_others_nothing(world_size, choices):
    (found, values), *others = run_ranks(world_size, gather, choices)
    assert list(found) == list(values)
    for name, value in values.items():
        if torch.is_tensor(value):
            assert type(found[name]) is torch.Tensor
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value
    assert found["inner.head.weight"] is found["inner.embed.weight"]
    assert all(theirs == {} for theirs, _ in others)
    plain = seeded(WithState)
    plain.load_state_dict(found)


def test_every_rank_gets_the_values_if_asked():
    for found, values in run_ranks(2, partial(gather, rank0_only=False), {"stage": 3}):
        assert list(found) == list(values)
        assert all(torch.equal(found[n], v) for n, v in values.items() if torch.is_tensor(v))


def test_values_share_no_memory_with_the_module():
    def body(rank):
        module = onefold.shard(seeded(WithState), stage=3)
        found = onefold.full_state_dict(module)
        for value in found.values():
            if torch.is_tensor(value):
                value.zero_()
        again = onefold.full_state_dict(module)
        assert all(v.any() for n, v in again.items() if n.endswith("embed.weight"))
        assert again["scale"].all()

    run_ranks(1, body)


def test_inside_unsharded_it_says_what_to_call():
    def body(rank):
        module = onefold.shard(seeded(WithState), stage=3)
        with (
            onefold.unsharded(module),
            pytest.raises(onefold.StateError, match=r"rank \d.*\n.*state_dict\(\)"),
        ):
            onefold.full_state_dict(module)

    run_ranks(2, body)
