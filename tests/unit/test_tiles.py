"""Weights that are never whole: used in row blocks, with the names and results of others."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold import ConfigError, Offload, StateError
from onefold.engine.registry import engine_of
from tests.support.programs.blocks import By
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

ROWS, WIDTH = 131, 48


class Wide(nn.Module):
    """A large embedding, a large head (tied or not), and small layers between."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


TILE = 16 * WIDTH * 4


def run(
    offload: Any, *, tied: bool = False, world_size: int = 1, clip: bool = True, **options: Any
):
    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        module = seeded(Wide, tied)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if offload is not None:
            onefold.shard(module, optimizer, offload=offload, **options)
        losses = []
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(0, ROWS, (6, 5), generator=generator).chunk(world_size)[rank]
            loss = F.cross_entropy(module(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world_size > 1:
                dist.all_reduce(loss.data)
            losses.append(loss.item() / world_size)
        return losses, {name: whole(p) for name, p in module.named_parameters()}

    return body


def whole(p: Any) -> Tensor:
    return (p.full_tensor() if isinstance(p, dist.tensor.DTensor) else p).detach().clone()


def close(wanted: Any, got: Any, tolerance: float = 1e-5) -> None:
    assert wanted[0] == pytest.approx(got[0], rel=tolerance)
    assert wanted[1].keys() == got[1].keys()
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(tensor, got[1][name], rtol=1e-4, atol=2e-5)


@again_but("3-False")
@worlds_in_turn
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tiled_weights_train_as_whole_ones_do(world_size, tied, tmp_path):
    wanted = run(None, tied=tied)(0)
    offloads = [Offload("disk", "disk", disk=tmp_path, tile=TILE)]
    if world_size > 1:
        offloads += [Offload(tile=TILE), Offload("cpu", tile=TILE)]
    for offload in offloads:
        for got in run_ranks(world_size, run(offload, tied=tied, world_size=world_size)):
            close(wanted, got)


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_tiles_are_stepped_in_backward_once_their_last_use_is_over(world_size, tmp_path):
    early = Offload("disk", "disk", disk=tmp_path, tile=TILE, step_in_backward=True)
    for tied in (False, True):
        wanted = run(None, tied=tied, clip=False)(0)
        for got in run_ranks(world_size, run(early, tied=tied, clip=False, world_size=world_size)):
            close(wanted, got)


@again_but("in its module-3", "outside-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("is_outside", [False, True], ids=["in its module", "outside"])
def test_hooks_of_gradients_run_once_a_backward_for_all_uses_of_a_weight(world_size, is_outside):
    def body(rank: int, is_sharded: bool) -> tuple[list[Tensor], int]:
        num_calls = 0

        def halve(p: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            p.grad.mul_(0.5)

        module = seeded(Wide, True)
        if is_sharded:
            onefold.shard(module, offload=Offload(tile=TILE))
        module.embed.weight.register_post_accumulate_grad_hook(halve)
        shown = []
        for seed in range(2):  # two backwards add up, and the sum is halved as well
            y = module(torch.arange(6).view(2, 3) + seed)
            if is_outside:
                y = F.linear(torch.ones(2, 3, WIDTH), module.embed.weight) * y
            y.pow(2).mean().backward()
            shown.append(whole(module.embed.weight.grad))
        return shown, num_calls

    wanted, num_calls = body(0, False)
    for shown, num in run_ranks(world_size, body, True):
        assert num == num_calls == 2
        for grad, expected in zip(shown, wanted, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_tiles_compute_in_bf16(tmp_path):
    offload = Offload("disk", "disk", disk=tmp_path, tile=TILE)
    body = run(offload, world_size=2, precision="bf16")
    losses = run_ranks(2, body)[0][0]
    assert losses == pytest.approx(run(None)(0)[0], rel=3e-2)


def test_inputs_in_the_dtype_that_a_tiled_weight_names_are_cast_to_that_of_compute():
    def body(rank: int, **options: Any) -> Tensor:
        forward = lambda self, x: self.low(x.to(self.low.weight.dtype)).to(x.dtype)
        module = seeded(lambda: By(forward, low=nn.Linear(8, 8, dtype=torch.float64)))
        onefold.shard(module, stage=3, precision=torch.bfloat16, **options)
        module(torch.ones(2, 8)).sum().backward()
        return module.low.weight.grad.full_tensor()

    (whole, _), (tiled, _) = (
        run_ranks(2, lambda rank, options=options: body(rank, **options))
        for options in ({}, {"offload": Offload(tile=64)})
    )
    torch.testing.assert_close(tiled, whole, rtol=1e-2, atol=0)


@every_rank(2)
def test_a_tiled_weight_is_never_whole(rank, tmp_path):
    module = seeded(lambda: nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 8)))
    optimizer = torch.optim.AdamW(module.parameters())
    tile = 64 * 1024
    onefold.shard(module, optimizer, units=list(module), offload=Offload(tile=tile))
    module(torch.ones(4, 64)).sum().backward()
    peak = onefold.report(module).memory["unsharded"]["device"].peak
    assert peak < 3 * tile + 2 * 4096 * 4  # two tiles, and the biases of both layers


@every_rank(2)
def test_names_shapes_and_state_dicts_are_those_of_whole_weights(rank):
    module = seeded(Wide)
    names = [(name, p.shape) for name, p in module.named_parameters()]
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    onefold.shard(module, offload=Offload(tile=TILE))
    assert [(name, p.shape) for name, p in module.named_parameters()] == names
    for name, value in module.state_dict().items():
        assert torch.equal(value.full_tensor(), wanted[name])


@every_rank(2)
def test_evaluation_frozen_weights_and_accumulation_work(rank):
    plain, module = seeded(Wide), seeded(Wide)
    plain.head.weight.requires_grad_(False)
    module.head.weight.requires_grad_(False)
    onefold.shard(module, offload=Offload(tile=TILE))
    tokens = torch.arange(10).view(2, 5) * 13
    with torch.no_grad():
        torch.testing.assert_close(module(tokens), plain(tokens))
    for _ in range(2):
        module(tokens).square().mean().backward()
        plain(tokens).square().mean().backward()
    assert module.head.weight.grad is None
    got = module.embed.weight.grad.full_tensor()
    torch.testing.assert_close(got, plain.embed.weight.grad, rtol=1e-4, atol=1e-7)
    assert not got[3].any()


@every_rank(2)
def test_a_use_that_needs_the_weight_whole_is_refused_by_name(rank):
    class Odd(Wide):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens) @ self.head.weight.t()

    module = seeded(Odd)
    onefold.shard(module, offload=Offload(tile=TILE))
    with pytest.raises(StateError, match=r"head\.weight.*Linear or Embedding"):
        module(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("world_size", [1, 3])
@every_rank()
def test_a_backward_that_builds_a_graph_is_refused_by_name(rank, world_size):
    module = seeded(Wide)
    onefold.shard(module, offload=Offload(tile=TILE))
    loss = module(torch.zeros(1, 2, dtype=torch.long)).square().sum()
    with pytest.raises(StateError, match=r"create_graph through tiled weight 'head\.weight'"):
        loss.backward(create_graph=True)


@every_rank(2)
def test_a_token_out_of_range_is_an_index_error_as_ever(rank):
    module = seeded(Wide)
    onefold.shard(module, offload=Offload(tile=TILE))
    with pytest.raises(IndexError):
        module(torch.full((1, 2), ROWS))


@pytest.mark.parametrize("tile", [0, -1, 2.5, "64MB", True])
def test_a_tile_that_is_no_number_of_bytes_is_refused(tile):
    with pytest.raises(ConfigError, match=r"Offload\.tile"):
        Offload(tile=tile)


def test_tiles_want_stage_three():
    with pytest.raises(ConfigError, match="stage=3"):
        onefold.shard(Wide(), stage=2, offload=Offload(tile=TILE))


def test_a_disk_that_fails_under_a_tile_is_an_error_in_a_world_of_one(tmp_path, monkeypatch):
    module = seeded(Wide)
    onefold.shard(module, offload=Offload("disk", "disk", disk=tmp_path, tile=TILE))
    tokens = torch.zeros(1, 2, dtype=torch.long)
    module(tokens)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    for _ in range(2):
        with pytest.raises(onefold.TierError, match="EIO"):
            module(tokens)


def test_a_disk_that_fails_under_a_tile_is_an_error_on_every_rank(tmp_path, monkeypatch):
    def body(rank: int) -> str:
        module = seeded(Wide)
        optimizer = torch.optim.AdamW(module.parameters())
        offload = Offload("disk", "disk", disk=tmp_path, tile=TILE)
        onefold.shard(module, optimizer, offload=offload)
        tokens = torch.zeros(1, 2, dtype=torch.long)
        module(tokens)
        dist.barrier()
        if rank == 1:
            file = engine_of(module).context.tiers.weight.files[0]
            os.close(file.fd)
            file.fd = os.open(os.devnull, os.O_RDONLY)
        dist.barrier()
        with pytest.raises(onefold.TierError) as caught:
            module(tokens)
        return str(caught.value)

    told = run_ranks(2, body)
    assert told[0] == told[1]
    assert "rank 1" in told[0]


@pytest.mark.parametrize("world_size", [1, 3])
@every_rank()
def test_a_backward_inside_unsharded_is_refused_by_the_name_of_the_tiled_weight(rank, world_size):
    """Inside the block it would have a whole gradient; the run goes on after the block."""
    module = seeded(Wide)
    onefold.shard(module, offload=Offload(tile=TILE))
    tokens = torch.arange(6)[None] + rank
    with (
        pytest.raises(StateError, match=r"one inside, of '(embed|head)\.weight'.*Offload\.tile"),
        onefold.unsharded(module),
    ):
        module(tokens).sum().backward()
    module.zero_grad()
    module(tokens).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
