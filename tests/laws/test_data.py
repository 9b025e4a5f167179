"""`.data` of sharded weights: a look changes nothing and asks nothing of other ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import onefold
from onefold import Wire
from onefold.engine.registry import engine_of
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but

X = torch.linspace(-1, 1, 16).view(2, 8)
WAYS = [
    {"stage": 2},
    {"stage": 3, "precision": "bf16"},
    {"stage": 2, "wire": Wire(weights="int8-diff")},
    {"stage": 3, "mesh": (2, 2), "wire": Wire(weights="int8-diff")},
    {"stage": 3, "mesh": (2, 2), "wire": Wire(secondary="optimizer"), "precision": "bf16"},
]


class Looking(nn.Linear):
    """Looks at its own weight while it runs, where it was told to."""

    looks = False

    def forward(self, x):
        if self.looks:
            self.weight.data.norm().item()
        return super().forward(x)


def start(way):
    module = seeded(lambda: nn.Sequential(Looking(8, 32), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = init_device_mesh("cpu", way["mesh"]) if "mesh" in way else None
    onefold.shard(module, optimizer, **{**way, "mesh": mesh})
    return module, optimizer


def whole(module):
    with onefold.unsharded(module):
        return [p.detach().clone() for p in module.parameters()]


@again_but("bf16", "secondary")
@pytest.mark.parametrize("way", WAYS, ids=["2", "bf16", "diff", "nodes", "secondary"])
def test_a_look_on_one_rank_changes_no_bit_and_sends_no_byte(way):
    """Inside forward and between two; what rests is not rounded to what computes."""

    def body(rank, looks):
        module, optimizer = start(way)
        module[0].looks = looks and rank == 1
        for _ in range(2):
            for _ in range(2):
                module(X).square().sum().backward()
                if looks and rank == 1:
                    assert all(p.data.shape == p.shape for p in module.parameters())
            optimizer.step()
            optimizer.zero_grad()
        traffic = engine_of(module).ledger.traffic
        return whole(module), {name: each.sent_nbytes for name, each in traffic.items()}

    for got, wanted in zip(run_ranks(4, body, True), run_ranks(4, body, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got[0], wanted[0], strict=True))
        assert got[1] == wanted[1]


def _in_inference_mode(p):
    with torch.inference_mode():
        p.data.fill_(0.5)


EDITS = {
    "in place": lambda p: p.data.fill_(0.5),
    "by lists": lambda p: [torch._foreach_zero_([p.data]), torch._foreach_add_([p.data], 0.5)],
    "of a column": lambda p: p.data[:, :].fill_(0.5),
    "of an alias": lambda p: p.data.detach().fill_(0.5),
    "of own rows": lambda p: p.data.to_local().fill_(0.5),
    "in inference mode": _in_inference_mode,
}


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
@every_rank(4)
def test_an_edit_by_way_of_data_is_what_the_next_forward_reads(rank, way):
    module, _ = start(way)
    weight, bias = module[1].weight, module[1].bias
    kept = weight.data
    with torch.no_grad():
        module[0].weight.zero_()
        module[0].bias.fill_(1.0)
        bias.zero_()
        for name, edit in {**EDITS, "of what was kept": lambda p: kept.fill_(0.5)}.items():
            weight.zero_()
            torch.testing.assert_close(module(X), torch.zeros(2, 8), rtol=0, atol=0.1, msg=name)
            edit(weight)
            wanted = torch.full((2, 8), 0.5 * 32)
            torch.testing.assert_close(module(X), wanted, rtol=0.01, atol=0, msg=name)


@pytest.mark.parametrize("way", WAYS[1:2] + WAYS[3:], ids=str)
@every_rank(4)
def test_an_edit_inside_forward_changes_the_elements_that_it_changes(rank, way):
    """The others stay as exact as they rest, and backward computes with what forward has left."""

    class Clamping(nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(max=0.1)
            return super().forward(x)

    module = seeded(lambda: nn.Sequential(Clamping(8, 32), nn.Linear(32, 8)))
    before = module[0].weight.detach().clone()
    mesh = init_device_mesh("cpu", way["mesh"]) if "mesh" in way else None
    onefold.shard(module, **{**way, "mesh": mesh})
    for _ in range(2):
        module(X).sum().backward()
        after = whole(module)[0]
        is_kept = before < 0.09
        assert torch.equal(after[is_kept], before[is_kept])
        torch.testing.assert_close(after, before.clamp(max=0.1), rtol=0, atol=4e-4)


@every_rank(2)
def test_a_copy_of_data_is_a_dtensor_whose_edits_are_its_own(rank):
    module, _ = start({"stage": 3})
    weight, unit = module[0].weight, engine_of(module).units[0]
    before = weight.full_tensor()
    copied = copy.deepcopy(weight.data)
    assert isinstance(copied, DTensor)
    edits = unit.edits.all()
    copied.zero_()
    assert unit.edits.all() == edits
    assert torch.equal(weight.full_tensor(), before)
    assert not copied.full_tensor().any()
