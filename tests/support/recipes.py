"""Recipes and conditions in the few words that tests of step times need."""

from __future__ import annotations

from typing import Any

from onefold.config import Offload, stage_of
from onefold.planner.costs import Conditions
from onefold.planner.simulate import StepTime, simulate
from onefold.recipe import Recipe
from onefold.wire_config import Wire

TIERS = ("optimizer", "parameters", "fraction", "step", "step_in_backward")
RANKS = ("local_world_size", "has_axes", "wire")

Way = tuple[Recipe, Conditions]


def way(stage: int, world_size: int, *, uses_rings: bool = True, **options: Any) -> Way:
    """A recipe and its conditions; other libraries' rings, on hosts of 8, if nothing else is said.

    `copies`: ranks that hold one copy of the states, on a mesh of two axes.
    """
    copies = options.pop("copies", 0)
    if copies:
        wire = Wire(secondary="optimizer")
        options |= {"local_world_size": copies, "has_axes": True, "wire": wire}
        options.setdefault("ranks_per_host", 8)
    tiers = {name: options.pop(name) for name in TIERS if name in options}
    ranks = {"local_world_size": 8} | {n: options.pop(n) for n in RANKS if n in options}
    offload = Offload(**tiers, disk="." if "disk" in tiers.values() else None)
    recipe = Recipe(stage=stage_of(stage), world_size=world_size, offload=offload, **ranks)
    return recipe, Conditions(uses_rings=uses_rings, **options)


def timed(work: Any, made: Way, machine: Any) -> StepTime:
    """The step of a way."""
    return simulate(work, made[0], machine, made[1])
