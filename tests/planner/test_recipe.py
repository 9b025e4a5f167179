"""The recipe: one resolved value, which every room reads and which JSON keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold.config import STAGES, Offload, Precision, precision_of
from onefold.engine.registry import engine_of
from onefold.engine.run_facts import RunHistory
from onefold.errors import ConfigError
from onefold.planner.costs import Conditions
from onefold.planner.machines import machine_of
from onefold.planner.memory import bare, forecast, peaks_of
from onefold.planner.simulate import scaling_curve, simulate
from onefold.planner.work import ModelWork, UnitWork, Work
from onefold.recipe import Member, Recipe, UnitRecipe, last_units
from onefold.wire_config import PRESETS, Wire
from tests.support.ranks import run_ranks, seeded

UNIT = UnitRecipe(
    "blocks.0",
    (
        Member("blocks.0.weight", (8, 4), torch.bfloat16, torch.bfloat16),
        Member("blocks.0.scale", (), torch.float32, torch.bfloat16, requires_grad=False),
    ),
    tile_nbytes=1 << 20,
    is_offloaded=True,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


OFFLOADS = st.sampled_from(
    [
        Offload(), Offload("cpu", fraction=0.5, step="device"), Offload("cpu", "cpu"),
        Offload("disk", "disk", "disk", disk=["/a", "/b"], step_in_backward=True, tile=4096),
    ]
)  # fmt: skip


@given(
    stage=st.sampled_from(list(STAGES.values())),
    precision=st.sampled_from([None, "bf16", Precision(buffers=torch.float16)]),
    offload=OFFLOADS,
    wire=st.sampled_from([*PRESETS.values(), Wire(("int8", "int4"), secondary=False)]),
    has_axes=st.booleans(),
    shares=st.sampled_from([None, (1, 0, 2, 1, 1, 3, 1, 1)]),
    units=st.sampled_from([(), (UNIT, replace(UNIT, name="blocks.1"))]),
)
def test_a_recipe_survives_json(stage, precision, offload, wire, has_axes, shares, units):
    recipe = Recipe(
        stage=stage, world_size=8, local_world_size=4, has_axes=has_axes, wire=wire, units=units,
        precision=precision_of(precision), offload=offload, device_type="cuda", num_moments=1,
        shares=shares,
    )  # fmt: skip
    again = Recipe.from_dict(json.loads(json.dumps(recipe.as_dict())))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.digest() == recipe.digest()


def test_members_are_stored_by_name_and_recipes_that_list_their_values_still_load():
    member = Member(
        "a.weight", (3, 2), torch.bfloat16, torch.float32, False, True, 7, 5, "Shard(0)"
    )
    recipe = Recipe(units=(UnitRecipe("a", (member,), is_joined=True, ranks=2),))
    plain = json.loads(json.dumps(recipe.as_dict()))
    (unit,) = plain["units"]
    assert unit["members"][0]["decoded_nbytes"] == 7
    values = ["a.weight", [3, 2], "bfloat16", "float32", False, True, 7, 5, "Shard(0)"]
    older = {"name": "a", "members": [values], "tile_nbytes": 0, "is_offloaded": False}
    assert Recipe.from_dict(plain | {"units": [older]}).units[0].members == (member,)
    oldest = older | {"members": [values[:6]]}
    assert Recipe.from_dict(plain | {"units": [oldest]}).units[0].members[0].stack_nbytes == 0


def test_a_digest_names_the_field_that_differs():
    recipe = Recipe(world_size=4, local_world_size=2, has_axes=True, units=(UNIT,))
    others = {
        "stage=": replace(recipe, stage=STAGES[2]),
        "mesh of": replace(recipe, has_axes=False),
        "Precision.compute=": replace(recipe, precision=precision_of("bf16")),
        "Offload.tile=": replace(recipe, offload=Offload(tile=4)),
        "Wire.weights=": replace(recipe, wire=Wire("int8")),
        "blocks.0.scale []": replace(recipe, units=(replace(UNIT, members=UNIT.members[:1]),)),
    }
    for name, other in others.items():
        pairs = zip(recipe.digest(), [*other.digest(), ""], strict=False)
        different = [mine for mine, theirs in pairs if mine != theirs]
        assert [line.startswith(name) for line in different] == [True], name
    on_disk = [Recipe(offload=Offload("disk", disk=each)) for each in ("/a", "/b")]
    assert on_disk[0].digest() == on_disk[1].digest(), "each host may have its own folder"


def test_nodes_of_unequal_size_are_refused():
    with pytest.raises(ConfigError, match="same number of ranks"):
        Recipe(world_size=6, local_world_size=4, has_axes=True)


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(0.0, []), (0.1, []), (0.3, [3]), (0.6, [2, 3]), (0.9, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_the_last_units_leave_the_device_up_to_the_fraction(fraction, chosen):
    assert [i for i, is_far in enumerate(last_units([10] * 4, fraction)) if is_far] == chosen


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.1, 0), (0.5, 2), (0.6, 2), (1.0, 4)])
def test_a_share_of_units_is_one_answer_for_bytes_times_and_engines(fraction, count, tmp_path):
    """Times once told of three units of four at 0.6, and of one at 0.1."""
    offload = Offload("disk", disk=tmp_path, fraction=fraction)

    def body(rank: int) -> tuple[Recipe, list[bool]]:
        module = seeded(Net)
        onefold.shard(module, torch.optim.AdamW(module.parameters()), offload=offload)
        engine = engine_of(module)
        return engine.recipe, [unit.is_offloaded for unit in engine.units]

    recipe, is_offloaded = run_ranks(2, body)[0]
    wanted = (False,) * (4 - count) + (True,) * count
    assert tuple(is_offloaded) == wanted == tuple(unit.is_offloaded for unit in recipe.units)
    assert last_units([unit.numel for unit in recipe.units], fraction) == wanted
    found = forecast(bare(recipe.units), recipe)
    state = 2 * 4 * 64 * 65 // 2  # two moments of one unit's shard
    assert found.resting.get(("optimizer", "disk"), 0) == count * state
    works = tuple(
        UnitWork(unit.name, unit.numel, Work(1.0, nbytes=1.0), Work(2.0, nbytes=2.0))
        for unit in recipe.units
    )
    step = simulate(ModelWork(works, 1), recipe, machine_of("h100-80"), Conditions())
    stepped = {span.unit for span in step.spans if span.what == "step" and span.stream == "cpu"}
    assert stepped == {unit.name for unit in recipe.units if unit.is_offloaded}


@pytest.mark.parametrize(("offload", "kept"), [("cpu", True), ("disk", False), (None, True)])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_one_rank_on_the_cpu_keeps_local_casts_as_its_plan_says(offload, kept, precision, tmp_path):
    """CPU memory is the device there. A plan once freed casts that the engine kept."""
    module = seeded(Net)
    choice = f"disk:{tmp_path}" if offload == "disk" else offload
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3, offload=choice, precision=precision)
    engine = engine_of(module)
    assert engine.recipe.frees_after_forward == (not kept)
    for _ in range(2):
        module(torch.ones(2, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = onefold.report(module).memory.get("unsharded", {})
    peak = sum(usage.peak for usage in held.values())
    found = peaks_of(engine.recipe, None, RunHistory())
    assert peak == found.get("unsharded", 0)
    if kept:
        assert peak == (4 * (64 * 64 + 64) * 2 if precision == "bf16" else 0)


def test_a_point_of_a_scaling_curve_is_the_step_of_a_plan_for_as_many_ranks():
    """Whatever number the curve starts at: a run on one host once scaled as if it sent in rings."""
    unit = UnitWork("unit", 4 << 20, Work(1e12, nbytes=1e8), Work(2e12, nbytes=2e8))
    work, machine = ModelWork((unit,) * 4, 1), machine_of("h100-80")
    one_host = Recipe(world_size=8, local_world_size=8, device_type="cuda")
    points = scaling_curve(work, one_host, machine, (8, 64))
    assert points[1].step == simulate(work, replace(one_host, world_size=64), machine)
