"""Law 3: bytes held and bytes sent are those of the closed form, nothing more."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.layout.ranges import Ranges
from onefold.layout.rows import round_up
from tests.support.models import WIDTH, Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import cut

FP32 = 4


class Even(nn.Module):
    """Layers whose pieces need no rounding on 2 or 4 ranks, so closed forms are those of papers."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False).relu()
            else:
                x = layer(x).relu()
        return x


NUMEL = 4 * (64 * 64 + 64)


def one_step(rank, world_size, stage, micro_batches=1, recompute=False, precision=None):
    module = seeded(Even, recompute)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=stage, precision=precision)
    for _ in range(2):
        for index in range(micro_batches):
            last = index + 1 == micro_batches
            with nullcontext() if last else onefold.accumulate(module):
                module(torch.ones(2, 64)).sum().backward()
        before_step = onefold.report(module)
        optimizer.step()
        optimizer.zero_grad()
    return before_step, onefold.report(module)


@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_sent_per_step_are_the_closed_form(world_size, stage, micro_batches, recompute):
    reports = run_ranks(world_size, one_step, world_size, stage, micro_batches, recompute)
    share = NUMEL * (world_size - 1) // world_size * FP32
    gathers, reductions = {
        0: (1, 1), 1: (1, 1), 2: (1, micro_batches), 3: (2 * micro_batches, micro_batches),
    }[stage]  # fmt: skip
    for _, report in reports:
        assert report.last_step["gather"].sent_nbytes == gathers * share
        assert report.last_step["reduce_scatter"].sent_nbytes == reductions * share
        assert report.last_step["gather"].calls == gathers * 4
        assert report.last_step["reduce_scatter"].calls == reductions * 4
        assert set(report.last_step) <= {"gather", "reduce_scatter", "control"}


class Twice(nn.Module):
    """Two modules share a unit before the layers, as token and position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 64)
        self.positions = nn.Embedding(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_a_unit_that_backward_uses_twice_is_gathered_for_it_once():
    def step(rank):
        module = seeded(Twice)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        for _ in range(2):
            module(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return onefold.report(module).last_step

    numel = 64 * 64 + 8 * 64 + 2 * (64 * 64 + 64)
    for last_step in run_ranks(2, step):
        assert last_step["gather"].sent_nbytes == 2 * numel // 2 * FP32
        assert last_step["reduce_scatter"].sent_nbytes == numel // 2 * FP32


def test_uneven_pieces_send_what_the_other_ranks_lack():
    def step(rank):
        module = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        module(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return onefold.report(module).last_step

    rows = [(7, 5), (7, 1), (5, 7), (5, 1)]
    for rank, last_step in enumerate(run_ranks(3, step)):
        own = sum(Ranges.over(n, 3).lengths[rank] * w for n, w in rows)
        whole = sum(n * w for n, w in rows)
        assert last_step["gather"].sent_nbytes == 2 * 2 * own * FP32
        assert last_step["reduce_scatter"].sent_nbytes == (whole - own) * FP32


@again_but("1-4", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_hold_the_closed_form_to_the_byte(world_size, stage):
    for before_step, report in run_ranks(world_size, one_step, world_size, stage):
        shards = world_size if stage else 1
        assert report.nbytes("weight") == NUMEL * FP32 // shards
        assert report.nbytes("optimizer") == 2 * NUMEL * FP32 // shards
        assert before_step.nbytes("grad") == NUMEL * FP32 // shards
        keeps_grads = stage == 0 and world_size > 1  # as DDP does
        assert report.nbytes("grad") == keeps_grads * NUMEL * FP32 // shards
        keeps_whole = stage in (1, 2) and world_size > 1
        assert report.nbytes("unsharded") == keeps_whole * NUMEL * FP32
        assert report.nbytes("partial_grad") == 0
        assert report.nbytes("wire") == 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_mixed_precision_holds_masters_once_and_sums_in_fp32(stage):
    for before_step, report in run_ranks(2, one_step, 2, stage, 1, False, "bf16"):
        shards = 2 if stage else 1
        assert report.nbytes("weight") == NUMEL * FP32 // shards
        assert report.nbytes("master") == 0
        assert before_step.nbytes("grad") == NUMEL * FP32 // shards
        assert report.last_step["reduce_scatter"].sent_nbytes == NUMEL // 2 * 2


def test_stage_3_holds_at_most_two_whole_units_and_one_units_gradients():
    unit = 64 * 64 + 64
    for _, report in run_ranks(2, one_step, 2, 3):
        assert report.memory["unsharded"]["device"].peak == 2 * unit * FP32
        assert report.memory["partial_grad"]["device"].peak <= 2 * unit * FP32


def test_odd_shapes_hold_their_rows_rounded_up_to_a_cache_line():
    def states(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        next_token_loss(module, token_batches()[0]).backward()
        optimizer.step()
        report = onefold.report(module)
        shapes = [tuple(p.shape) for p in module.parameters()]
        return report.nbytes("weight"), report.nbytes("optimizer"), shapes

    for rank, (weight, moments, shapes) in enumerate(run_ranks(3, states)):
        numel = 0
        for rows, *columns in shapes:
            own = Ranges.over(rows, 3).lengths[rank] * (columns[0] if columns else 1)
            numel += round_up(own, 16)
        assert weight == numel * FP32
        assert moments == 2 * numel * FP32


@again_but("1-3", "3-1")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_deleted_model_gives_every_byte_back_without_a_collector(world_size, stage):
    def leave_nothing(rank):
        module = seeded(partial(Model, tied=True))
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        for batch in token_batches():
            next_token_loss(module, cut(batch, world_size)[rank]).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ledger = module.__dict__["_onefold_engine"].ledger
        alive = weakref.ref(module)
        assert ledger.usage["weight", "device"].now > 0
        del module, optimizer
        held = {kind: u.now for (kind, _), u in ledger.usage.items() if kind != "optimizer"}
        return alive() is None, held

    torch.optim.AdamW([torch.ones(1)])  # the first imports torch's compiler, which leaves cycles
    gc.collect()
    gc.disable()
    try:
        results = run_ranks(world_size, leave_nothing)
    finally:
        gc.enable()
    for gone, held in results:
        assert gone
        assert not any(held.values()), held


class Passing(nn.Module):
    """Each block hands on what the first one made, as T5's blocks do with their position bias."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Linear(WIDTH, WIDTH) if is_first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            bias = self.bias(x)
        return x + self.inner(x) + bias, bias


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(index == 0) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def test_what_a_block_only_passes_on_does_not_gather_it_again():
    def body(rank):
        module = seeded(Handing)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        for _ in range(3):
            module(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = onefold.report(module)
        return report.last_step["gather"].sent_nbytes, report.units

    for sent, units in run_ranks(2, body):
        # each unit in forward and in backward; backward comes by the first one's second output
        # when it is through with it: once more
        assert sent <= (2 * sum(unit.nbytes for unit in units) + units[0].nbytes) // 2
