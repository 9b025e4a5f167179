"""Resolve "auto" where a module is sharded: the stage, and the share of states off the device.

The batch is not known then, so a share of the free memory is left for activations. A stage has to
fit if the run accumulates gradients, too: `needs` counts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from onefold.config import Offload
from onefold.fit.bounds import ACTIVATIONS_SHARE, RankMemory, room_of
from onefold.fit.lines import Line
from onefold.recipe import Recipe
from onefold.text import format_bytes

Needs = Callable[[Recipe], Mapping[str, int]]
"""The most bytes by tier that a rank holds without activations. The CPU's own tier is "cpu"."""


def lowest_stage(
    recipes: Iterable[Recipe], needs: Needs, memory: RankMemory
) -> tuple[Recipe | None, str]:
    """Choose the first recipe whose states fit on every rank, and say why. A collective.

    Args:
        recipes: the same module at each stage that has these tiers and this wire, lowest first.
        needs: bytes of a recipe.
        memory: that of this rank, among all ranks that train.

    Returns:
        The recipe, or None where none fits; the reason, for people.
    """
    free = memory.free_on_all()
    room, before = room_of(free), ""
    for recipe in recipes:
        need, number = needs(recipe)[memory.near], recipe.stage.number
        if need <= room:
            why = f"stage {number} holds {format_bytes(need)} of {format_bytes(free)} free"
            return recipe, before + why
        before = f"stage {number} would hold {format_bytes(need)}, "
    hint = "offload more, or take more ranks"
    return None, f"{before}of {format_bytes(free)} free, and no stage holds less: {hint}"


def least_fraction(
    recipe: Recipe, states: int, needs: Needs, memory: RankMemory
) -> tuple[float, str]:
    """Choose the smallest share of `states`, bytes, that must leave the device, and say why.

    States that stay are stepped at the device's own bandwidth and wait for nothing.
    """
    free = memory.free()
    others = needs(replace(recipe, offload=Offload(), num_moments=0))[memory.near]
    line = Line(memory.near, free, others, max(1, states))
    stays = max(0.0, line.most(ACTIVATIONS_SHARE))
    why = (
        f"of {states:,} bytes of optimizer state {int(stays * line.whole):,} have room on the "
        f"device ({free:,} bytes are free)"
    )
    return 1 - min(1.0, stays), why
