"""Which parameters travel together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onefold.errors import ConfigError
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import owned_parameters, plan_units
from tests.support.models import Model


def names(plan):
    return [owned.fqn for owned in plan.members]


def test_repeated_blocks_are_units_and_the_rest_is_cut_around_them():
    plans = plan_units(ModuleTree.from_root(Model(num_blocks=3)))
    assert [plan.name for plan in plans] == [
        "embed.weight", "blocks.0", "blocks.1", "blocks.2", "norm.weight",
    ]  # fmt: skip
    assert names(plans[-1]) == ["norm.weight", "norm.bias", "head.weight"]


def test_every_parameter_is_in_exactly_one_unit():
    model = Model(tied=True)
    found = [
        id(owned.parameter)
        for plan in plan_units(ModuleTree.from_root(model))
        for owned in plan.members
    ]
    assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_a_tied_parameter_belongs_to_one_unit_that_all_its_modules_use():
    model = Model(tied=True)
    plan = plan_units(ModuleTree.from_root(model))[0]
    assert names(plan) == ["embed.weight"]
    assert plan.modules == [model.embed, model.head]


def test_owners_are_found_by_identity():
    owned = {o.fqn: o for o in owned_parameters(ModuleTree.from_root(Model(tied=True)))}
    assert [name for _, name in owned["embed.weight"].owners] == ["weight", "weight"]
    assert "head.weight" not in owned


def test_a_large_block_gives_way_to_the_blocks_inside_it():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    model = nn.Module()
    model.stages = nn.ModuleList(Stage() for _ in range(2))
    assert [plan.name for plan in plan_units(ModuleTree.from_root(model))] == [
        f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(3)
    ]


def test_units_hold_one_dtype_each():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    model = nn.ModuleDict({"all": model})
    plans = plan_units(ModuleTree.from_root(model), lambda module: module is model["all"])
    assert [plan.dtype for plan in plans] == [torch.float32, torch.bfloat16]


def test_units_can_be_listed_or_chosen_by_a_predicate():
    model = Model()
    listed = plan_units(ModuleTree.from_root(model), [model.blocks[0], model.head])
    assert {"blocks.0", "head"} < {plan.name for plan in listed}
    chosen = plan_units(ModuleTree.from_root(model), lambda module: isinstance(module, nn.Linear))
    assert {"blocks.0.up", "blocks.0.down", "head"} < {plan.name for plan in chosen}


def test_a_listed_module_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"hint: pass modules taken from the module itself"):
        plan_units(ModuleTree.from_root(Model()), [nn.Linear(2, 2)])
