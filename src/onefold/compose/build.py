"""From a recipe to objects: ledger, tiers, routes, units, engine, hooks.

Every object gets its collaborators in its constructor.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from onefold.compose import cut_axes as model_axes
from onefold.compose.cut_axes import AxesOfCuts
from onefold.compose.own_meshes import UnitRanks, check_adapters
from onefold.compose.parts import ModuleParts, Resolved
from onefold.compose.routes import Links, routes_of
from onefold.compose.tiers import budget_of, build_tiers, describe
from onefold.config import STAGES, Offload
from onefold.engine import guards
from onefold.engine.adapters import show_whole
from onefold.engine.engine import Engine
from onefold.engine.first_batch import compare_first_batches
from onefold.engine.hooks import (
    InferenceHooks,
    ModuleHooks,
    PartHooks,
    bring_inputs,
    hook,
    keep_dtypes,
)
from onefold.engine.joining import adopt_later, bind, replace_parameters
from onefold.engine.registry import ENGINE
from onefold.engine.run_facts import RunFacts
from onefold.engine.step_checks import check_step
from onefold.fit.communicators import communicator_sizes, words_of
from onefold.layout import packed
from onefold.layout.ledger import Ledger
from onefold.layout.module_tree import ModuleTree
from onefold.layout.statistics import buffers_dtype
from onefold.layout.units import Owned, UnitPlan, owned_parameters, plan_units
from onefold.recipe import Recipe
from onefold.tier import accelerator
from onefold.tier.device import PAGES_NBYTES, DeviceStore, return_free_memory
from onefold.tier.store import Store
from onefold.unit.context import Context, Tiers
from onefold.unit.cut_dtensor import WeightedMesh
from onefold.unit.deferred import Deferred
from onefold.unit.init import (
    agree_on_values,
    fill_buffers,
    initialise,
    materialise,
    move,
)
from onefold.unit.promises import Values, forget, promised_values
from onefold.unit.shortage import explain_at_exit, explained, explaining
from onefold.unit.unit import Unit
from onefold.wire.collectives import Group
from onefold.wire.peers import introduce
from onefold.wire.ranks import Ranks
from onefold.wire.together import together
from onefold.wire_config import Wire

LOG = logging.getLogger(__name__)

SHARDS = "fsdp"
"""The name of the axis over which parameters are cut, whatever the user's mesh calls it. PEFT takes
an axis of another name for tensor parallelism, and sizes adapters by the rows of one rank."""

Source = tuple[Deferred | None, Values | None]
"""Values of a module on `meta`: those that initialisers made, and promised ones."""


def build(parts: ModuleParts, resolved: Resolved) -> None:
    """Shard the module in place under a recipe. A collective."""
    recipe, ranks, device = resolved.recipe, resolved.ranks, resolved.device
    group, shards = ranks.everyone, ranks.shards(are_replicas=recipe.are_replicas)
    together(group, lambda: [check_step(optimizer, recipe) for optimizer in parts.optimizers])
    budget = budget_of(recipe, parts.plans, parts.optimizers, shards.rank)
    rests = describe(recipe, budget, resolved.why_fraction)
    LOG.info("rank %d: %s", group.rank, rests or "all state stays on the device")
    notes = (resolved.why_stage, resolved.why_shares, rests, resolved.why_stepper)
    words, shares = "; ".join(filter(None, notes)), [(recipe, shards.rank)]
    facts = RunFacts(resolved.forecaster, words, shares=shares)
    ledger = Ledger(
        advise=facts.smallest_change,
        rank=f"rank {group.rank} of {group.world_size}",
        handed_out=None if device.type == "cpu" else partial(accelerator.allocated, device),
    )
    with explained(ledger, "onefold.shard"):
        store = DeviceStore(device, is_read_into=recipe.reads_directly)
        is_agreed = resolved.any_offloads or recipe.offload != Offload()
        tiers = build_tiers(recipe, budget, store, ledger, group, is_agreed=is_agreed)
        axes = model_axes.join(_members(parts, resolved, None), group, shards, device.type)
        context = _context(resolved, store, ledger, tiers, axes)
        context, contexts = _contexts(parts, resolved, context)
        values = together(group, lambda: promised_values(parts.tree))
        originals = [owned.parameter for owned in parts.parameters]
        for owned in parts.parameters:
            if owned.is_packed and owned.table is None:
                for part, _ in owned.owners:
                    packed.prepare_module(part, owned.parameter)
        room = partial(explaining, ledger)
        made = together(
            group, lambda: initialise(parts.tree, parts.parameters, device, room, values)
        )
        forget(parts.tree)
        source: Source = (made, values)
        engine = Engine(
            parts.tree.root, partial(_units, parts, contexts, source), context, recipe=recipe,
            facts=facts, build_adapters=partial(_adapters, resolved),
        )  # fmt: skip
        _cast_buffers(parts.tree, resolved, group, source)
        if made is not None:
            made.advance()
        together(group, partial(_install, parts, engine, originals))
        ledger.forget_traffic()
    if device.type != "cpu":
        LOG.info("rank %d: %s", group.rank, words_of(communicator_sizes(engine)))
    explain_at_exit(engine)


def _install(parts: ModuleParts, engine: Engine, originals: list[nn.Parameter]) -> None:
    """Let the module and its optimizers refer to the engine."""
    module = parts.tree.root
    module.__dict__[ENGINE] = engine
    kind = InferenceHooks if engine.recipe.inference else ModuleHooks
    users = {index: plan.modules for index, plan in enumerate(parts.plans)}
    hook(engine, users, root=module, kind=kind)
    if engine.recipe.precision.compute is not None:  # else parts compute with weights at rest
        hook(engine, {i: plan.parts for i, plan in enumerate(parts.plans)}, kind=PartHooks)
        keep_dtypes(parts.tree.modules, engine.recipe.precision.compute)
    device = engine.context.store.device
    if device.type != "cpu" and engine.recipe.offload.parameters != "device":
        bring_inputs(module, device)
    guards.install(parts.tree, engine)
    show_whole(module, engine)
    compare_first_batches(module, engine.group)
    _join_optimizers(parts, engine, originals)


def _context(
    resolved: Resolved, store: Store, ledger: Ledger, tiers: Tiers, axes: AxesOfCuts
) -> Context:
    """Make the context of a module's units."""
    recipe, ranks = resolved.recipe, resolved.ranks
    precision = recipe.precision
    return Context(
        routes=routes_of(recipe, ranks, Links(resolved.device, ledger, precision.reduce)),
        store=store,
        ledger=ledger,
        mesh=_mesh(recipe, ranks),
        is_sharded=recipe.is_sharded,
        compute=precision.compute,
        master=precision.master,
        tiers=tiers,
        shares=recipe.shares,
        is_inference=recipe.inference is not None,
        reads_directly=recipe.reads_directly,
        num_flags=recipe.num_flags,
        uses_disk="disk" in recipe.tiers,
        phase=ranks.phase,
        meshes=axes.meshes,
        holders=axes.holders,
    )


def _mesh(recipe: Recipe, ranks: Ranks) -> DeviceMesh | None:
    """The mesh over which parameters at rest are shown as sharded."""
    shards = ranks.shards(are_replicas=recipe.are_replicas)
    if shards.handle is None or not recipe.is_sharded:
        return None
    mesh = DeviceMesh.from_group(shards.handle, recipe.device_type, mesh_dim_names=(SHARDS,))
    if recipe.shares is not None:
        mesh = WeightedMesh.over(mesh, recipe.shares)
    if ranks.everyone.peers is not None:
        introduce(mesh, ranks.everyone.peers)
    return mesh


def _members(parts: ModuleParts, resolved: Resolved, ranks: UnitRanks | None) -> list[Owned]:
    """The parameters of all units that travel among these ranks; None: among the module's."""
    pairs = zip(parts.plans, resolved.own, strict=True)
    return [owned for plan, own in pairs if own is ranks for owned in plan.members]


def _contexts(
    parts: ModuleParts, resolved: Resolved, context: Context
) -> tuple[Context, list[Context]]:
    """Give each unit the context of its ranks, and the module's the routes of all of them."""
    contexts: dict[UnitRanks | None, Context] = {}
    for unit, mine in zip(resolved.recipe.units, resolved.own, strict=True):
        if mine is not None and mine not in contexts:
            recipe, group = resolved.recipe.on(unit.ranks), mine.ranks.everyone
            divisor = len(mine.own.members) * mine.own.sources
            links = Links(resolved.device, context.ledger, recipe.precision.reduce, divisor)
            members = _members(parts, resolved, mine)
            axes = model_axes.join(members, group, group, recipe.device_type, context.everyone)
            contexts[mine] = replace(
                context, routes=routes_of(recipe, mine.ranks, links), shares=None, own=mine.own,
                mesh=_mesh(recipe, mine.ranks), meshes=axes.meshes, holders=context.everyone,
                num_flags=recipe.num_flags,
            )  # fmt: skip
    if contexts:
        others = tuple(apart.routes for apart in contexts.values())
        context = replace(context, routes=replace(context.routes, others=others))
    contexts[None] = context
    return context, [contexts[ranks] for ranks in resolved.own]


def _units(
    parts: ModuleParts, contexts: Sequence[Context], source: Source, engine: Engine
) -> list[Unit]:
    """Build the units one by one, so that one unit's unsharded values are alive at a time."""
    units, freed = list[Unit](), 0
    for index, (plan, context) in enumerate(zip(parts.plans, contexts, strict=True)):
        unit = Unit(
            plan, context, index, engine, keeps_gradients=engine.policy.keeps_gradients,
            is_offloaded=engine.recipe.units[index].is_offloaded,
        )  # fmt: skip
        _fill(unit, plan, context, source)
        units.append(unit)
        freed += unit.unsharded.tensor.nbytes
        if freed >= PAGES_NBYTES:  # it looks through the whole heap
            return_free_memory()
            freed = 0
    return units


def _adapters(resolved: Resolved, engine: Engine) -> list[Unit]:
    """Build units of parameters that joined the module after `shard`. A collective.

    Every rank holds all of them, as at stage 0, so they stay the objects that optimizers know.
    """
    module, store = engine.module(), engine.context.store
    assert module is not None, "its forward runs"
    recipe = replace(resolved.recipe, stage=STAGES[0], offload=Offload(), wire=Wire(), shares=None)
    tiers = replace(engine.context.tiers, weight=store, state=store, scratch=None)
    axes = AxesOfCuts(holders=engine.context.holders)
    context = _context(replace(resolved, recipe=recipe), store, engine.ledger, tiers, axes)
    tree = ModuleTree.from_root(module)
    room = partial(explaining, engine.ledger)
    made = initialise(tree, owned_parameters(tree), resolved.device, room)
    source: Source = (made, None)
    units: list[Unit] = []
    for plan in plan_units(tree, precision=recipe.precision):
        added = (o for o in plan.members if id(o.parameter) not in engine.by_sharded)
        members = [owned for owned in added if owned.table is None]
        check_adapters(members, recipe)
        if members:
            plan = replace(plan, name=f"{plan.name} (adapters)", members=members)
            index = len(engine.units) + len(units)
            keeps = engine.policy.keeps_gradients
            units.append(Unit(plan, context, index, engine, keeps_gradients=keeps))
            _fill(units[-1], plan, context, source)
            hook(engine, {index: plan.modules})
    if made is not None:
        fill_buffers(tree, resolved.device, *source)
        made.advance()
    guards.guard_parts(tree.modules, engine)
    return units


def _fill(unit: Unit, plan: UnitPlan, context: Context, source: Source) -> None:
    """Give a unit's parameters their values, keep this rank's shard, and free the rest."""
    device, room = context.store.device, partial(explaining, context.ledger)
    materialise(plan, device, room, *source)
    for owned in plan.members:  # unit by unit: the device never holds more than one
        with room(owned.parameter.nbytes):
            move(owned, device)
    originals = [owned.parameter for owned in plan.members]
    values = source[1]
    promised = {owned.fqn for owned in plan.members if values is not None and owned.fqn in values}
    own = [owned for owned in plan.members if owned.fqn not in promised]
    agree_on_values([owned.values.detach() for owned in own], context.routes.group)
    plain = [owned.values.detach() for owned in own if owned.model and owned.model.is_plain]
    agree_on_values(plain, context.everyone)
    unit.adopt(originals, values)
    originals.clear()


def _cast_buffers(tree: ModuleTree, resolved: Resolved, group: Group, source: Source) -> None:
    """Give buffers the values of rank 0, in the dtype of `Precision.buffers`."""
    fill_buffers(tree, resolved.device, *source)
    cast = dict[int, torch.Tensor]()
    for part in tree.modules:
        dtype = buffers_dtype(part, resolved.recipe.precision)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                is_cast = buffer.is_floating_point() and dtype is not None
                moved = buffer.to(resolved.device, dtype if is_cast else buffer.dtype)
                part._buffers[name] = cast[id(moved)] = moved
    agree_on_values(cast.values(), group)


def _join_optimizers(parts: ModuleParts, engine: Engine, originals: list[nn.Parameter]) -> None:
    """Put sharded parameters into the optimizers, and bind their steps to the engine."""
    sharded = {p.fqn: p.sharded for unit in engine.units for p in unit.parameters}
    replaced = {id(owned.parameter): sharded[owned.fqn] for owned in parts.parameters} | {
        id(original): sharded[owned.fqn]
        for original, owned in zip(originals, parts.parameters, strict=True)
    }
    for optimizer in parts.optimizers:
        replace_parameters(optimizer, replaced, originals)
        bind(optimizer, engine)
    adopt_later(engine)
