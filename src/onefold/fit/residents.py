"""Which units of a streamed module stay in device memory, for a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.errors import ConfigError
from onefold.fit.kept_units import spread
from onefold.layout.flat import UnitBytes, unit_bytes
from onefold.recipe import Recipe

MIN_PREFETCH = 1
"""Units that are read ahead at least: without one, nothing is read while a unit computes."""

NUM_TILES = 2
"""Tiles of a weight in row blocks that are alive at a time: one computes, one is read."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """The bytes of units that the same modules use: they are unsharded together."""

    units: tuple[int, ...]  # positions
    nbytes: int  # unsharded and decoded
    largest: int  # of one of its units


def with_residents(recipe: Recipe) -> Recipe:
    """Return the recipe with the units that stay, and the room for unsharded weights.

    A recipe that trains is returned as it is. Raises `ConfigError` if the budget is less than one
    block, one unit more, and what rests on the device.
    """
    inference = recipe.inference
    if inference is None:
        return recipe
    held = [
        unit_bytes(unit.members, recipe, is_tiled=unit.tile_nbytes > 0) for unit in recipe.units
    ]
    near = sum(unit_held.weight for unit_held in held) if recipe.rests_near else 0
    tiles = NUM_TILES * max((unit.tile_nbytes for unit in recipe.units), default=0)
    blocks, stacks = _blocks(recipe, held), stack_nbytes(recipe)
    room = inference.budget - near - tiles - stacks
    total = sum(block.nbytes for block in blocks)
    if total <= room:
        stays, prefetch = {unit for block in blocks for unit in block.units}, inference.prefetch
    else:
        prefetch = next(
            (ahead for ahead in range(inference.prefetch, MIN_PREFETCH - 1, -1)
             if _ring(blocks, ahead) <= room),
            0,
        )  # fmt: skip
        if prefetch == 0:
            raise _too_small(recipe, blocks, near, tiles, stacks)
        kept = spread([block.nbytes for block in blocks], room - _ring(blocks, prefetch))
        stays = {unit for at in kept for unit in blocks[at].units}
    units = tuple(replace(unit, stays=index in stays) for index, unit in enumerate(recipe.units))
    return replace(recipe, units=units, inference=replace(inference, room=room, prefetch=prefetch))


def stack_nbytes(recipe: Recipe) -> int:
    """Bytes for the numbers of packed stacks (experts): those of one unit at a time."""
    return max((sum(m.stack_nbytes for m in unit.members) for unit in recipe.units), default=0)


def _blocks(recipe: Recipe, held: Sequence[UnitBytes]) -> list[BlockBytes]:
    """Blocks in the order of the module; tiled units are in none."""
    blocks: list[BlockBytes] = []
    for index, (unit, unit_held) in enumerate(zip(recipe.units, held, strict=True)):
        if unit.tile_nbytes:
            continue
        nbytes = unit_held.unsharded + unit_held.decoded
        if unit.is_joined and blocks:
            last = blocks[-1]
            blocks[-1] = BlockBytes(
                (*last.units, index), last.nbytes + nbytes, max(last.largest, nbytes)
            )
        else:
            blocks.append(BlockBytes((index,), nbytes, nbytes))
    return blocks


def _ring(blocks: Sequence[BlockBytes], ahead: int) -> int:
    """Bytes of the block that computes and of `ahead` units behind it, wherever the pass is."""
    largest = max((block.nbytes for block in blocks), default=0)
    return largest + ahead * max((block.largest for block in blocks), default=0)


def _too_small(
    recipe: Recipe, blocks: Sequence[BlockBytes], near: int, tiles: int, stacks: int
) -> ConfigError:
    ring = _ring(blocks, MIN_PREFETCH)
    parts = [f"{ring:,} for the largest block and one unit that is read ahead"]
    parts += [f"{tiles:,} for {NUM_TILES} row blocks"] if tiles else []
    parts += [f"{stacks:,} for the numbers of one unit's experts"] if stacks else []
    parts += [f"{near:,} for weights that rest on the device"] if near else []
    assert recipe.inference is not None, "a recipe that trains has no budget"
    hint = 'a larger budget, rest="int4", or smaller units'
    if near:
        hint = 'offload="disk:PATH", where weights do not rest in this memory; or rest="int4"'
    return ConfigError(
        f"a budget of at least {ring + near + tiles + stacks:,} bytes ({', '.join(parts)})",
        f"{recipe.inference.budget:,} bytes",
        hint=hint,
    )
