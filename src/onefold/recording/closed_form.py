"""The closed form of the bytes of training states on a rank, for the stage that ran and stage 0."""

from __future__ import annotations

from dataclasses import replace

from onefold.config import STAGES, Offload
from onefold.layout.flat import unit_bytes
from onefold.recipe import Recipe
from onefold.wire_config import Wire

KINDS: tuple[str, ...] = ("weight", "master", "grad", "optimizer")
"""Kinds of state that stay between backward and step, which the closed form covers."""


def expected_nbytes(recipe: Recipe, shard: int = 0) -> dict[str, int]:
    """Compute the bytes by kind on a rank once every parameter has a gradient.

    Units that are stepped in backward keep no gradient.
    """
    totals = dict.fromkeys(KINDS, 0)
    for unit in recipe.units:
        here = None if unit.ranks else shard  # a mesh of its own: at most
        nbytes = unit_bytes(
            unit.members, recipe.on(unit.ranks), here, is_tiled=unit.tile_nbytes > 0
        )
        is_early = recipe.offload.step_in_backward and unit.is_offloaded
        totals["weight"] += nbytes.weight
        totals["master"] += nbytes.master if nbytes.has_master or unit.is_offloaded else 0
        totals["grad"] += 0 if is_early else nbytes.grad
        totals["optimizer"] += nbytes.moments
    return totals


def stage0_nbytes(recipe: Recipe) -> dict[str, int]:
    """Compute the bytes by kind that every rank would hold at stage 0, all on the device."""
    return expected_nbytes(replace(recipe, stage=STAGES[0], offload=Offload(), wire=Wire()))
