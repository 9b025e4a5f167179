"""One unit under a recipe: its bytes at rest, and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from onefold.layout.flat import UnitBytes, unit_bytes
from onefold.planner.messages import UnitMessages, messages_of, spread_of
from onefold.planner.trace import UnitTrace
from onefold.recipe import Member, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit(UnitBytes):
    """One unit on rank 0, whose pieces are the longest."""

    name: str
    second: int  # weights at rest for the node
    sums: int  # gradients that are summed inside the node
    feedback: int  # residuals of coded gradients
    messages: UnitMessages


def planned_unit(unit: UnitTrace, recipe: Recipe) -> PlannedUnit:
    """Compute the bytes and messages of a unit."""
    members = unit.members
    found, messages = unit_bytes(members, recipe), _messages(members, recipe)
    is_trained = any(member.requires_grad for member in members)
    return PlannedUnit(
        **{each.name: getattr(found, each.name) for each in fields(found)},
        name=unit.name,
        second=messages.second * members[0].compute_itemsize if recipe.keeps_weights else 0,
        sums=messages.sums * members[0].itemsize if is_trained else 0,
        feedback=4 * messages.owed if recipe.wire.feedback else 0,
        messages=messages,
    )


def _messages(members: Sequence[Member], recipe: Recipe) -> UnitMessages:
    world, is_nccl = recipe.world_size, recipe.device_type != "cpu"
    if not recipe.is_sharded:
        return spread_of(members, world, is_nccl=is_nccl)
    near = recipe.local_world_size if recipe.has_axes else 0
    return messages_of(members, world, near, recipe.wire, is_nccl=is_nccl)
