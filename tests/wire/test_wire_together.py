"""Quantized wires with everything else that a unit can be: tiers, recompute, odd parameters, saves.

What the rest of a run does must not change a bit of it, as under an exact wire: what is quantized,
and when, hangs on values alone. Losses are near those of exact messages (tests/wire/test_wire.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import Offload, Wire
from onefold.wire_config import PRESETS
from tests.support.models import VOCAB, WIDTH, Block, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

WAYS = {
    "one axis": (None, 3, Wire(weights="int8", gradients="int4+h")),
    "zero++": ((2, 2), 3, PRESETS["zero++"]),
    "differences": ((2, 2), 3, PRESETS["recommended"]),
    "stage 2": ((2, 2), 2, PRESETS["zero++diff"]),
    "replicas": ((2, 2), 3, Wire(gradients=("exact", "int8"), secondary="optimizer")),
}
WORLD = 4
BATCHES = token_batches(2, rows=16)


class Zoo(nn.Module):
    """Tied, frozen, unused, scalar, tiny and empty parameters around an ordinary block."""

    recompute: bool | None = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.tiny = nn.Parameter(torch.ones(1, WIDTH))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            run = self.recompute
            x = block(x) if run is None else checkpoint(block, x, use_reentrant=run)
        return self.head(x + self.frozen(x) * self.tiny)


def train(rank, way, *, recompute=None, between=lambda *_: None, **options):
    """Two steps, of two micro-batches each, clipped; losses and whole weights."""
    shape, stage, wire = WAYS[way]
    module = seeded(Zoo)
    module.recompute = recompute
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = init_device_mesh("cpu", shape) if shape else None
    onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=wire, **options)
    losses = []
    for step, batch in enumerate(BATCHES):
        for index, micro in enumerate(batch.chunk(2)):
            with onefold.accumulate(module) if index == 0 else nullcontext():
                loss = next_token_loss(module, micro.chunk(WORLD)[rank])
                loss.backward()
                losses.append(loss.item())
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        between(module, optimizer, step)
    with onefold.unsharded(module):
        return losses, [p.detach().clone() for p in module.parameters()]


def wanted_of(way, known={}):  # noqa: B006 - run once for all tests
    """The run with nothing beside it; all ranks have the same weights."""
    if way not in known:
        runs = run_ranks(WORLD, train, way)
        for _, weights in runs[1:]:
            assert all(map(torch.equal, weights, runs[0][1]))
        known[way] = runs
    return known[way]


def same_bits(got, wanted):
    for (losses, weights), (wanted_losses, wanted_weights) in zip(got, wanted, strict=True):
        assert losses == wanted_losses
        assert all(map(torch.equal, weights, wanted_weights))


BESIDE = {
    "recompute": {"recompute": False},
    "reentrant recompute": {"recompute": True},
    "states": {"offload": "optimizer"},
    "cpu": {"offload": "cpu"},
    "fraction": {"offload": Offload(optimizer="cpu", fraction=0.5)},
    "disk": {"offload": Offload("disk", "disk", disk="own")},
}


@again_but("one axis-disk", "zero++-cpu", "replicas-cpu")
@pytest.mark.parametrize(
    ("way", "beside"),
    [
        ("one axis", "disk"), ("one axis", "recompute"), ("zero++", "reentrant recompute"),
        ("zero++", "cpu"), ("differences", "fraction"),
        ("stage 2", "states"), ("replicas", "cpu"),
    ],
)  # fmt: skip
def test_where_state_rests_and_what_is_recomputed_changes_no_bit(way, beside, tmp_path):
    options = dict(BESIDE[beside])
    if beside == "disk":
        options["offload"] = replace(options["offload"], disk=tmp_path)
    same_bits(run_ranks(WORLD, lambda rank: train(rank, way, **options)), wanted_of(way))


@again_but("stage 2")
@pytest.mark.parametrize("way", ["zero++", "differences", "stage 2"])
def test_looking_saving_and_evaluating_between_steps_changes_no_bit(way, tmp_path):
    """Weights are gathered anew after a load or a save, one difference more: so these first."""

    def between(module, optimizer, step):
        module.load_state_dict(module.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        onefold.save(tmp_path / f"c{step}", module, optimizer)
        onefold.save_pretrained(module, tmp_path / f"p{step}")
        with torch.no_grad():
            module(BATCHES[0][:2])
        with onefold.unsharded(module), torch.no_grad():
            module(BATCHES[0][:2])

    same_bits(run_ranks(WORLD, lambda rank: train(rank, way, between=between)), wanted_of(way))


def test_loading_what_was_saved_changes_no_bit_of_weights_sent_whole(tmp_path):
    """Differences begin anew with an exact message (tests/checkpoint/test_axes_checkpoint.py)."""
    way = "one axis"

    def between(module, optimizer, step):
        onefold.save(tmp_path / f"c{step}", module, optimizer)
        onefold.load(tmp_path / f"c{step}", module, optimizer)

    same_bits(run_ranks(WORLD, lambda rank: train(rank, way, between=between)), wanted_of(way))


def test_tiled_weights_travel_exactly_beside_quantized_ones():
    """The tied embedding is tiled, so results differ from quantized ones by the rounding."""
    way = "zero++"
    got = run_ranks(WORLD, lambda rank: train(rank, way, offload=Offload(tile=2048)))
    for (losses, weights), (wanted, _) in zip(got, wanted_of(way), strict=True):
        assert losses == pytest.approx(wanted, rel=0.03)
        assert all(map(torch.equal, weights, got[0][1]))
