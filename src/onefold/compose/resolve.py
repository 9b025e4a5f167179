"""From the arguments of `onefold.shard` to a recipe, the same on every rank.

examine             one rank: check the arguments, put words into values
examine_together    all ranks: compare them; `ConfigError` everywhere if one differs
resolve             settle what was left open: stepper, axes, stage, wire, fraction
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.compose import checks, own_meshes
from onefold.compose import cut_axes as model_axes
from onefold.compose.own_meshes import UnitRanks
from onefold.compose.stepping import stepper_of
from onefold.compose.tiers import budget_of, moments_of
from onefold.config import (
    STAGES,
    Inference,
    Offload,
    Precision,
    Stage,
    check_offload,
    offload_of,
    precision_of,
    stage_of,
)
from onefold.errors import ConfigError, Failure
from onefold.fit.bounds import RankMemory
from onefold.fit.choices import least_fraction, lowest_stage
from onefold.fit.residents import with_residents
from onefold.fit.share_weights import AUTO, is_auto, unless_even, weights_of
from onefold.fit.shares import choose
from onefold.layout.units import (
    Owned,
    UnitChoice,
    UnitPlan,
    owned_parameters,
    plan_units,
    uncompiled,
)
from onefold.planner.expectation import needs_of
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.wire.collectives import Group
from onefold.wire.devices import check_devices, device_of
from onefold.wire.ranks import Ranks, local_place, meet, two_axes_of_launcher
from onefold.wire.together import collect, difference
from onefold.wire_config import Wire, resolve_wire, wire_of


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments of `onefold.shard`, as they were given."""

    stage: object = 3
    units: UnitChoice = None
    precision: object = None
    offload: object = None
    wire: object = None
    shares: object = None
    inference: Inference | None = None


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """The objects that a recipe is about."""

    module: nn.Module
    optimizers: list[Optimizer]
    parameters: list[Owned]
    plans: list[UnitPlan]


RankTiers = tuple[object, ...]
"""The tiers of one rank: of states, parameters, activations; the fraction, and who steps."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments that were found sound on this rank: a recipe with open choices."""

    parts: ModuleParts
    recipe: Recipe
    opens_stage: bool  # stage="auto"
    names_wire: bool  # a name means less where a mesh has fewer axes
    opens_shares: bool = False  # shares="auto"
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # that computes
    tiers: tuple[RankTiers, ...] = ()  # of every rank, which each chooses for itself

    @property
    def mixes_tiers(self) -> bool:
        """True if ranks have chosen different tiers."""
        return len(set(self.tiers)) > 1

    def digest(self) -> list[str]:
        """One line for each choice that ranks must share. A rank's tiers are its own."""
        shares = repr(AUTO) if self.opens_shares else self.recipe.shares
        lines = self.recipe.digest()
        return [f"shares={shares}", *(each for each in lines if not each.startswith(_OWN_CHOICES))]


_OWN_CHOICES = (
    *(f"Offload.{n}=" for n in ("optimizer", "parameters", "activations", "fraction", "step")),
    "shares=",
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The recipe, the ranks and the device it is for, and the reasons for what was left open."""

    recipe: Recipe
    ranks: Ranks
    device: torch.device
    own: tuple[UnitRanks | None, ...] = ()  # by unit: of a mesh of its own
    why_stage: str = ""
    why_fraction: str = ""
    why_stepper: str = ""
    why_shares: str = ""
    any_offloads: bool = False  # some rank's state leaves the device


def examine(module: nn.Module, optimizer: object, choices: Choices, data: Group) -> Asked:
    """Check one rank's arguments without touching anything; `data` is the group to shard over."""
    opens_stage = choices.stage == "auto"
    row = stage_of(3 if opens_stage else choices.stage)  # stage 3 has every tier
    dtypes = precision_of(choices.precision)
    tiers = offload_of(choices.offload)
    check_offload(tiers, row)
    optimizers = checks.as_list(optimizer)
    module = uncompiled(module)
    checks.check_module(module)
    parameters = owned_parameters(module)
    checks.check_parameters(parameters)
    checks.check_optimizers(optimizers, parameters)
    is_inference = choices.inference is not None
    opens_shares = is_auto(choices.shares)
    shares = None if opens_shares or choices.shares is None else weights_of(choices.shares)
    model_axes.claim(module, parameters, data)
    others = {"shares=": choices.shares, "onefold.stream": choices.inference}
    model_axes.check_choices(parameters, optimizers, others=others)
    plans = plan_units(
        module, choices.units, tiers.tile or 0, tiles_tables=is_inference, parameters=parameters
    )
    _order_members(plans, optimizers)
    recipe = Recipe(
        stage=row, precision=dtypes, offload=tiers, wire=wire_of(choices.wire),
        shares=shares, inference=choices.inference,
        units=tuple(
            UnitRecipe(
                plan.name,
                tuple(_member(owned, dtypes) for owned in plan.members),
                plan.tile_nbytes,
                is_joined=index > 0 and plan.joins(plans[index - 1]),
                ranks=own.everyone.world_size if (own := own_meshes.ranks_of(plan)) else 0,
            )
            for index, plan in enumerate(plans)
        ),
    )  # fmt: skip
    parts = ModuleParts(module, optimizers, parameters, plans)
    names_wire = isinstance(choices.wire, str)
    return Asked(parts, recipe, opens_stage, names_wire, opens_shares)


def _member(owned: Owned, dtypes: Precision) -> Member:
    found = Member.of(owned.fqn, owned.values, dtypes, is_packed=owned.is_packed)
    if owned.model is None:
        return found
    trains = owned.parameter.requires_grad  # a local tensor does not say so
    return replace(found, requires_grad=trains, cut=str(owned.model))


def _order_members(plans: Sequence[UnitPlan], optimizers: Sequence[Optimizer]) -> None:
    """Let parameters of one optimizer group lie together: one fused call steps them."""
    group_of = {
        id(tensor): index
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }
    for plan in plans:
        plan.members.sort(key=lambda owned: group_of.get(id(owned.parameter), len(group_of)))


def examine_together(
    ranks: Ranks, examine_mine: Callable[[], Asked], module: object = None
) -> Asked:
    """Examine on every rank, and compare; every rank raises if one differs or fails.

    Ranks of the model axes of `module` compare, too.
    """
    group, own = ranks.everyone, list[Asked]()

    def examine_and_describe() -> _Said:
        asked = examine_mine()
        device = device_of(asked.parts.parameters, group, ranks.mesh)
        asked = replace(asked, recipe=_on_ranks(asked.recipe, ranks), device=device)
        own.append(asked)
        places = own_meshes.places_of(asked.parts.module, asked.parts.plans, group)
        return _Said(asked.digest(), places, _tiers_in(asked.recipe.offload))

    def judge(axis: Group, said: Sequence[_Said]) -> Failure | None:
        if axis is group and (clash := own_meshes.clash_of([rank.places for rank in said])):
            return Failure(ConfigError, str(clash))
        hint = "build the module from the same configuration everywhere"
        digests = [rank.digest for rank in said]
        return difference(axis, digests, "module and choices", hint, ConfigError)

    axes = [group, *model_axes.axes_of(module)]
    said = collect(axes, examine_and_describe, ConfigError, judge)
    return replace(own[0], tiers=tuple(rank.tiers for rank in said))


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank lets the others compare."""

    digest: list[str]
    places: list[own_meshes.MeshPlace]
    tiers: RankTiers


def _tiers_in(offload: Offload) -> RankTiers:
    names = ("optimizer", "parameters", "activations", "fraction", "step")
    return (*(getattr(offload, name) for name in names), bool(offload.paths))


def resolve(asked: Asked, ranks: Ranks) -> Resolved:
    """Settle every open choice, the same on all ranks. A collective where one is open."""
    group, parts, recipe = ranks.everyone, asked.parts, asked.recipe
    device = asked.device
    check_devices(device, group)
    checks.check_mixed_tiers(asked.tiers, device.type, opens_stage=asked.opens_stage)
    alike = Group.of(None) if asked.mixes_tiers else group  # ranks that settle tiers together
    offload, why_stepper = stepper_of(recipe.offload, device, alike)
    found = ranks if recipe.wire.is_plain else meet(two_axes_of_launcher(ranks, device))
    recipe = replace(
        _on_ranks(recipe, found), offload=offload, device_type=device.type,
        num_moments=_num_moments(parts),
    )  # fmt: skip
    adapts = asked.names_wire or found.is_flat  # a script for nodes runs on one of them, too
    memory, why_stage = RankMemory(device, local_place(group)[1], group), ""
    has_room = False  # for even shares
    if asked.opens_stage:
        fitting = _stages(recipe, adapts=adapts)
        chosen, why_stage = lowest_stage(fitting, partial(needs_of, micro_batches=2), memory)
        recipe, has_room = chosen or _at_stage(recipe, STAGES[3], adapts=adapts), bool(chosen)
    else:
        recipe = _at_stage(recipe, recipe.stage, adapts=adapts)
    if asked.mixes_tiers and recipe.keeps_weights:
        raise checks.mixed_tiers("the same tiers on every rank, for a second shard in each node")
    lies = (each.nbytes for each in parts.parameters if each.parameter.device == device)
    held = {memory.near: sum(lies)}
    measures = asked.opens_shares and not has_room
    recipe, why_shares = choose(recipe, needs_of, memory, held, is_auto=measures)
    why_fraction = ""
    if recipe.offload.fraction == "auto" and recipe.offload.optimizer != "device":
        rank = found.shards(are_replicas=recipe.are_replicas).rank
        states = budget_of(recipe, parts.plans, parts.optimizers, rank).states
        fractions = collect(alike, partial(least_fraction, recipe, states, needs_of, memory))
        fraction, why_fraction = max(fractions)  # that of the rank with the least room
        recipe = replace(recipe, offload=replace(recipe.offload, fraction=fraction))
    chosen_units = recipe.offloaded_units([unit.numel for unit in recipe.units])
    units = tuple(
        replace(unit, is_offloaded=is_chosen)
        for unit, is_chosen in zip(recipe.units, chosen_units, strict=True)
    )
    recipe = with_residents(replace(recipe, units=units))
    own = own_meshes.meet_all(parts.plans, found)
    own_meshes.connect_experts(parts.module, found)
    any_offloads = any(tiers != _tiers_in(Offload()) for tiers in asked.tiers)
    return Resolved(
        recipe, found, device, own, why_stage, why_fraction, why_stepper, why_shares, any_offloads
    )


def _on_ranks(recipe: Recipe, ranks: Ranks) -> Recipe:
    axes, group = ranks.axes, ranks.everyone
    near = axes.local_world_size if axes else local_place(group)[1]
    has_axes = axes is not None
    return replace(recipe, world_size=group.world_size, local_world_size=near, has_axes=has_axes)


def _at_stage(recipe: Recipe, stage: Stage, *, adapts: bool) -> Recipe:
    """The recipe at a stage; `ConfigError` if the stage cannot have its tiers or its wire."""
    check_offload(recipe.offload, stage)
    wire = Wire()  # alone, no messages are sent
    if recipe.world_size > 1:
        has_axes, offload = recipe.has_axes, recipe.offload
        wire = resolve_wire(recipe.wire, stage, offload, has_axes=has_axes, adapts=adapts)
    found = replace(recipe, stage=stage, wire=wire)
    checks.check_shares(found.shares, found)
    return replace(found, shares=unless_even(found.shares))


def _stages(recipe: Recipe, *, adapts: bool) -> Iterator[Recipe]:
    """The recipe at each stage that can have its tiers and its wire."""
    for stage in STAGES.values():
        try:
            found = _at_stage(recipe, stage, adapts=adapts)
        except ConfigError:
            continue
        yield found


def _num_moments(parts: ModuleParts) -> int:
    """Optimizer states per element of the largest unit that trains."""
    trained = [plan for plan in parts.plans if plan.is_trained]
    largest = sorted(trained, key=lambda plan: plan.numel)[-1:]
    return sum(len(moments_of(plan, plan.dtype, parts.optimizers)) for plan in largest)
