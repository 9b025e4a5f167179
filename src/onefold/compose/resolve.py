"""From the arguments of `onefold.shard` to a recipe, the same on every rank.

examine             one rank: check the arguments, put words into values
examine_together    all ranks: compare them; `ConfigError` everywhere if one differs
resolve             settle what was left open: stepper, axes, stage, wire, fraction
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim import Optimizer

from onefold.compose import checks, group_order, own_meshes
from onefold.compose import cut_axes as model_axes
from onefold.compose.parts import Arguments, Choices, ModuleParts, RankTiers, Resolved
from onefold.compose.stepping import stepper_of
from onefold.compose.tiers import budget_of, elementwise, moments_of
from onefold.config import (
    STAGES,
    Offload,
    Stage,
    check_offload,
    offload_of,
    precision_of,
    stage_of,
)
from onefold.engine.run_facts import Forecaster
from onefold.errors import ConfigError, Failure
from onefold.fit.bounds import RankMemory
from onefold.fit.kept_units import with_residents
from onefold.fit.shares import (
    choose,
    is_auto,
    least_fraction,
    lowest_stage,
    unless_even,
    weights_of,
)
from onefold.layout.module_tree import ModuleTree
from onefold.layout.one_rank import of_one_rank
from onefold.layout.units import UnitPlan, owned_parameters, plan_units
from onefold.recipe import Recipe, UnitRecipe
from onefold.wire.collectives import Group
from onefold.wire.devices import check_devices, device_of
from onefold.wire.ranks import Ranks, local_place, meet, num_processes, two_axes_of_launcher
from onefold.wire.together import collect, difference
from onefold.wire_config import Wire, resolve_wire, wire_of


def examine(tree: ModuleTree, optimizer: object, choices: Choices, data: Group) -> Arguments:
    """Check one rank's arguments without touching anything; `data` is the group to shard over."""
    opens_stage = choices.stage == "auto"
    row = stage_of(3 if opens_stage else choices.stage)  # stage 3 has every tier
    dtypes = precision_of(choices.precision)
    tiers = offload_of(choices.offload)
    check_offload(tiers, row)
    optimizers = checks.as_list(optimizer)
    checks.check_module(tree)
    parameters = owned_parameters(tree)
    checks.check_parameters(parameters)
    checks.check_optimizers(optimizers, parameters)
    is_inference = choices.inference is not None
    opens_shares = is_auto(choices.shares)
    shares = None if opens_shares or choices.shares is None else weights_of(choices.shares)
    model_axes.claim(tree, parameters, data)
    others = {"shares=": choices.shares, "onefold.stream": choices.inference}
    model_axes.check_choices(parameters, optimizers, others=others)
    plans = plan_units(
        tree,
        choices.units,
        tiers.tile or 0,
        tiles_tables=is_inference,
        parameters=parameters,
        precision=dtypes,
    )
    recipe = Recipe(
        stage=row, precision=dtypes, offload=tiers, wire=wire_of(choices.wire),
        shares=shares, inference=choices.inference,
    )  # fmt: skip
    is_cut = any(owned.model is not None for owned in parameters)
    if recipe.is_alone and choices.units is None and num_processes() == 1 and not is_cut:
        plans = of_one_rank(plans, tree.root)
    _order_members(plans, optimizers)
    recipe = replace(
        recipe,
        units=tuple(
            UnitRecipe(
                plan.name,
                tuple(owned.member(dtypes.compute) for owned in plan.members),
                plan.tile_nbytes,
                is_joined=index > 0 and plan.joins(plans[index - 1]),
                ranks=own.everyone.world_size if (own := own_meshes.ranks_of(plan)) else 0,
            )
            for index, plan in enumerate(plans)
        ),
    )  # fmt: skip
    parts = ModuleParts(tree, optimizers, parameters, plans)
    names_wire = isinstance(choices.wire, str)
    return Arguments(parts, recipe, opens_stage, names_wire, opens_shares)


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
    ranks: Ranks, examine_mine: Callable[[], Arguments], tree: ModuleTree
) -> Arguments:
    """Examine on every rank, and compare; every rank raises if one differs or fails.

    Ranks of the model axes of the module compare, too.
    """
    group, own = ranks.everyone, list[Arguments]()

    def examine_and_describe() -> _Said:
        arguments = examine_mine()
        device = device_of(arguments.parts.parameters, group, ranks.mesh)
        arguments = replace(arguments, recipe=_on_ranks(arguments.recipe, ranks), device=device)
        own.append(arguments)
        places = own_meshes.places_of(tree, arguments.parts.plans, group)
        order = group_order.digest_of(arguments.parts.optimizers, arguments.parts.parameters)
        return _Said(arguments.digest(), places, _tiers_in(arguments.recipe.offload), order)

    def judge(axis: Group, said: Sequence[_Said]) -> Failure | None:
        if axis is group and (clash := own_meshes.clash_of([rank.places for rank in said])):
            return Failure(ConfigError, str(clash))
        hint = "build the module from the same configuration everywhere"
        digests = [rank.digest for rank in said]
        return difference(axis, digests, "module and choices", hint, ConfigError)

    axes = [group, *model_axes.axes_of(tree)]
    said = collect(axes, examine_and_describe, ConfigError, judge)
    if len({rank.order for rank in said}) > 1:
        group_order.take_order(group, own[0].parts.optimizers, own[0].parts.parameters)
    return replace(own[0], tiers=tuple(rank.tiers for rank in said))


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank lets the others compare."""

    digest: list[str]
    places: list[own_meshes.MeshPlace]
    tiers: RankTiers
    order: str  # of parameters in optimizer groups


def _tiers_in(offload: Offload) -> RankTiers:
    names = ("optimizer", "parameters", "activations", "fraction", "step")
    return (*(getattr(offload, name) for name in names), bool(offload.paths))


@dataclass(frozen=True, slots=True)
class _Task:
    """The facts that settlers decide by."""

    arguments: Arguments
    alike: Group  # ranks that settle tiers together
    memory: RankMemory


def resolve(arguments: Arguments, ranks: Ranks, forecaster: Forecaster) -> Resolved:
    """Settle every open choice, the same on all ranks. A collective where one is open."""
    group, device = ranks.everyone, arguments.device
    check_devices(device, group)
    checks.check_mixed_tiers(arguments.tiers, device.type, opens_stage=arguments.opens_stage)
    alike = Group.from_handle(None) if arguments.mixes_tiers else group
    task = _Task(arguments, alike, RankMemory(device, local_place(group)[1], group))
    any_offloads = any(tiers != _tiers_in(Offload()) for tiers in arguments.tiers)
    recipe = arguments.recipe
    if arguments.mixes_tiers:
        used = {str(tier) for tiers in arguments.tiers for tier in tiers[:2]}
        recipe = replace(recipe, tiers_of_others=tuple(sorted(used)))
    settled = Resolved(recipe, ranks, device, forecaster, any_offloads=any_offloads)
    for settle in _SETTLERS:
        settled = settle(task, settled)
    return settled


def _settle_stepper(task: _Task, settled: Resolved) -> Resolved:
    """Choose who steps states in CPU memory; count the moments that they have."""
    recipe, device = settled.recipe, settled.device
    offload, why = stepper_of(recipe.offload, device, task.alike)
    moments = _num_moments(task.arguments.parts)
    recipe = replace(recipe, offload=offload, device_type=device.type, num_moments=moments)
    return replace(settled, recipe=recipe, why_stepper=why)


def _settle_axes(_: _Task, settled: Resolved) -> Resolved:
    """Take the hosts of the launcher for nodes, where the wire tells nodes apart.

    An accelerator's gradients cross between hosts in a hop of their own, without being asked.
    """
    recipe, ranks = settled.recipe, settled.ranks
    if not recipe.wire.is_plain:
        ranks = meet(two_axes_of_launcher(ranks, settled.device))
    recipe = _on_ranks(recipe, ranks)
    if ranks.axes is None and recipe.inference is None and sends_itself(ranks, settled.device):
        ranks = meet(two_axes_of_launcher(ranks, settled.device, is_asked=False))
        if ranks.axes is not None:
            near = ranks.axes.local_world_size
            recipe = replace(recipe, has_hosts=True, local_world_size=near)
    return replace(settled, recipe=recipe, ranks=ranks)


def sends_itself(ranks: Ranks, device: torch.device) -> bool:
    """True if the device sends messages itself (NCCL): several hosts are then worth two hops."""
    return device.type != "cpu" and ranks.everyone.is_nccl


def _settle_stage(task: _Task, settled: Resolved) -> Resolved:
    """Choose the lowest stage that fits, if it is open, and the wire at the stage."""
    recipe, arguments, why, has_room = settled.recipe, task.arguments, "", False
    adapts = arguments.names_wire or settled.ranks.is_flat  # a script for nodes runs on one, too
    if arguments.opens_stage:
        needs = partial(settled.forecaster.needs_of, micro_batches=2)
        lowest, why = lowest_stage(_stages(recipe, adapts=adapts), needs, task.memory)
        recipe, has_room = lowest or _at_stage(recipe, STAGES[3], adapts=adapts), bool(lowest)
    else:
        recipe = _at_stage(recipe, recipe.stage, adapts=adapts)
    if arguments.mixes_tiers and recipe.keeps_weights:
        raise checks.mixed_tiers("the same tiers on every rank, for a secondary shard in each node")
    return replace(settled, recipe=recipe, why_stage=why, has_room=has_room)


def _settle_shares(task: _Task, settled: Resolved) -> Resolved:
    """Choose shares by memory, if they are open and even ones may not fit."""
    parameters, memory = task.arguments.parts.parameters, task.memory
    here = (owned.nbytes for owned in parameters if owned.parameter.device == settled.device)
    is_auto = task.arguments.opens_shares and not settled.has_room
    needs, held = settled.forecaster.needs_of, {memory.near: sum(here)}
    recipe, why = choose(settled.recipe, needs, memory, held, is_auto=is_auto)
    return replace(settled, recipe=recipe, why_shares=why)


def _settle_fraction(task: _Task, settled: Resolved) -> Resolved:
    """Choose how much of the states leaves the device: as the rank with the least room needs."""
    recipe, parts = settled.recipe, task.arguments.parts
    if recipe.offload.fraction != "auto" or recipe.offload.optimizer == "device":
        return settled
    rank = settled.ranks.shards(are_replicas=recipe.are_replicas).rank
    states = budget_of(recipe, parts.plans, parts.optimizers, rank).states
    needs = settled.forecaster.needs_of
    least = partial(least_fraction, recipe, states, needs, task.memory)
    fraction, why = max(collect(task.alike, least))
    recipe = replace(recipe, offload=replace(recipe.offload, fraction=fraction))
    return replace(settled, recipe=recipe, why_fraction=why)


def _settle_units(_: _Task, settled: Resolved) -> Resolved:
    """Choose the units whose states leave the device, and those that stay unsharded."""
    recipe = settled.recipe
    are_offloaded = recipe.offloaded_units([unit.numel for unit in recipe.units])
    pairs = zip(recipe.units, are_offloaded, strict=True)
    units = tuple(replace(unit, is_offloaded=is_offloaded) for unit, is_offloaded in pairs)
    return replace(settled, recipe=with_residents(replace(recipe, units=units)))


def _settle_own_meshes(task: _Task, settled: Resolved) -> Resolved:
    """Connect the ranks of units and experts that have a mesh of their own."""
    own = own_meshes.meet_all(task.arguments.parts.plans, settled.ranks)
    own_meshes.connect_experts(task.arguments.parts.tree, settled.ranks)
    return replace(settled, own=own)


_SETTLERS: tuple[Callable[[_Task, Resolved], Resolved], ...] = (
    _settle_stepper, _settle_axes, _settle_stage, _settle_shares, _settle_fraction, _settle_units,
    _settle_own_meshes,
)  # fmt: skip
"""One a choice, in the order in which they depend on one another."""


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
    recipe = replace(recipe, stage=stage, wire=wire)
    checks.check_shares(recipe.shares, recipe)
    return replace(recipe, shares=unless_even(recipe.shares))


def _stages(recipe: Recipe, *, adapts: bool) -> Iterator[Recipe]:
    """The recipe at each stage that can have its tiers and its wire."""
    for stage in STAGES.values():
        with suppress(ConfigError):
            yield _at_stage(recipe, stage, adapts=adapts)


def _num_moments(parts: ModuleParts) -> int:
    """Optimizer states per element of the largest unit that trains."""
    trained = [plan for plan in parts.plans if plan.is_trained]
    largest = sorted(trained, key=lambda plan: plan.numel)[-1:]
    optimizers = elementwise(parts.optimizers)
    return sum(len(moments_of(plan, plan.dtype, optimizers)) for plan in largest)
