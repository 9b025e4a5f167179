"""Resolve "auto" where a module is sharded: the stage, and the share of states off the device.

The batch is not known then, so a share of the free memory is left for activations. The rest is the
forecast of an engine without activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from onefold.config import Offload, stage_of
from onefold.errors import ConfigError, expected
from onefold.host import free_host_nbytes
from onefold.planner.candidates import OFFLOADS, WAYS
from onefold.planner.estimate import bare
from onefold.planner.memory import forecast
from onefold.planner.trace import Trace
from onefold.recipe import Recipe
from onefold.text import format_bytes
from onefold.wire.collectives import Group

ACTIVATIONS_SHARE = 0.25
"""The share of the device's free memory that is left for activations and messages."""


def free_nbytes(device: torch.device, local_world_size: int) -> int:
    """Return the bytes that this rank may still take of the memory that computes."""
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    return free_host_nbytes() // local_world_size


def free_on_all(device: torch.device, local_world_size: int, group: Group) -> int:
    """Return the least `free_nbytes` of the ranks of `group`. A collective."""
    free = free_nbytes(device, local_world_size)
    if group.world_size == 1:
        return free
    everyone: list[Any] = group.all_gather_object(free)
    return min(everyone)


def room_of(free: int) -> int:
    """Return the share of free bytes that is not left for activations and messages."""
    return int((1 - ACTIVATIONS_SHARE) * free)


def nbytes_without_activations(recipe: Recipe) -> int:
    """Return the most bytes that an engine with these units holds by itself."""
    return forecast(bare(recipe.units), recipe).memory_nbytes


@dataclass(frozen=True, slots=True)
class Expectation:
    """The bytes that an engine should hold. It keeps numbers, no parameter."""

    trace: Trace  # without activations
    recipe: Recipe
    rank: int | None = None  # whose share is expected; None: the largest

    @staticmethod
    def of(recipe: Recipe, rank: int | None = None) -> Expectation:
        """Make the expectation of a module that is about to be sharded."""
        return Expectation(bare(recipe.units), recipe, rank if recipe.shares else None)

    def peaks(self, *, accumulates: bool) -> dict[str, int]:
        """Return the most bytes of each kind in CPU and device memory, and of all ("all")."""
        found = forecast(
            self.trace, self.recipe, accumulate=2 if accumulates else 1, rank=self.rank
        )
        kinds: dict[str, int] = {}
        for (kind, tier), nbytes in found.most.items():
            if tier != "disk":
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds | {"all": found.peaks["device"] + found.peaks.get("cpu", 0)}

    def smallest_change(self, shortage: int) -> str:
        """Describe the nearest way to train that holds `shortage` bytes less."""
        mine = self.recipe
        now = forecast(self.trace, mine).memory_nbytes
        for number, name in WAYS:
            asked = replace(mine, stage=stage_of(number), offload=OFFLOADS[name])
            if number < mine.stage.number or asked == mine:
                continue
            saved = now - forecast(self.trace, asked).memory_nbytes
            if saved >= shortage:
                word = "disk:PATH" if name == "disk" else name
                tiers = f', offload="{word}"' if name != "none" else ""
                return f"stage={number}{tiers} holds {format_bytes(saved)} less"
        return "smaller micro-batches, recompute or more ranks: states alone cannot give as much"


def lowest_stage(
    recipes: Iterable[Recipe], device: torch.device, group: Group, local_world_size: int
) -> tuple[Recipe | None, str]:
    """Choose the first recipe whose states fit on every rank of `group`, and say why. A collective.

    Args:
        recipes: the same module at each stage that has such tiers and such a wire, lowest first.
        device: the device that computes.
        group: all ranks that train.
        local_world_size: ranks that share this host's memory.

    Returns:
        The recipe, or None where none fits; the reason, for people.
    """
    free = free_on_all(device, local_world_size, group)
    room, before = room_of(free), ""
    for recipe in recipes:
        need, number = nbytes_without_activations(recipe), recipe.stage.number
        if need <= room:
            why = f"stage {number} holds {format_bytes(need)} of {format_bytes(free)} free"
            return recipe, before + why
        before = f"stage {number} would hold {format_bytes(need)}, "
    hint = "offload more, or take more ranks"
    return None, f"{before}of {format_bytes(free)} free, and no stage holds less: {hint}"


def room_to_keep(recipe: Recipe, device: torch.device, group: Group, budget: int | None) -> int:
    """Return the bytes of unsharded weights that every rank may keep. A collective."""
    if budget is not None and (not isinstance(budget, int) or budget < 0):  # pyright: ignore
        raise ConfigError(expected("a budget in bytes, from 0 on", repr(budget), hint="e.g. 2**30"))
    if not recipe.frees_after_forward:
        return 0  # nothing is freed
    room = room_of(free_nbytes(device, recipe.local_world_size))
    if budget is not None:
        room = min(room, budget)
    rooms: list[Any] = group.all_gather_object(room) if group.world_size > 1 else [room]
    return min(rooms)


def least_fraction(
    recipe: Recipe, states: int, device: torch.device, local_world_size: int
) -> tuple[float, str]:
    """Choose the smallest share of `states`, bytes, that must leave the device, and say why.

    States that stay are stepped at the device's own bandwidth and wait for nothing.
    """
    free = free_nbytes(device, local_world_size)
    others = nbytes_without_activations(replace(recipe, offload=Offload(), num_moments=0))
    room = (1 - ACTIVATIONS_SHARE) * free - others
    share = 1 - max(0.0, min(1.0, room / max(1, states)))
    why = (
        f"of {states:,} bytes of optimizer state {max(0, int(room)):,} have room on the "
        f"device ({free:,} bytes are free)"
    )
    return share, why
