"""Experts on a mesh of their own train like one process that has all experts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.checkpoint.listing import SavedTensor
from onefold.checkpoint.source import Source, unstack
from onefold.compose import own_meshes
from onefold.engine.precision import are_gradients_finite
from onefold.engine.registry import engine_of
from onefold.layout.cut import MAX_IMBALANCE, cut_of
from onefold.wire import transport
from tests.support import experts
from tests.support.experts import Axis
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

MESHES = [(2, 2), (1, 2), (1, 4), (3, 1), (1, 3), (2, 1)]


@cache
def plain(replicas: int, number: int, is_listed: bool = False) -> dict[str, torch.Tensor]:
    return experts.plain_gradients(Axis(replicas, number, is_listed=is_listed))


@again_but("shape2-3", "shape3-0", "shape4-1", "shape5-3")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("shape", MESHES)
def test_gradients_are_those_of_one_process_with_all_experts(shape, stage):
    """In fp64, with a rank that has no tokens and experts that get none."""
    found = experts.run(Axis(*shape, stage), experts.gradients)
    assert experts.error(found, plain(*shape)) < 1e-12


def test_a_divisor_that_is_twice_as_large_is_another_gradient(monkeypatch):
    made = transport.Composed.__init__

    def doubled(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if kwargs.get("divisor"):
            self.scale /= 2

    monkeypatch.setattr(transport.Composed, "__init__", doubled)
    found = experts.run(Axis(2, 2), experts.gradients)
    assert experts.error(found, plain(2, 2)) == pytest.approx(0.5)


@again_but("shape1")
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_a_mean_over_the_wrong_number_of_ranks_is_another_gradient(monkeypatch, shape):
    made = own_meshes.OwnMesh
    monkeypatch.setattr(own_meshes, "OwnMesh", lambda members, sources: made(members, 2 * sources))
    found = experts.run(Axis(*shape), experts.gradients)
    assert experts.error(found, plain(*shape)) == pytest.approx(0.5)


@again_but("shape1")
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_listed_experts_are_stacked_and_train_like_the_list(shape):
    found = experts.run(Axis(*shape, is_listed=True), experts.gradients)
    assert experts.error(found, plain(*shape, is_listed=True)) < 1e-12


@worlds_in_turn
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 2), (2, 0)])
def test_a_checkpoint_of_listed_experts_loads_into_the_list(world, stage, tmp_path):
    """Weights, averages, and the next step by moments and groups: each expert gets its rows."""

    def next_average(model, optimizer, average):
        experts.loss_of(model, rows).backward()
        optimizer.step()
        average.update()
        with average.applied(), onefold.unsharded(model):
            return {name: experts.whole(p.detach()) for name, p in model.named_parameters()}

    def save(rank):
        model, optimizer = experts.sharded(Axis(1, 2, is_listed=True))
        average = onefold.ema(model, decay=0.5)
        next_average(model, optimizer, average)
        optimizer.zero_grad()
        onefold.save(tmp_path / "run", model, optimizer, extra="after one step")
        return next_average(model, optimizer, average)

    def resume(rank):
        model = experts.build(is_listed=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
        onefold.shard(model, optimizer, stage=stage)
        average = onefold.ema(model, decay=0.5)
        assert onefold.load(tmp_path / "run", model, optimizer) == "after one step"
        return experts.stacked(next_average(model, optimizer, average))

    rows = experts.rows_of(0, 1)  # the same on every rank, so that their mean is that of one
    wanted = run_ranks(2, save)[0]
    for found in run_ranks(world, resume):
        assert experts.error(found, wanted) < 1e-12


def test_a_module_that_is_called_stacked_loads_as_any_other(tmp_path):
    """Its parameter without dimensions is no row of experts."""

    def start(value):
        module = nn.ModuleDict({"stacked": nn.PReLU()})
        module["stacked"].weight = nn.Parameter(torch.tensor(value))
        return onefold.shard(module)

    onefold.save(tmp_path / "run", start(0.5))
    module = start(0.25)
    onefold.load(tmp_path / "run", module)
    assert module["stacked"].weight.item() == 0.5


def test_more_rows_than_a_module_has_parameters_are_no_stack():
    """A file may say any number of rows, where each of them is empty."""
    saved = SavedTensor((10**12, 0), torch.float32, ())
    name = "experts.stacked.weight"
    paths = {f"model.{name}": ("model", name)}
    nothing: Any = None
    source = Source(nothing, {}, nothing, {f"model.{name}": saved}, {}, paths, {})
    assert unstack(source, {"experts.0.weight"}) is source


@every_rank(1)
def test_states_that_do_not_belong_to_one_expert_are_not_cut(rank, tmp_path):
    def start(is_stacked):
        model = experts.build(is_listed=True)
        if is_stacked:
            experts.spread(model, None)
        optimizer = torch.optim.Adafactor(model.parameters())
        onefold.shard(model, optimizer)
        return model, optimizer

    model, optimizer = start(is_stacked=True)
    experts.loss_of(model, experts.rows_of(0, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    onefold.save(tmp_path / "run", model, optimizer)
    model, optimizer = start(is_stacked=False)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    with pytest.raises(onefold.CheckpointError, match=r"stacked.up.weight.*experts in a list"):
        onefold.load(tmp_path / "run", model, optimizer)
    assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())


@again_but("shape1")
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)])
def test_ten_steps_at_every_stage_are_those_of_one_process(shape):
    """Stages are equal bit for bit in fp32; one process in fp64, as AdamW amplifies rounding."""
    first = Axis(*shape, 0, 10, dtype=torch.float32)
    wanted = experts.run(first, experts.weights_after)
    for stage in (1, 3):
        weights = experts.run(replace(first, stage=stage), experts.weights_after)
        for name, weight in wanted.items():
            assert torch.equal(weight, weights[name]), (stage, name)
    precise = Axis(*shape, 3, 10)
    weights = experts.run(precise, experts.weights_after)
    assert experts.error(weights, experts.plain_weights_after(precise)) < 1e-13


@again_but("states on the CPU", "int8")
@pytest.mark.parametrize(
    "options",
    [
        {"offload": "optimizer"},
        {"offload": "cpu"},
        {"precision": "bf16"},
        {"wire": onefold.Wire(weights="int8", gradients="int8", feedback=True)},
    ],
    ids=["states on the CPU", "all on the CPU", "bf16", "int8"],
)
def test_tiers_precision_and_wire_reach_units_with_their_own_mesh(options):
    first = Axis(2, 2, 3, 4, dtype=torch.float32)
    exact = experts.run(first, experts.weights_after)
    found = experts.run(replace(first, options=options), experts.weights_after)
    if "offload" in options:
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    else:
        assert 0 < experts.error(found, exact) < 0.2


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_micro_batches_and_recompute_reach_the_gradients_of_one_process(stage):
    def body(rank: int, axis: Axis) -> dict[str, torch.Tensor]:
        model, _ = experts.sharded(axis)
        rows = experts.rows_of(rank, 4, 1)
        with onefold.accumulate(model):
            experts.loss_of(model, rows[:2]).backward()
        out, _ = checkpoint(model, rows[2:], use_reentrant=False)
        out.square().mean().backward()
        return {n: experts.whole(p.grad) for n, p in model.named_parameters()}

    model = experts.build()
    for rank in range(4):
        rows = experts.rows_of(rank, 4, 1)
        loss = experts.loss_of(model, rows[:2]) + experts.loss_of(model, rows[2:])
        (loss / 4).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    assert experts.error(experts.run(Axis(2, 2, stage), body), wanted) < 1e-12


def test_a_gradient_that_is_not_finite_on_one_expert_is_known_to_all_ranks():
    def body(rank: int) -> bool:
        model, _ = experts.sharded(Axis(2, 2))
        loss_of = experts.loss_of(model, experts.rows_of(rank, 4, 1))
        loss_of.backward()
        engine = engine_of(model)
        assert are_gradients_finite(engine)
        if rank == 3:
            model.blocks[1].experts.down_proj.grad.to_local().fill_(float("nan"))
        return are_gradients_finite(engine)

    assert run_ranks(4, body) == [False] * 4


def test_a_unit_on_its_own_mesh_names_the_rank_among_all_ranks():
    def body(rank: int) -> str:
        model, _ = experts.sharded(Axis(2, 2))
        unit = next(unit for unit in engine_of(model).units if "experts" in unit.name)
        return unit.context.where + unit.context.named(1)

    assert run_ranks(4, body) == ["rank 0rank 2", "rank 1rank 3", "rank 2rank 2", "rank 3rank 3"]


def test_units_with_their_own_mesh_send_among_its_ranks_alone():
    """Bytes of gathers and reductions: those of a module that is on a half of the ranks."""

    def body(rank: int, number: int) -> dict[str, int]:
        model, _ = experts.sharded(Axis(4 // number, number))
        names = {p for block in model.blocks for p in block.experts.parameters()}
        experts.loss_of(model, experts.rows_of(rank, 4, 1)).backward()
        nbytes = {"own": sum(math.prod(p.shape) * 8 for p in names)}
        others = [p for p in model.parameters() if p not in names]
        nbytes["all"] = sum(math.prod(p.shape) * 8 for p in others)
        found = onefold.report(model).traffic
        return nbytes | {name: each.sent_nbytes for name, each in found.items()}

    found = run_ranks(4, body, 2)
    for name, times in (("gather", 2), ("reduce_scatter", 1)):
        sent = sum(each[name] for each in found)
        wanted = found[0]["own"] + 3 * found[0]["all"]  # two meshes of two ranks, one of four
        assert sent == times * wanted, (name, sent, wanted, found)


@worlds_in_turn
@pytest.mark.parametrize("ranks", [2, 3, 6, 48, 64, 100])
@pytest.mark.parametrize(
    "shape",
    [(8, 28672, 4096), (8, 4096, 14336), (60, 2816, 2048), (128, 1536, 2048), (256, 4096, 7168)],
)
def test_stacked_experts_are_balanced_over_more_ranks_than_experts(shape, ranks):
    """Experts are cut where their number does not divide: no rank has above 1.05 of its share."""
    cut = cut_of(shape, ranks)
    most = max(cut.piece_numel(rank) for rank in range(ranks))
    assert most <= MAX_IMBALANCE * math.prod(shape) / ranks


def test_stacked_experts_train_on_more_ranks_than_experts():
    """Without an expert axis: 3 experts on 5 ranks, each of which holds rows of every expert."""

    def body(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
        module = seeded(WideExperts).double()
        onefold.shard(module)
        module(experts.rows_of(rank, 6, 1)).square().mean().backward()
        held = module.experts.down_proj.to_local().numel()
        return held, {n: p.grad.full_tensor() for n, p in module.named_parameters()}

    module = seeded(WideExperts).double()
    for rank in range(5):
        (module(experts.rows_of(rank, 6, 1)).square().mean() / 5).backward()
    results = run_ranks(5, body)
    assert len({held for held, _ in results}) == 1
    wanted = {n: p.grad for n, p in module.named_parameters()}
    assert experts.error(results[0][1], wanted) < 1e-12


class WideExperts(torch.nn.Module):
    """Three experts of width 40."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(experts.WIDTH, 40)
        self.experts = experts.StackedExperts(3, 40, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        weights, index = x[:, :3].softmax(-1).topk(2, -1)
        return self.experts(x, index, weights)


def test_the_mean_of_the_parts_of_a_balance_loss_is_that_of_all_tokens():
    """And so are their gradients; transformers' own function has the tokens of one process."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    made = torch.Generator().manual_seed(0)
    layers = [torch.randn(24, 5, generator=made, dtype=torch.float64) for _ in range(2)]
    mask = (torch.rand(24, generator=made) < 0.8).double()
    bounds = [0, 3, 3, 24]

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = slice(bounds[rank], bounds[rank + 1])
        logits = [each[own].clone().requires_grad_() for each in layers]
        part = onefold.experts.balance_loss(logits, 2, mask=mask[own])
        part.backward()
        return part.detach(), torch.stack([each.grad for each in logits], 1)

    whole = [each.clone().requires_grad_() for each in layers]
    wanted = modeling.load_balancing_loss_func(tuple(whole), 5, 2, mask[None])
    wanted.backward()
    results = run_ranks(3, body)
    torch.testing.assert_close(sum(part for part, _ in results).float() / 3, wanted.float())
    found = torch.cat([grad for _, grad in results]) / 3
    torch.testing.assert_close(found, torch.stack([e.grad for e in whole], 1), rtol=1e-5, atol=1e-9)
