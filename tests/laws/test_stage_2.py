"""Stage 2 is stage 1 that reduces each micro-batch into shards, and differs in nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

import onefold
from onefold import Offload, Wire
from onefold.config import STAGES, precision_of
from onefold.engine.policy import policy_of
from onefold.engine.registry import engine_of
from onefold.planner.memory import bare, forecast
from onefold.recipe import Recipe
from onefold.wire_config import fitted
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_same_bits, run_job
from tests.wire.test_axes import job_of, run_axes

WIDTH, LAYERS = 96, 4  # pieces of 2 and 3 ranks need no rounding
NUMEL = LAYERS * (WIDTH + 1) * WIDTH
FP32 = 4


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def backward(module: nn.Module, rank: int, *, waits: bool) -> None:
    with onefold.accumulate(module) if waits else nullcontext():
        module(torch.linspace(-1, 1 + rank, 2 * WIDTH).view(2, WIDTH)).square().mean().backward()


def recipes() -> list[Recipe]:
    """Stage 1 on every mesh, tier and wire that it may have."""
    meshes = [(1, False), (2, False), (3, False), (4, True)]
    tiers = Offload(), Offload(optimizer="cpu"), Offload(optimizer="cpu", step_in_backward=True)
    wires = (
        Wire(), Wire(secondary=False), Wire(secondary="optimizer"),
        Wire("int8-diff", gradients=("exact", "int8"), feedback=True),
    )  # fmt: skip
    return [
        Recipe(
            stage=STAGES[1], world_size=world, local_world_size=2 if has_axes else world,
            has_axes=has_axes, offload=tier, device_type=device, precision=precision_of(word),
            wire=fitted(wire, STAGES[1], has_axes=has_axes),
        )
        for (world, has_axes), tier, wire, device, word in product(
            meshes, tiers, wires, ("cpu", "cuda"), (None, "bf16")
        )
    ]  # fmt: skip


def differing(first: object, second: object, names: list[str]) -> set[str]:
    return {name for name in names if getattr(first, name) != getattr(second, name)}


def test_policies_and_recipes_differ_only_in_when_gradients_are_reduced():
    properties = [name for name, each in vars(Recipe).items() if isinstance(each, property)]
    assert "sums_rest" in properties
    for first in recipes():
        second = replace(first, stage=STAGES[2])
        found = differing(first, second, properties)
        assert {"sums_rest"} <= found <= {"sums_rest", "keeps_sums"}, first
        policies = [policy_of(each) for each in (first, second)]
        found = differing(*policies, [each.name for each in fields(policies[0])])
        assert {"defers_reduction"} <= found <= {"defers_reduction", "sums_rest"}, first


def test_gradients_rest_as_at_stage_3_where_reductions_are_decided():
    for first in recipes():
        second, third = (policy_of(replace(first, stage=STAGES[n])) for n in (2, 3))
        assert not differing(second, third, ["defers_reduction", "sums_rest", "has_second_hop"])


def test_plans_without_accumulation_are_those_of_stage_1_to_the_byte():
    module = build()
    onefold.shard(module, stage=1)
    units = engine_of(module).recipe.units
    for first in recipes():
        first = replace(first, units=units)
        plans = [
            forecast(bare(units), replace(first, stage=STAGES[number]), has_timeline=True)
            for number in (1, 2)
        ]
        one, two = (replace(plan, recipe=first) for plan in plans)
        assert one == two


@again_but("3")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_runs_without_accumulation_are_those_of_stage_1_in_bits_and_bytes(world):
    def body(rank: int, stage: int) -> tuple:
        module = seeded(build)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        for _ in range(3):
            backward(module, rank, waits=False)
            optimizer.step()
            optimizer.zero_grad()
        weights = [p.detach().clone() for p in onefold.full_state_dict(module).values()]
        report = onefold.report(module)
        held = {k: {t: u.now for t, u in tiers.items()} for k, tiers in report.memory.items()}
        return weights, held, report.last_step

    for one, two in zip(run_ranks(world, body, 1), run_ranks(world, body, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
        assert one[1:] == two[1:]


@worlds_in_turn
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_messages_of_a_step_are_the_closed_form_in_ledger_report_and_plan(
    stage, world, micro_batches
):
    """Each part is (N-1)/N of the model: 2 at stages 0 and 1, m + 1 at stage 2, 3 m at stage 3."""
    m = micro_batches
    gathers, reductions = {0: (1, 1), 1: (1, 1), 2: (1, m), 3: (2 * m, m)}[stage]

    def body(rank: int) -> None:
        module = seeded(build)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        engine = engine_of(module)
        for _ in range(2):
            before = dict(engine.ledger.traffic)
            before = {name: (each.calls, each.sent_nbytes) for name, each in before.items()}
            for micro in range(m):
                backward(module, rank, waits=micro + 1 < m)
            optimizer.step()
            optimizer.zero_grad()
        recipe, last = engine.recipe, onefold.report(module).last_step
        planned = forecast(bare(recipe.units), recipe, accumulate=m).sent
        for name, number in (("gather", gathers), ("reduce_scatter", reductions)):
            nbytes = number * NUMEL * FP32 * (world - 1) // world
            if world == 1:
                assert name not in last
                assert name not in planned
                continue
            ledger = engine.ledger.traffic[name]
            calls, sent = before[name]
            assert last[name].sent_nbytes == planned[name] == ledger.sent_nbytes - sent == nbytes
            assert last[name].calls == ledger.calls - calls == number * LAYERS

    run_ranks(world, body)


@again_but("2-1-True", "2-3-False", "3-2-False")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "is_whole"), [(1, True), (2, False), (3, False)])
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_between_micro_batches_are_whole_or_shards(stage, is_whole, world):
    """`.grad` says so, the ledger counts it, and the plan expects it."""
    whole, shard = NUMEL * FP32, NUMEL * FP32 // world

    def body(rank: int) -> None:
        module = seeded(build)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        for _ in range(2):
            for _ in range(2):
                backward(module, rank, waits=True)
                report = onefold.report(module)
                assert report.nbytes("partial_grad") == is_whole * whole
                assert report.nbytes("grad") == (not is_whole) * shard
                grads = [p.grad for p in module.parameters()]
                assert all(isinstance(grad, DTensor) for grad in grads)
                (placement,) = {grad.placements[0] for grad in grads}
                assert isinstance(placement, Partial if is_whole else Shard)
            backward(module, rank, waits=False)
            assert onefold.report(module).nbytes("partial_grad") == 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        report, peaks = onefold.report(module), engine_of(module).facts.predicted_peaks()
        peak = report.memory["partial_grad"]["device"].peak
        assert peak <= report.predicted["partial_grad"] == peaks["partial_grad"]
        assert (peak == whole) == (peaks["partial_grad"] == whole) == is_whole
        assert peak <= (whole if is_whole else 2 * whole // LAYERS)
        assert report.differing() == {}

    run_ranks(world, body)


def accumulating(**changes: object) -> Job:
    batches = token_batches(rows=24)
    return Job(partial(Model, tied=True), batches, next_token_loss, accumulate=2, **changes)


@again_but(
    "3-{'clip': 0.1}", "1-{'options': {'precision': 'bf16'}}",
    "2-{'options': {'offload': 'optimizer'}}", "3-{'options': {'shares': [3, 1, 2]}}",
)  # fmt: skip
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}), (2, {}), (3, {"clip": 0.1}), (1, {"options": {"precision": "bf16"}}),
        (3, {"options": {"precision": "bf16"}}), (2, {"options": {"offload": "optimizer"}}),
        (3, {"options": {"offload": Offload("cpu", step_in_backward=True)}}),
        (2, {"options": {"precision": "bf16", "offload": Offload("cpu", fraction=0.5)}}),
        (3, {"options": {"shares": [3, 1, 2]}}),
    ],
    ids=str,
)  # fmt: skip
def test_bits_under_accumulation_are_those_of_stage_3(world, changes):
    work = accumulating(**changes)
    assert_same_bits(run_job(work, world, 2), run_job(work, world, 3))


def test_bits_under_accumulation_are_those_of_stage_3_with_states_on_disk(tmp_path):
    def on(stage: int, **more: str) -> Job:
        folder = tmp_path / str(stage)
        folder.mkdir()
        return accumulating(options={"offload": Offload("disk", disk=folder, **more)})

    assert_same_bits(run_job(on(2), 3, 2), run_job(on(3, parameters="disk"), 3, 3))


@again_but("None-bf16", "False-None", "optimizer-bf16")
@pytest.mark.parametrize(
    ("secondary", "precision"),
    [(None, None), (None, "bf16"), (False, None), ("gradients", "bf16"), ("optimizer", "bf16")],
)
def test_bits_on_two_axes_are_those_of_stage_3_whatever_rests_in_the_node(secondary, precision):
    options = {"precision": precision, "wire": Wire(secondary=secondary)}
    work = job_of(accumulate=2, options=options)
    assert_same_bits(run_axes(work, (2, 2), 2), run_axes(work, (2, 2), 3))


def test_nodes_exchange_gradients_once_a_step_and_their_ranks_in_each_micro_batch():
    """As at stage 3; `secondary=False` crosses in each micro-batch, and stage 1 in none but one."""
    work, numbers = job_of(accumulate=2), {}

    def body(rank: int, stage: int, secondary: bool | None) -> tuple[int, int]:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
        module = seeded(Model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=Wire(secondary=secondary))
        for waits in (True, False):
            with onefold.accumulate(module) if waits else nullcontext():
                next_token_loss(module, work.batches[0][:4]).backward()
        optimizer.step()
        step, units = onefold.report(module).last_step, len(engine_of(module).units)
        return tuple(
            step[f"reduce_scatter {link}"].calls // units for link in ("inside", "between")
        )

    for stage, secondary in product((1, 2), (None, False)):
        (numbers[stage, secondary],) = set(run_ranks(4, body, stage, secondary))
    assert numbers == {
        (1, None): (1, 1), (1, False): (1, 1), (2, None): (2, 1), (2, False): (2, 2)
    }  # fmt: skip


@again_but("3")
@pytest.mark.parametrize("world", [1, 3])
def test_gradients_between_micro_batches_can_be_scaled_read_and_cleared_as_at_stage_3(world):
    def body(rank: int, stage: int) -> list[torch.Tensor]:
        module = seeded(build)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=stage)
        backward(module, rank + 1, waits=True)
        optimizer.zero_grad()
        backward(module, rank, waits=True)
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        backward(module, rank, waits=False)
        optimizer.step()
        return [
            norm.full_tensor() if isinstance(norm, DTensor) else norm,
            *onefold.full_state_dict(module, rank0_only=False).values(),
        ]

    for two, three in zip(run_ranks(world, body, 2), run_ranks(world, body, 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(two, three, strict=True))
