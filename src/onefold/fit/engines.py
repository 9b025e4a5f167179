"""The memory and the units of a module that is sharded already."""

from __future__ import annotations

from onefold.engine.engine import Engine
from onefold.fit.bounds import RankMemory, most_of_budget
from onefold.fit.kept_units import GatheredUnits


def memory_of(engine: Engine) -> RankMemory:
    """Return the memory of this rank, among the ranks of a module."""
    return RankMemory(engine.context.store.device, engine.recipe.local_world_size, engine.group)


def gathered_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights."""
    return GatheredUnits.of(engine.schedule.units, engine.policy.prefetch)


def trained_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights and gradients."""
    trains = [unit.requires_grad() for unit in engine.units]
    return GatheredUnits.of(engine.schedule.units, engine.policy.prefetch, trains)


def units_to_keep(engine: Engine, budget: int | None) -> frozenset[int]:
    """Choose the units that stay unsharded between evaluations; a collective where units move.

    `budget`: bytes of unsharded weights, at most; None: what fits.
    """
    if not engine.recipe.frees_after_forward:
        most_of_budget(budget)
        return frozenset()  # nothing is freed
    return gathered_units(engine).window(memory_of(engine).room_to_keep(budget))
